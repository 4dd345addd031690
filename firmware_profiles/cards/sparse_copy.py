"""Copies of card images that take no room for what is empty in them."""

from __future__ import annotations

import lzma
from pathlib import Path

from hushfleet.errors import BadInput
from hushfleet.progress import doing

_BLOCK = 1 << 20


def copy_sparse(source: Path, target: Path) -> None:
    """Copies an image, or unpacks an `.xz` one. `target` is there whole or not at all."""
    packed = source.suffix == ".xz"
    work = doing(f"copying {source.name}, MiB", total=None if packed else source.stat().st_size >> 20)
    part = target.with_name(f"{target.name}.part")
    try:
        with work as copied, (lzma.open if packed else open)(source, "rb") as old, part.open("wb") as new:
            while block := old.read(_BLOCK):
                if any(block):
                    new.write(block)
                else:
                    new.seek(len(block), 1)
                copied.done = new.tell() >> 20
            new.truncate()
        part.replace(target)
    except lzma.LZMAError as error:
        raise BadInput(f"{source} cannot be unpacked: {error}") from error
    finally:
        part.unlink(missing_ok=True)
