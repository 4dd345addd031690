"""Detects anomalies: a sample is unusual if its reconstruction error is larger than those of nearly all held-out ones.

No labels are needed. A device trains on four fifths of its samples; the errors of the other fifth, which is never used
in training, determine its threshold. Both stay on the device. The threshold is conformal (Laxhammar and Falkman,
Conformal Prediction for Distribution-Independent Anomaly Detection in Streaming Vessel Data, 2010): while a machine
behaves as in the held-out samples, at most the wanted share of its samples is above it, for every network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from hushfleet.data.held_out import chosen_by_content
from hushfleet.data.samples import LabelledSamples, Samples
from hushfleet.errors import BadInput
from hushfleet.learning.evaluation import LogitsOf, evaluate_each
from hushfleet.learning.own_variation import OwnReconstruction
from hushfleet.losses import normal
from hushfleet.params import ParamLayout, is_moments

_ROUNDING = 1e-9
_LEAST_FITTED = 3
_LEAST_ERROR = 1e-30  # of constant samples it is 0
EVERY = 5
"""Every fifth sample is held out, or one in five by its content, so that samples that are appended later do not change
the choice among earlier ones."""


def divided(samples: Samples, *, by_content: bool) -> tuple[Samples, Samples]:
    """Returns the samples to train on, and the held-out ones; labelled faults are in neither, and a clip is in one.

    :param by_content: whether each record's content decides if it is held out, one in five by chance. Otherwise every
        fifth is. Then one added or removed record shifts all later ones, so that many other samples are trained on
        (`TaskSpec.by_content`).
    """
    own = _normal_ones(samples)
    number = own.records[1]
    held = chosen_by_content(own.images, number, 1 / EVERY) if by_content else number % EVERY == EVERY - 1
    return own.take(np.flatnonzero(~held)), own.take(np.flatnonzero(held))


class Threshold(NamedTuple):
    """The error above which a sample is unusual.

    :param held_out: the number of samples that determined it.
    :param false_alarms: the maximum share of normal samples above it.
    """

    error: float
    held_out: int
    false_alarms: float

    @classmethod
    def of(cls, errors: np.ndarray, false_alarms: float) -> Threshold:
        """Returns the smallest threshold that respects `false_alarms`; with too few samples, their largest error.

        :param errors: the errors of held-out normal samples, `[n]`. Raises `BadInput` for none.
        """
        count = len(errors)
        if not count:
            raise BadInput(
                f"no sample is held out to choose a threshold by: every {EVERY}th normal sample of data.path is, or by "
                f"chance one in {EVERY}, so it needs {EVERY} of them at least"
            )
        # the number of possible ranks of a further error that are above the threshold
        above = max(1, math.floor((count + 1) * false_alarms + _ROUNDING))
        return cls(float(np.sort(errors)[-above]), count, above / (count + 1))

    @classmethod
    def fitted(cls, errors: np.ndarray, false_alarms: float) -> Threshold:
        """Returns the threshold above which a further error lies with the chance `false_alarms`, if the logarithms of
        errors are normally distributed: a prediction interval. So few samples show more than by their largest error.

        :param errors: the errors of normal samples, `[n]`. Raises `BadInput` for less than three.
        """
        count = len(errors)
        if count < _LEAST_FITTED:
            raise BadInput(f"{count} normal samples in data.path: a threshold needs {_LEAST_FITTED} at least")
        logs = np.log(np.maximum(errors, _LEAST_ERROR))
        width = _student_quantile(1 - false_alarms, count - 1) * math.sqrt(1 + 1 / count)
        return cls(float(np.exp(logs.mean() + width * logs.std(ddof=1))), count, false_alarms)


def _student_quantile(chance: float, freedom: int) -> float:
    """Returns a quantile of Student's t distribution, by its expansion about the normal one (Fisher and Cornish, The
    Percentile Points of Distributions Having Known Cumulants, Technometrics 2, 1960). At 0.9999 it is exact to 1 % from
    9 degrees of freedom on; with 4 it is a tenth too small, with 2 a half.

    >>> round(_student_quantile(0.99, 19), 3)
    2.539
    """
    z = NormalDist().inv_cdf(chance)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def judging(samples: Samples, layout: ParamLayout, *, by_content: bool) -> Samples:
    """Returns the samples that determine a device's threshold: those that a model was not trained on; or with second
    moments, which hardly depend on one device's samples, all normal ones.

    :param samples: all of the device's.
    """
    return _normal_ones(samples) if is_moments(layout) else divided(samples, by_content=by_content)[1]


def own_reconstruction(logits_of: LogitsOf, layout: ParamLayout, judged_by: Callable[[], LabelledSamples]) -> LogitsOf:
    """Returns the network as a device uses it: second moments judge about the mean and by the variation of its own
    normal samples, which stay on the device; other networks reconstruct as they are.

    :param judged_by: returns the samples of `judging`, as the network takes them.
    """
    if not is_moments(layout) or not len(own := judged_by()):
        return logits_of
    return OwnReconstruction(logits_of, layout, own)


def errors_of(logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples) -> np.ndarray:
    """Returns the reconstruction error of each sample, float64 `[n]`."""
    return evaluate_each(logits_of, params, samples).losses


def threshold(logits_of: LogitsOf, params: np.ndarray, layout: ParamLayout, own: LabelledSamples) -> Threshold:
    """Returns a model's threshold; with second moments each record is judged by the others.

    :param logits_of: the network as the device uses it.
    :param own: the samples of `judging`, as the network takes them.
    """
    false_alarms = own.targets.false_alarms
    assert false_alarms is not None
    if isinstance(logits_of, OwnReconstruction):
        errors = logits_of.errors_of_own(params)
    else:
        errors = errors_of(logits_of, params, own)
    return (Threshold.fitted if is_moments(layout) else Threshold.of)(errors, false_alarms)


def alarm_rates(errors: np.ndarray, faults: np.ndarray, threshold: Threshold) -> dict[str, float]:
    """Returns the shares of faults and of normal samples above a threshold, and the F1 score of these alarms; NaN where
    there are no such samples.

    :param errors: float64 `[n]`.
    :param faults: bool `[n]`.
    """
    alarms = errors > threshold.error
    caught, found = alarms[faults], {"detected": alarms[faults], "false_alarms": alarms[~faults]}
    rates = {name: float(each.mean()) if len(each) else math.nan for name, each in found.items()}
    return rates | {"f1": float(2 * caught.sum() / max(1, alarms.sum() + faults.sum()))}


def _normal_ones(samples: Samples) -> Samples:
    return samples.take(np.flatnonzero(normal(samples.labels)))
