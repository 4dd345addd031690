"""The difference between two global models: a content-addressed blob, a tenth of a whole model.

    "HD", version, 0 | u32 header length | header (msgpack) | coded values

The new global model is defined as old + decoded difference, on the aggregator as well. So who applies differences
and who fetches the whole model hold the same bits, and the digests in the header prove it.

No dither: an entry that did not change must stay as it is, and the noise that an aggregate carries is a dither.
Layers without a change are left out. The blob is not signed: its digest comes from the signed round plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from hushfleet.codecs import quantized
from hushfleet.codecs.codec import Coding
from hushfleet.config.spec import Digest, RoundNumber, TaskId
from hushfleet.errors import Malformed, TooLarge
from hushfleet.schema import Checked, NotNegative, pack, require, unpack
from hushfleet.wire.format.headed import HEAD_BYTES, MAX_HEADER_BYTES, MAX_LAYERS, cut_header, headed

MAGIC = b"HD"
VERSION = 1


@dataclass(frozen=True)
class DifferenceHeader(Checked):
    """Header of a difference: the two models that it is between.

    :param round: the round whose close made `result` of `base`.
    :param base: SHA-256 of the model that it is applied to, float32 `[d]` as it travels.
    :param result: SHA-256 of the model that it gives.
    :param steps: quantisation step of each layer; 0 where nothing of the layer changed.
    """

    task: TaskId
    round: RoundNumber
    base: Digest
    result: Digest
    steps: Annotated[tuple[NotNegative, ...], Meta(min_length=1, max_length=MAX_LAYERS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            fits = step == 0 or quantized.MIN_STEP <= step <= quantized.MAX_STEP
            # one form only: -0.0 equals 0 and is written otherwise
            require(fits and math.copysign(1, step) > 0, "step", step, "0, or 2^-100 to 2^40")


class EncodedDifference(NamedTuple):
    """`result` float32 `[d]` is exactly what everyone gets who applies `data`."""

    data: bytes
    result: np.ndarray
    header: DifferenceHeader


def encode_difference(
    base: np.ndarray, target: np.ndarray, *, task: str, round: int, counts: Sequence[int], steps: Sequence[float]
) -> EncodedDifference:
    """The blob that leads from `base` to within half a step of `target`, both float32 `[d]`.

    :param counts: how many values each layer has, in order; their sum is d.
    :param steps: the quantisation step of each layer; those of layers without a change are not used.

    Raises `Malformed` for a difference that is not finite or too large for its step.
    """
    _check_shapes(base, counts)
    _check_shapes(target, counts)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = target - base
    used = tuple(
        float(step) if difference[start : start + count].any() else 0.0
        for start, count, step in zip(_starts(counts), counts, steps, strict=True)
    )
    coded = quantized.encode_values(_of_changed(difference, counts, used), _coding(counts, used))
    # decoded, as a device will, rather than computed beside it: there is one way to the new model's bits
    result = _moved(base, coded, counts, used)
    header = DifferenceHeader(task, round, params_digest(base), params_digest(result), used)
    return EncodedDifference(headed(MAGIC, VERSION, pack(header)) + coded, result, header)


def apply_difference(data: bytes, base: np.ndarray, *, task: str, counts: Sequence[int]) -> np.ndarray:
    """The model float32 `[d]` that `data` makes of `base` float32 `[d]`.

    :param counts: how many values each layer has, in order.

    Raises `Malformed` or `TooLarge`, and nothing else: also for another base than the difference was made for, and
    where the result is not the one that it names. Allocates in proportion to d, whatever `data` says.
    """
    _check_shapes(base, counts)
    if len(data) > max_difference_bytes(base.size):
        raise TooLarge(f"a difference of {len(data)} bytes is too large for {base.size} parameters")
    header, coded = _sections(data)
    if header.task != task:
        raise Malformed(f"the difference is of {header.task}, not of {task}")
    if len(header.steps) != len(counts):
        raise Malformed(f"the difference has {len(header.steps)} layers, the model {len(counts)}")
    if params_digest(base) != header.base:
        raise Malformed(f"the difference is to another model than {params_digest(base).hex()[:16]}...")
    result = _moved(base, coded, counts, header.steps)
    if params_digest(result) != header.result:
        raise Malformed(f"the difference does not give the model {header.result.hex()[:16]}... that it names")
    return result


def read_difference_header(data: bytes) -> DifferenceHeader:
    """The header alone. Raises `Malformed` or `TooLarge`."""
    return _sections(data)[0]


def max_difference_bytes(size: int) -> int:
    """The most bytes of a difference between models of `size` parameters."""
    return HEAD_BYTES + MAX_HEADER_BYTES + quantized.max_coded_bytes(size)


def params_digest(params: np.ndarray) -> bytes:
    """SHA-256 of a global model as it travels: little-endian float32."""
    return hashlib.sha256(np.ascontiguousarray(params, "<f4").data).digest()


def _moved(base: np.ndarray, coded: bytes | memoryview, counts: Sequence[int], steps: Sequence[float]) -> np.ndarray:
    """`base` plus the decoded difference, with one rounding to float32."""
    moves = quantized.decode_values(coded, _coding(counts, steps))
    result = np.array(base, np.float32)
    at = 0
    with np.errstate(over="ignore"):
        for start, count, step in zip(_starts(counts), counts, steps, strict=True):
            if step:
                result[start : start + count] += moves[at : at + count]
                at += count
    if not np.isfinite(result).all():
        raise Malformed("the difference gives a model with values that are not finite")
    return result


def _of_changed(values: np.ndarray, counts: Sequence[int], steps: Sequence[float]) -> np.ndarray:
    """The values of the layers that changed, one after the other."""
    spans = zip(_starts(counts), counts, steps, strict=True)
    parts = [values[start : start + count] for start, count, step in spans if step]
    return np.concatenate(parts) if parts else values[:0]


def _coding(counts: Sequence[int], steps: Sequence[float]) -> Coding:
    """Returns the coding of the layers that changed."""
    changed = [place for place, step in enumerate(steps) if step]
    return Coding([counts[place] for place in changed], [steps[place] for place in changed], None)


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _check_shapes(params: np.ndarray, counts: Sequence[int]) -> None:
    if params.dtype != np.float32 or params.shape != (sum(counts),):
        raise Malformed(f"{params.dtype} of shape {params.shape} is not a model of {sum(counts)} float32 parameters")


def _sections(data: bytes) -> tuple[DifferenceHeader, memoryview]:
    header, coded = cut_header(data, MAGIC, VERSION)
    return unpack(DifferenceHeader, header, what="the difference's header"), coded
