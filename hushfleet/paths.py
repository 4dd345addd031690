"""Reads the paths and the names of objects that people write, and says what is at a path without opening it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from hushfleet.errors import format_value

OFFERED = "python:"
"""The prefix of the name of a method or a network that only one process knows."""
_OTHERS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def expanded(path: str | Path, key: str) -> Path:
    """Returns the path with `~` and `~user` replaced by the home folders.

    :param key: the name of the setting that has the path, for the error text.
    :raises ValueError: there is no such home folder, the path has a control character, or it is too long for a file.
    """
    if any(ord(character) < ord(" ") for character in str(path)):
        raise ValueError(
            f"{key} = {str(path)!r}: has a tab or another control character, as \\ makes between double quotes; "
            "write a Windows path between single quotes, or with /"
        )
    try:
        found = Path(path).expanduser()
        os.lstat(found)
    except RuntimeError:
        home = Path(path).parts[0]
        raise ValueError(
            f"{key} = {str(path)!r}: this machine knows no home folder {home}; write the folder's whole path"
        ) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # others, such as a missing file, are errors only where it is read
            raise ValueError(
                f"{key} = {format_value(str(path))}: is too long for a file; write a shorter one"
            ) from None
    return found


def is_closed(path: str | Path) -> bool:
    """Returns whether this user has no permission to look up the path: a folder above it is closed."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def no_file(path: str | Path) -> str:
    """Returns what the path, or the end of its link, is ("a pipe"), if it is there and no regular file; else "".

    Ask before you open a file in a folder of somebody else: opening a pipe waits for a writer, perhaps for ever, and
    opening a device may change it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else next((what for is_it, what in _OTHERS if is_it(mode)), "no file")


def in_file(name: str) -> bool:
    """Returns whether this names an object in a Python file: `path/to/file.py:NAME`.

    >>> in_file("network.py:Net"), in_file("hush")
    (True, False)
    """
    return ".py:" in name


def features_folder(run: Path) -> Path:
    """Returns the folder for features in a simulation's run folder."""
    return run / "features"


def is_offered(name: str) -> bool:
    """Returns whether this names an object that a Python program has offered, in any process.

    >>> is_offered("python:Net"), is_offered("hush")
    (True, False)
    """
    return name.startswith(OFFERED)
