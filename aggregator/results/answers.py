"""Makes estimates from the noised answers of devices: a task's evaluation, or a statistic of their data.

An answer is a sum over devices with noise of a known size, and all that is computed from it costs no more privacy.
The values and their scales are those of `hushfleet.methods.answer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hushfleet.aggregator.results.json_record import Count, Epsilon, JsonRecord
from hushfleet.wire.format.question import QuestionKind, QuestionSpec

DEVIATIONS = 1.96
"""The width of errors in standard deviations: the true value lies within the error in 19 of 20 cases."""
USEFUL_BELOW = 0.05
"""A gain with a standard error of five points or more does not say whether a fleet pays."""


class WithError(JsonRecord, frozen=True):
    """A value, and its error: the true value is within it in 19 of 20 cases."""

    value: float
    error: Epsilon


class EvaluationRow(JsonRecord, frozen=True):
    """The evaluation after a round: accuracies as fractions of 1, means over devices, on samples not trained on.

    :param devices: how many devices answered.
    :param own: accuracy of the devices' personalized heads; `alone`: of heads trained alone; `shared`: of the shared
        model.
    :param gain: gain of personalized heads over heads trained alone; a device's gain counts as the task's `most_gain`
        at most.
    :param gaining: the share of devices whose personalized head is better than the head trained alone; a tie counts
        half.
    """

    round: Count
    devices: Count
    own: WithError
    alone: WithError
    shared: WithError
    gain: WithError
    gaining: WithError

    @property
    def is_useful(self) -> bool:
        """Whether its gain is exact enough to say whether a fleet pays."""
        return self.gain.error / DEVIATIONS < USEFUL_BELOW


class StatisticRow(JsonRecord, frozen=True):
    """A statistic of the devices' data.

    :param devices: how many devices answered.
    :param names: names of the values: classes and `left out`, the column, or the limits of bins.
    :param values: totals over all devices for counts and drift; else means over devices.
    """

    kind: QuestionKind
    devices: Count
    names: list[str]
    values: list[WithError]


def evaluation_of(answer: Sequence[float], stds: Sequence[float], *, round: int, devices: int) -> EvaluationRow:
    """Reads a mean answer of `devices` devices.

    Its error has two parts: the noise, and a sampling error because each device tests with few samples. The answer
    contains the spread of the gains, as their mean square; for the spread of an accuracy, the largest value that its
    mean allows is used.

    :param answer: in the order of `hushfleet.methods.answer`.
    :param stds: standard deviations of its noise.
    """
    own, gain, gain_shared, gaining, square = answer
    gain, spread = min(1.0, max(-1.0, gain)), max(0.0, square - gain**2) + stds[4]
    accuracy, alone, shared = _share(own), _share(own - gain), _share(own - gain + gain_shared)
    gaining = _share(gaining)
    return EvaluationRow(
        round=round,
        devices=devices,
        own=_estimate(accuracy, _spread(accuracy) / devices, stds[0]),
        alone=_estimate(alone, _spread(alone) / devices, *stds[:2]),
        shared=_estimate(shared, _spread(shared) / devices, *stds[:3]),
        gain=_estimate(gain, min(spread, 1 - gain**2) / devices, stds[1]),
        gaining=_estimate(gaining, _spread(gaining) / devices, stds[3]),
    )


def statistic_of(
    question: QuestionSpec, answer: Sequence[float], stds: Sequence[float], *, devices: int, class_names: Sequence[str]
) -> StatisticRow:
    """Reads a mean answer of `devices` devices; the errors come from the noise alone."""
    low, width = question.low, question.high - question.low
    if question.kind == "counts":
        scale, names = float(question.most * devices), [*class_names, "left out"]
        values = [scale * each for each in answer]
    elif question.kind == "drift":
        scale, names = math.sqrt(2) * devices, ["boards that tell", "boards that have become worse"]
        values = [scale * each for each in answer]
    elif question.kind == "mean":
        scale, names = width / 2, [question.column]
        values = [low + width / 2 + scale * each for each in answer]
    else:
        edges = [low + width * place / question.bins for place in range(question.bins + 1)]
        scale, names = 1.0, [f"{a:.7g} to {b:.7g}" for a, b in pairwise(edges)]
        values = list(answer)
    found = [WithError(value=value, error=DEVIATIONS * scale * std) for value, std in zip(values, stds, strict=True)]
    return StatisticRow(kind=question.kind, devices=devices, names=names, values=found)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _spread(share: float) -> float:
    """Returns the largest variance of numbers in [0, 1] that have this mean."""
    return share * (1 - share)


def _estimate(value: float, variance: float, *noise: float) -> WithError:
    return WithError(value=value, error=DEVIATIONS * math.sqrt(variance + math.fsum(each**2 for each in noise)))
