"""Copies of card images that take no room for what is empty in them."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

from hushfleet.errors import BadInput

_BLOCK = 1 << 20


def copy_sparse(source: Path, target: Path, *, progress: Callable[[int], None] = lambda _: None) -> None:
    """Copies an image, or unpacks an `.xz` one. `target` is there whole or not at all.

    :param progress: is told the bytes of each block.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as old, part.open("wb") as new:
            while block := old.read(_BLOCK):
                if any(block):
                    new.write(block)
                else:
                    new.seek(len(block), 1)
                progress(len(block))
            new.truncate()
        part.replace(target)
    except lzma.LZMAError as error:
        raise BadInput(f"{source} cannot be unpacked: {error}") from error
    finally:
        part.unlink(missing_ok=True)
