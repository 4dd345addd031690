"""The IDX format of the MNIST family: a big-endian header, then raw bytes.

Layout: two zero bytes, a type byte (8 = unsigned bytes, the only one met here), the number of dimensions,
each dimension as big-endian uint32, then the values (http://yann.lecun.com/exdb/mnist/).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hushfleet.errors import BadInput

UNSIGNED_BYTES = 8
MAX_DIMENSIONS = 4
MAX_BYTES = 1 << 31
BLOCK_BYTES = 1 << 20


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Reads a plain or gzipped IDX file of unsigned bytes.

    :returns: uint8 array of the shape that the header names.
    :raises BadInput: not an IDX file of bytes, or shorter or longer than its header says.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTES:
                raise BadInput(f"{path} is not an IDX file of bytes: it starts with {magic.hex() or 'nothing'}")
            dimensions = magic[3]
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise BadInput(f"{path} names {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are expected")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise BadInput(f"{path} ends inside its header; fetch it again")
            shape = struct.unpack(f">{dimensions}I", header)
            size = math.prod(shape)
            if size > MAX_BYTES:
                raise BadInput(f"{path} names {size} bytes of content, above the cap of {MAX_BYTES}")
            content = bytearray()  # grows with the file: what is only announced is not allocated
            while block := file.read(min(BLOCK_BYTES, size + 1 - len(content))):
                content += block
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read: {error}; fetch it again") from error
    if len(content) != size:
        found = f"only {len(content)}" if len(content) < size else "more"
        raise BadInput(f"{path} should hold {list(shape)} = {size} bytes and holds {found}; fetch it again")
    values = np.frombuffer(content, dtype=np.uint8).reshape(shape)
    values.flags.writeable = False
    return values
