"""Makes sparse copies of card images: empty blocks take no disk space."""

from __future__ import annotations

import errno
import lzma
from pathlib import Path

from hushfleet.errors import BadInput, HushfleetError, StoreFull
from hushfleet.progress import doing

_BLOCK = 1 << 20


def copy_sparse(source: Path, target: Path) -> None:
    """Copies an image, or unpacks an `.xz` image. Afterwards `target` is complete, or does not exist.

    Raises `BadInput` for a damaged `.xz`, `StoreFull` if there is no space, and `HushfleetError` if a disk fails.
    """
    packed = source.suffix == ".xz"
    size = source.stat().st_size >> 20
    # Not alike: empty parts of an image take almost no time, and unpack to gigabytes.
    work = doing(f"{'unpacking' if packed else 'copying'} {source.name}, MiB", total=size, alike=False)
    part = target.with_name(f"{target.name}.part")
    try:
        with work as copied, source.open("rb") as image, part.open("wb") as new:
            old = lzma.LZMAFile(image) if packed else image  # noqa: SIM115 (closing it would close nothing)
            while block := old.read(_BLOCK):
                if any(block):
                    new.write(block)
                else:
                    new.seek(len(block), 1)
                copied.done = image.tell() >> 20
            new.truncate()
        part.replace(target)
    except (lzma.LZMAError, EOFError) as error:  # EOFError: the download was incomplete
        raise BadInput(f"{source} cannot be unpacked: {error}") from error
    except OSError as error:
        if error.filename is not None:  # it could not be opened
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{target} cannot be written: {error.strerror}; free some space") from error
        raise HushfleetError(f"{source} cannot be copied to {target}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
