"""Estimates from the noised answers of devices: of a task's evaluation, or of a statistic of their data.

An answer is a sum over devices with a noise that everybody knows, and all that follows from it costs no privacy. The
values and their scales are those of `hushfleet.training.answer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from hushfleet.aggregator.results.json_record import Count, JsonRecord, Number
from hushfleet.config.question import QuestionKind, QuestionSpec
from hushfleet.training.answer import BOUNDS, MOST_GAIN, UNITS

DEVIATIONS = 1.96
"""The errors' width: the truth lies within them in 19 of 20 cases."""


class Estimate(JsonRecord):
    """A value, and the error within which the truth lies in 19 of 20 cases."""

    value: Number
    error: Annotated[Number, Field(ge=0)]


class EvaluationRow(JsonRecord):
    """The evaluation after a round: accuracies as fractions of 1, means over devices, on samples that never train.

    :param devices: how many answered.
    :param own: of the devices' own heads; `alone`: of heads that each trained alone; `shared`: of the shared model.
    :param gain: of the own heads over those trained alone; a device's counts as 1/2 at most.
    :param gaining: the share of devices whose own head is better than the one trained alone; a tie counts half.
    """

    round: Count
    devices: Count
    own: Estimate
    alone: Estimate
    shared: Estimate
    gain: Estimate
    gaining: Estimate

    @property
    def outcome(self) -> Literal["better", "worse", "close"]:
        if abs(self.gain.value) <= self.gain.error:
            return "close"
        return "better" if self.gain.value > 0 else "worse"


class StatisticRow(JsonRecord):
    """A statistic of the devices' data.

    :param devices: how many answered.
    :param names: of the values: classes and `left out`, the column, or the limits of bins.
    :param values: of counts totals over all devices, of a mean and of a histogram's shares means over devices.
    """

    kind: QuestionKind
    devices: Count
    names: list[str]
    values: list[Estimate]


def evaluation_of(answer: Sequence[float], std: float, *, round: int, devices: int) -> EvaluationRow:
    """Reads a mean answer of `devices` devices.

    Its error has two parts: the noise, and that a device tests with few samples. The spread of the gains is in the
    answer, as their mean square; that of an accuracy is taken for the largest that its mean allows.

    :param std: standard deviation of the noise in each value of `answer`.
    """
    own, gain, gain_shared, sign, square = (each / unit for each, unit in zip(answer, UNITS, strict=True))
    noise = [std / float(unit) for unit in UNITS]
    gain = min(MOST_GAIN, max(-MOST_GAIN, gain))
    accuracy, half = _share(own + 0.5), _share(sign + 0.5)
    alone = _share(own + 0.5 - gain)
    shared = _share(own + 0.5 - gain + gain_shared)
    square = max(0.0, square + float(BOUNDS[4]) - gain**2) + noise[4]
    spread = min(MOST_GAIN**2 - gain**2, square)
    return EvaluationRow(
        round=round,
        devices=devices,
        own=_estimate(accuracy, _spread(accuracy) / devices, noise[0]),
        alone=_estimate(alone, _spread(alone) / devices, noise[0], noise[1]),
        shared=_estimate(shared, _spread(shared) / devices, noise[0], noise[1], noise[2]),
        gain=_estimate(gain, spread / devices, noise[1]),
        gaining=_estimate(half, _spread(half) / devices, noise[3]),
    )


def statistic_of(
    question: QuestionSpec, answer: Sequence[float], std: float, *, devices: int, class_names: Sequence[str]
) -> StatisticRow:
    """Reads a mean answer of `devices` devices; the errors are those of the noise."""
    low, width = question.low, question.high - question.low
    if question.kind == "counts":
        scale, names = float(question.most * devices), [*class_names, "left out"]
        values = [scale * each for each in answer]
    elif question.kind == "mean":
        scale, names = width / 2, [question.column]
        values = [low + width / 2 + scale * each for each in answer]
    else:
        edges = [low + width * place / question.bins for place in range(question.bins + 1)]
        scale, names = 1.0, [f"{a:.4g} to {b:.4g}" for a, b in pairwise(edges)]
        values = list(answer)
    found = [Estimate(value=value, error=DEVIATIONS * scale * std) for value in values]
    return StatisticRow(kind=question.kind, devices=devices, names=names, values=found)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _spread(share: float) -> float:
    """The largest variance of numbers in [0, 1] that have this mean."""
    return share * (1 - share)


def _estimate(value: float, variance: float, *noise: float) -> Estimate:
    return Estimate(value=value, error=DEVIATIONS * math.sqrt(variance + math.fsum(each**2 for each in noise)))
