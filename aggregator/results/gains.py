"""Computes gains over training alone with their spread: the gain, its standard error, and the accuracy of guessing.

`MeanAccuracies.verdict` is the only rule by which a sentence, a table and a colour say that federating paid.

The standard error is over devices. It does not cover effects of the seed that are the same for all devices, mainly the
noise in the shared model; if there are several seeds, `Gain.of` their means covers them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, stdev
from typing import Literal

from hushfleet.aggregator.results.result import Result, last_measured

GainVerdict = Literal["better", "worse", "close", "nothing"]
"""`nothing`: the model has learned nothing, no matter how large the gain is."""
SURE = 2.0
"""A gain of fewer standard errors is too close to call."""
LEAST_GAIN = 0.0005
"""A gain below a twentieth of a percentage point is none, no matter how small its spread is; no text shows it."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Gain:
    """The mean of some gains, in fractions of 1.

    :param standard_error: None if there is only one value, or the values are not known.
    :param count: how many values there are.
    """

    mean: float
    standard_error: float | None = None
    count: int = 1

    @classmethod
    def of(cls, gains: Sequence[float]) -> Gain | None:
        """Returns the mean and its standard error; None for an empty list."""
        if not gains:
            return None
        error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
        return cls(fmean(gains), error, len(gains))

    @property
    def outcome(self) -> GainVerdict:
        if self.standard_error is None or abs(self.mean) < max(SURE * self.standard_error, LEAST_GAIN):
            return "close"
        return "better" if self.mean > 0 else "worse"


@dataclass(frozen=True)
class MeanAccuracies:
    """Mean accuracies of the models that devices predict with, federated and alone, over the devices for which both
    were measured, if there are any; None: not measured.

    :param gains: gains of the devices for which both were measured.
    :param chance: the accuracy of always giving the most common answer; None if the classes are not known.
    :param images: the number of images that the accuracies were tested on; 0: not known.
    """

    federated: float | None
    local_only: float | None
    gains: tuple[float, ...] = ()
    chance: float | None = None
    images: int = 0

    @property
    def gain(self) -> Gain | None:
        """The difference of the means, with the spread of the devices."""
        if self.federated is None or self.local_only is None:
            return None
        spread = Gain.of(self.gains)
        mean = self.federated - self.local_only
        return Gain(mean) if spread is None else Gain(mean, spread.standard_error, spread.count)

    @property
    def better_off(self) -> int:
        """The number of devices that gain, by `LEAST_GAIN` at least."""
        return sum(gain >= LEAST_GAIN for gain in self.gains)

    @property
    def worse_off(self) -> int:
        """The number of devices that lose, by `LEAST_GAIN` at least."""
        return sum(gain <= -LEAST_GAIN for gain in self.gains)

    @property
    def verdict(self) -> GainVerdict | None:
        """The verdict that the numbers allow; None if there is nothing to compare with."""
        if self.federated is not None and self.chance is not None:
            error = _standard_error(self.chance, self.images) if self.images else 0.0
            if self.federated <= self.chance + SURE * error:
                return "nothing"
        return None if self.gain is None else self.gain.outcome


def common_test(result: Result) -> MeanAccuracies:
    """Compares the models for the common test set: the devices' personalized models; or the shared head, if each device
    also has a personalized head for its own kind of images."""
    return shared_model(result, against_local_only=True) if result.details.own_heads else personalized_models(result)


def shared_model(result: Result, *, against_local_only: bool = False) -> MeanAccuracies:
    """Returns the accuracies of the global model on the common test set."""
    detail = result.details
    shared = last_measured(result.rounds, lambda row: row.accuracy_global)
    local_only = detail.local_only_common if against_local_only else []
    mean_local_only = result.local_only.accuracy_own_common if against_local_only else None
    level, images = chance(result)[0], detail.common_test_images or 0
    return _compared([shared] * len(detail.devices), local_only, shared, mean_local_only, level, images)


def personalized_models(result: Result, test: Literal["common", "local"] = "common") -> MeanAccuracies:
    """Returns the accuracies of the devices' personalized models, on the common test set or on their own kind of
    data."""
    detail, name = result.details, f"accuracy_own_{test}"
    mean = last_measured(result.rounds, attrgetter(name))
    final = final_by_device(getattr(detail, name), len(detail.devices))
    local_only, mean_local_only = getattr(detail, f"local_only_{test}"), getattr(result.local_only, name)
    tested = [n for n, value in zip(detail.local_test_images, final, strict=False) if value is not None]
    images = (detail.common_test_images or 0) if test == "common" else sum(tested)
    return _compared(final, local_only, mean, mean_local_only, chance(result)[test == "local"], images)


def _compared(
    final: Values,
    local_only: Values,
    mean: float | None,
    mean_local_only: float | None,
    level: float | None,
    images: int,
) -> MeanAccuracies:
    both = [(f, a) for f, a in zip(final, local_only, strict=False) if f is not None and a is not None]
    if both:
        mean, mean_local_only = (fmean(column) for column in zip(*both, strict=True))
    return MeanAccuracies(mean, mean_local_only, tuple(f - a for f, a in both), level, images)


def final_by_device(grid: list[list[float | None]], devices: int) -> list[float | None]:
    """Returns each device's newest measured value in a `[round][device]` list."""
    return [last_measured([row[n] for row in grid], lambda value: value) for n in range(devices)] if grid else []


def chance(result: Result) -> tuple[float | None, float | None]:
    """Returns the accuracy of always naming the most common class, on the common test set and on own data; at least one
    over the number of classes. For other targets, the accuracy of the best constant. None if labels are not known.

    The class counts of the common test set are taken from the global model's confusion matrix; without one, from the
    devices' labels.
    """
    if result.details.score:
        common, own = result.details.chance or (None, None)
        return common, own
    counts, classes = result.details.label_counts, len(result.details.class_names)
    least = 1 / classes if classes else None
    held = [row for row in counts if sum(row)]
    if not held:
        return least, least
    tested = [sum(row) for row in result.details.confusion_global]
    totals = tested if any(tested) else [sum(column) for column in zip(*held, strict=True)]
    shares = max(totals) / sum(totals), fmean(max(row) / sum(row) for row in held)
    return max(shares[0], least or 0.0), max(shares[1], least or 0.0)


def worse_than_local_only(result: Result) -> tuple[int, int] | None:
    """Counts the devices that are worse on their own data than alone by more than the standard error of their own
    test, and all measured devices; returns None if no device was measured."""
    detail = result.details
    final = final_by_device(detail.accuracy_own_local, len(detail.devices))
    rows = zip(final, detail.local_only_local, detail.local_test_images, strict=False)
    known = [(f, a, n) for f, a, n in rows if f is not None and a is not None and n]
    worse = sum(a - f > _standard_error(a, n) + 1e-12 for f, a, n in known)
    return (worse, len(known)) if known else None


def _standard_error(accuracy: float, images: int) -> float:
    """Returns the standard error of a share of `images`, with one right and one wrong answer added to it."""
    share = (accuracy * images + 1) / (images + 2)
    return math.sqrt(share * (1 - share) / images)
