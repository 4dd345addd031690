"""The forms that an update's values may travel in: what each is called, costs, and how it is written and read.

| form | bits a value | error |
|---|---|---|
| `quantized` | near the entropy; 2.2 at a step of the noise | uniform, step^2 / 12 more variance |
| `one-bit` | 1 | 1.57 times the noise's variance |
| `float16` | 16 | 2^-11 relative |
| `float32` | 32 | none |
| `masked` | 16, 24 or 32, and corrections | below 1 % of the noise; of secure sums, and coded in `hushfleet.secure` |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hushfleet.config.spec import Form, WireSpec
from hushfleet.errors import Malformed, NotFinite, PrivacyError
from hushfleet.wire.format import codec, one_bit

STEPPED: tuple[Form, ...] = ("quantized", "one-bit")
"""Forms with a number for each layer: the quantisation step, or the magnitude of the signs."""

CARRIED: tuple[Form, ...] = ("one-bit",)
"""Forms whose error a device keeps and adds to its next update (error feedback: Seide et al., Interspeech 2014), so
that errors do not add up over rounds. They are errors of noised values: this is post-processing."""

_FLOATS = {"float16": "<f2", "float32": "<f4"}


def steps_for(wire: WireSpec, *, noise_stds: Sequence[float], layer_rms: Sequence[float]) -> tuple[float, ...]:
    """The `steps` of a header: tied to each layer's noise, or to its values where the update has no noise of its own.

    :param noise_stds: of each layer, all 0 or all positive.
    :param layer_rms: root mean square of the values of each layer.

    Raises `PrivacyError` for `one-bit` without noise.
    """
    noisy = any(std > 0 for std in noise_stds)
    if wire.codec == "one-bit":
        if not noisy:
            raise PrivacyError(
                'wire.codec = "one-bit" sends signs of noised values, and this update has no noise; use "quantized"'
            )
        return tuple(one_bit.magnitude(std) for std in noise_stds)
    if wire.codec != "quantized":
        return ()
    if noisy:
        return tuple(wire.step * std for std in noise_stds)
    return tuple(wire.relative_step * rms or codec.MIN_STEP for rms in layer_rms)


def encode(
    form: Form,
    values: np.ndarray,
    *,
    counts: Sequence[int],
    steps: Sequence[float],
    dither_key: bytes,
    sent: np.ndarray,
) -> bytes:
    """`values` float32 `[k]` as bytes.

    :param counts: how many of the values belong to each layer.
    :param sent: float32 `[k]`, filled with what `decode` will give.

    Raises `Malformed` for values that do not fit the form, and `NotFinite`.
    """
    if form == "quantized":
        return codec.encode_values(values, counts=counts, steps=steps, dither_key=dither_key, sent=sent)
    if form == "one-bit":
        coded = one_bit.encode_signs(values)
        one_bit.decode_signs(coded, counts=counts, magnitudes=steps, out=sent)
        return coded
    check_finite(values)
    with np.errstate(over="ignore"):
        written = values.astype(_FLOATS[form])
    if not np.isfinite(written).all():
        raise Malformed(f"a value of {np.abs(values).max():g} is too large for {form}; send float32 instead")
    sent[:] = written
    return written.tobytes()


def seen(
    form: Form, values: np.ndarray, *, counts: Sequence[int], steps: Sequence[float], dither_key: bytes
) -> np.ndarray:
    """What `decode` gives of `encode`, float32 `[k]`, in less time: only a simulation has no use for the bytes."""
    sent = np.empty(values.size, np.float32)
    if form == "quantized":
        codec.quantize(values, counts=counts, steps=steps, dither_key=dither_key, sent=sent)
    else:
        encode(form, values, counts=counts, steps=steps, dither_key=dither_key, sent=sent)
    return sent


def decode(
    form: Form,
    data: bytes | memoryview,
    *,
    counts: Sequence[int],
    steps: Sequence[float],
    dither_key: bytes,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """What `encode` said was sent, float32 `[k]`.

    :param out: float32 `[k]`, filled and returned; after an error its content means nothing. Without it the values
        of `float32` are read-only and lie in `data`.

    Those of the two float forms may be anything, NaN included: see `check_finite`. Raises `Malformed`, and allocates in
    proportion to k, whatever `data` says.
    """
    size = sum(counts)
    if form == "quantized":
        return codec.decode_values(data, counts=counts, steps=steps, dither_key=dither_key, out=out)
    if form == "one-bit":
        values = np.empty(size, np.float32) if out is None else out
        one_bit.decode_signs(data, counts=counts, magnitudes=steps, out=values)
        return values
    kind = np.dtype(_FLOATS[form])
    if len(data) != kind.itemsize * size:
        raise Malformed(f"{len(data)} bytes are not {size} {form} values")
    read = np.frombuffer(data, kind)
    if out is not None:
        out[:] = read
    # where they lie, if they may: a copy would take as long as all that is done with them
    return read.astype(np.float32, copy=False) if out is None else out


def added_variance(form: Form, *, step: float, noise_std: float) -> float:
    """What the form adds to the variance of a value in noise of `noise_std`; `step` as the header has it."""
    if form == "quantized":
        return step**2 / 12
    return (one_bit.VARIANCE_FACTOR - 1) * noise_std**2 if form == "one-bit" else 0.0


def max_bytes(size: int) -> int:
    """The most bytes that `size` values take in any form."""
    return max(codec.max_coded_bytes(size), 4 * size)


def check_finite(values: np.ndarray) -> None:
    """Raises `NotFinite`."""
    # a NaN is the largest and the smallest of all; these two passes take a fraction of the time of a test of each value
    if not (np.isfinite(values.max(initial=0)) and np.isfinite(values.min(initial=0))):
        raise NotFinite(f"{np.count_nonzero(~np.isfinite(values))} of the update's values are not finite")
