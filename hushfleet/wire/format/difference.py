"""Encodes the difference between two global models: a content-addressed blob, a tenth of the size of a whole model.

    "HD", version, 0 | u32 header length | header (msgpack) | encoded values

The new global model is defined as old + decoded difference, on the aggregator as well. So a device that applies
differences and a device that fetches the whole model hold the same bits; the digests in the header prove it.

There is no dither, because an entry that did not change must stay the same, and the noise in an aggregate already acts
as a dither. Layers without a change are left out. The blob is not signed: its digest is in the signed round plan.
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

from hushfleet.errors import Malformed, TooLarge
from hushfleet.schema import Checked, NotNegative, pack, require, unpack
from hushfleet.wire.format import quantized
from hushfleet.wire.format.codec import MAX_STEP, MIN_STEP, Coding
from hushfleet.wire.format.headed import HEAD_BYTES, MAX_HEADER_BYTES, MAX_LAYERS, cut_header, headed
from hushfleet.wire.format.spec import Digest, RoundNumber, TaskId

MAGIC = b"HD"
VERSION = 1


@dataclass(frozen=True)
class DifferenceHeader(Checked):
    """Header of a difference: it names the two models.

    :param round: the round whose close changed the model from `base` to `result`.
    :param base: SHA-256 of the model that the difference is applied to, float32 `[d]` as it is sent.
    :param result: SHA-256 of the model that results.
    :param steps: quantisation step of each layer; 0 if the layer did not change.
    """

    task: TaskId
    round: RoundNumber
    base: Digest
    result: Digest
    steps: Annotated[tuple[NotNegative, ...], Meta(min_length=1, max_length=MAX_LAYERS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            fits = step == 0 or MIN_STEP <= step <= MAX_STEP
            # only one form is accepted: -0.0 equals 0 but has other bytes
            require(fits and math.copysign(1, step) > 0, "step", step, "0, or 2^-100 to 2^40")


class EncodedDifference(NamedTuple):
    """An encoded difference: everyone who applies `data` gets exactly `result`, float32 `[d]`."""

    data: bytes
    result: np.ndarray
    header: DifferenceHeader


def encode_difference(
    base: np.ndarray, target: np.ndarray, *, task: str, round: int, counts: Sequence[int], steps: Sequence[float]
) -> EncodedDifference:
    """Encodes the difference that leads from `base` to within half a step of `target`, both float32 `[d]`.

    :param counts: how many values each layer has, in order; their sum is d.
    :param steps: the quantisation step of each layer; steps of layers without a change are not used.

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
    # the result is decoded, as a device does it, and not computed in another way, so that the bits are the same
    result = _moved(base, coded, counts, used)
    header = DifferenceHeader(task, round, params_digest(base), params_digest(result), used)
    return EncodedDifference(headed(MAGIC, VERSION, pack(header)) + coded, result, header)


def apply_difference(data: bytes, base: np.ndarray, *, task: str, counts: Sequence[int]) -> np.ndarray:
    """Applies the difference `data` to `base` float32 `[d]`; returns the new model float32 `[d]`.

    :param counts: how many values each layer has, in order.

    Raises `Malformed` or `TooLarge`, and nothing else: also if the difference is for another base, or if the result is
    not the model that the header names. Allocates in proportion to d, whatever `data` contains.
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


def apply_all(base: bytes, chain: Sequence[bytes], task: str, counts: Sequence[int]) -> bytes:
    """Applies differences, each to the result of the one before it; models are in their wire form. Raises as
    `apply_difference`."""
    params = np.frombuffer(base, "<f4").astype(np.float32, copy=False)
    for data in chain:
        params = apply_difference(data, params, task=task, counts=counts)
    return params.astype("<f4", copy=False).tobytes()


def read_difference_header(data: bytes) -> DifferenceHeader:
    """Reads the header alone. Raises `Malformed` or `TooLarge`."""
    return _sections(data)[0]


def max_difference_bytes(size: int) -> int:
    """Returns the maximum number of bytes of a difference between models of `size` parameters."""
    return HEAD_BYTES + MAX_HEADER_BYTES + quantized.max_coded_bytes(size)


def params_digest(params: np.ndarray) -> bytes:
    """Returns the SHA-256 of a global model as it is sent: little-endian float32.

    >>> params_digest(np.zeros(2, dtype=np.float32)).hex()[:8]
    'af5570f5'
    """
    return hashlib.sha256(np.ascontiguousarray(params, "<f4").data).digest()


def _moved(base: np.ndarray, coded: bytes | memoryview, counts: Sequence[int], steps: Sequence[float]) -> np.ndarray:
    """Returns `base` plus the decoded difference, rounded once to float32."""
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
    """Returns the values of the layers that changed, one after the other."""
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
