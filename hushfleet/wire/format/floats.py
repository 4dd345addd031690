"""The float codecs: values as floats of 16 or 32 bits."""

from __future__ import annotations

from functools import partial

from hushfleet.array_api import np
from hushfleet.errors import Malformed
from hushfleet.wire.format.codec import Codec, Coding, check_finite


def _encode(values: np.ndarray, coding: Coding, sent: np.ndarray, *, kind: str) -> bytes:
    check_finite(values)
    with np.errstate(over="ignore"):
        written = values.astype(kind)
    if not np.isfinite(written).all():
        name = np.dtype(kind).name
        raise Malformed(f"a value of {np.abs(values).max():g} is too large for {name}; send float32 instead")
    sent[:] = written
    return written.tobytes()


def _decode(data: bytes | memoryview, coding: Coding, out: np.ndarray | None, *, kind: str) -> np.ndarray:
    """Reads values, including NaN. Without `out`, float32 values are a read-only view of `data`."""
    if len(data) != np.dtype(kind).itemsize * coding.size:
        raise Malformed(f"{len(data)} bytes are not {coding.size} {np.dtype(kind).name} values")
    read = np.frombuffer(data, kind)
    if out is not None:
        out[:] = read
    # a view if possible: a copy would take as long as all further processing
    return read.astype(np.float32, copy=False) if out is None else out


def _floats(kind: str, float_error: tuple[float, float]) -> Codec:
    width = int(kind[-1])
    return Codec(
        f"float{8 * width}",
        partial(_encode, kind=kind),
        partial(_decode, kind=kind),
        max_bytes=lambda size: width * size,
        bits=8.0 * width,
        float_error=float_error,
    )


FLOAT16 = _floats("<f2", (2.0**-11, 2.0**-25))
FLOAT32 = _floats("<f4", (0.0, 0.0))
