"""Finds the files of a folder of data: their endings, and folders in folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from hushfleet.errors import BadInput

ENDINGS = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".hif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""The endings of image files."""
SOUND_ENDINGS = (".aif", ".aiff", ".flac", ".mp3", ".oga", ".ogg", ".opus", ".wav")
ENDINGS_OF = {"folder": ENDINGS, "sound": SOUND_ENDINGS, "csv": (".csv",)}
"""The endings by the kind of data. Only files with one of them are trained on, and only they are deleted by
`data.keep`."""

MAX_NAMED = 5
"""The maximum number of skipped files that a warning names; it also gives the total count."""


def check_name(name: str, kind: str = "folder") -> None:
    """Raises `BadInput` unless the name of a file has an ending of this kind of data, in upper or lower case."""
    if Path(name).suffix.lower() not in ENDINGS_OF[kind]:
        such = "sound, such as .wav or .flac" if kind == "sound" else "an image, such as .jpg or .png"
        raise BadInput(f"its name has no ending of {such}")


def named(skipped: Sequence[str]) -> str:
    """Names the first skipped files in one line, and the number of the others."""
    more = len(skipped) - MAX_NAMED
    return "; ".join([*skipped[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def walked(folder: str | Path, *, follow_links: bool = False) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each folder with the names of its sub-folders and of its files, as `os.walk` does: a caller may sort the
    sub-folders, or remove some.

    `os.walk` calls itself for each level before Python 3.12, and fails at a thousand of them: one file in so many
    folders would hide all others.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        for top, names, files in islice(os.walk(waiting.pop()), 1):  # none if it cannot be read
            yield top, names, files
            below = [os.path.join(top, name) for name in reversed(names)]
            waiting += (each for each in below if follow_links or not os.path.islink(each))


def files_below(folder: Path, *, data: Path) -> Iterator[str]:
    """Yields the files in a folder, in its sub-folders, and in linked folders.

    :param data: the whole data folder. For a link to a folder inside or above it, or to the same folder as another
        link, the link itself is yielded, not the files: they are read elsewhere, and may be of another class.
    """
    whole, seen = os.path.realpath(data), set[str]()
    for top, names, files in walked(folder, follow_links=True):
        names.sort()  # the choice between two links must not depend on the disk
        yield from (os.path.join(top, name) for name in files)
        for link in [each for name in names if os.path.islink(each := os.path.join(top, name))]:
            place = os.path.realpath(link)
            if place in seen or os.path.commonpath((place, whole)) in (place, whole):
                names.remove(os.path.basename(link))
                yield link
            seen.add(place)
