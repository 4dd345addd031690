"""Chooses the precision of a published global model: its step is proportional to the noise that it contains."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.config.sections import WireSection
from hushfleet.errors import Malformed
from hushfleet.wire.format.codec import MAX_STEP, MIN_STEP
from hushfleet.wire.format.difference import EncodedDifference, encode_difference
from hushfleet.wire.format.messages import BASE_BYTES, DifferenceRef, RoundPlan
from hushfleet.wire.format.symbols import MAX_LEVEL

log = logging.getLogger("hushfleet.aggregator")


class Noise(NamedTuple):
    """The weight of one accepted update in the mean, and its noise's standard deviation in each layer."""

    weight: float
    stds: tuple[float, ...]


def aggregate_noise_stds(updates: Collection[Noise], *, layers: int) -> list[float]:
    """Returns the standard deviation of the noise in each layer of the weighted mean: sqrt(sum w^2 std^2) / sum w.

    An entry that fewer devices shared has more noise. The sums are correctly rounded, so that they do not depend on
    the order in which updates came.
    """
    total = math.fsum(update.weight for update in updates)
    return [
        math.sqrt(math.fsum((update.weight * update.stds[layer]) ** 2 for update in updates)) / total
        for layer in range(layers)
    ]


def least_noise_stds(updates: Collection[Noise], *, layers: int) -> list[float]:
    """Returns a lower bound on the noise's standard deviation in each layer of a trimmed mean or a median.

    No unbiased estimate of the common part of the updates has less noise than 1 / sqrt(sum 1 / std^2) (Cramér and Rao).
    For equal noise this is the noise of the mean, and a device that reports more noise than others hardly changes it.
    """
    if any(std == 0 for update in updates for std in update.stds):
        return [0.0] * layers
    return [1 / math.sqrt(math.fsum(update.stds[layer] ** -2 for update in updates)) for layer in range(layers)]


def make_difference(
    before: np.ndarray,
    target: np.ndarray,
    *,
    task: str,
    round: int,
    counts: Sequence[int],
    noise_stds: Sequence[float],
    wire: WireSection,
) -> EncodedDifference | None:
    """Returns the difference from the model `before` to (about) `target`, both float32 `[d]`.

    :param counts: how many values each layer has, in order.
    :param noise_stds: standard deviation of the noise in each layer of `target`; 0 if there is none.

    Returns None if it cannot be encoded: the new model is then `target`, and every device fetches the whole model.
    """
    steps = _steps(before, target, counts=counts, noise_stds=noise_stds, wire=wire)
    try:
        return encode_difference(before, target, task=task, round=round, counts=counts, steps=steps)
    except Malformed as error:
        log.warning("round %d: the new global model is offered whole only, since %s", round, error)
        return None


def worth_offering(differences: tuple[DifferenceRef, ...], held: Iterable[bytes]) -> tuple[DifferenceRef, ...]:
    """Returns the last of `differences`, back to the first that starts at one of `held`; the last one in any case.

    :param held: SHA-256 of the models that the cohort is known to have; a plan need not name unused differences.
    """
    bases = {digest[:BASE_BYTES] for digest in held}
    first = next((place for place, each in enumerate(differences) if each.base in bases), len(differences) - 1)
    return differences[first:] if differences else ()


def download_bytes(plan: RoundPlan, held: bytes | None, model: bytes | None = None) -> int:
    """Returns the bytes that a device fetches for a global model: differences that lead to it, or the whole model.

    :param held: SHA-256 of the global model that it trained on in the last round in which it was accepted; None for a
        new device. A device that has fetched a later model without an accepted update needs fewer bytes; a device that
        had to replace its store needs more.
    :param model: SHA-256 of the model, which may be an earlier one in buffered rounds; None: the plan's model.
    """
    chain = plan.differences_from(() if held is None else (held,))
    if chain is None:
        return plan.global_bytes
    later = (None if model is None else plan.differences_from((model,))) or ()
    return sum(difference.size for difference in chain) - sum(difference.size for difference in later)


def _steps(
    before: np.ndarray, target: np.ndarray, *, counts: Sequence[int], noise_stds: Sequence[float], wire: WireSection
) -> list[float]:
    steps, start = [], 0
    for count, std in zip(counts, noise_stds, strict=True):
        span = slice(start, start + count)
        start += count
        change = target[span].astype(np.float64) - before[span]
        # A method may move the model by less than the mean: a step of the mean's noise would then round it to zero.
        moved = _rms(change)
        step = wire.downlink_step * min(std, 2 * moved) or wire.relative_step * moved
        largest = float(np.abs(change).max(initial=0.0))
        # half of the levels, so that rounding never leads above the highest level
        steps.append(min(max(step, 2 * largest / MAX_LEVEL, MIN_STEP), MAX_STEP))
    return steps


def _rms(change: np.ndarray) -> float:
    """Returns the root mean square of the entries that changed."""
    moved = np.count_nonzero(change)
    return math.sqrt(float(np.square(change).sum()) / moved) if moved else 0.0
