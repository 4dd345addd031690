"""Detects anomalies: a sample is unusual if its reconstruction error is larger than those of nearly all held-out ones.

No labels are needed. A device trains on four fifths of its samples; the errors of the other fifth, which is never used
in training, determine its threshold. Both stay on the device. The threshold is conformal (Laxhammar and Falkman,
Conformal Prediction for Distribution-Independent Anomaly Detection in Streaming Vessel Data, 2010): while a machine
behaves as in the held-out samples, at most the wanted share of its samples is above it, for every network.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hushfleet.data.held_out import chosen_by_content
from hushfleet.data.samples import LabelledSamples
from hushfleet.errors import BadInput
from hushfleet.learning.evaluation import LogitsOf, evaluate_each
from hushfleet.losses import normal

_ROUNDING = 1e-9
EVERY = 5
"""Every fifth sample is held out, or one in five by its content, so that samples that are appended later do not change
the choice among earlier ones."""


def divided(labels: np.ndarray, *, by: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the samples to train on, and of the held-out ones; labelled faults are in neither.

    :param labels: `[n, 1]`, 0 for a normal sample.
    :param by: the samples `[n, ...]`: each sample's content decides whether it is held out, one in five by chance.
        None: every fifth is. Then one added or removed sample shifts all later ones, so that many other samples are
        trained on (`TaskSpec.by_content`).
    """
    (kept,) = np.nonzero(normal(labels))
    held = np.arange(len(kept)) % EVERY == EVERY - 1 if by is None else chosen_by_content(by[kept], 1 / EVERY)
    return kept[~held], kept[held]


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


def errors_of(logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples) -> np.ndarray:
    """Returns the reconstruction error of each sample, float64 `[n]`."""
    return evaluate_each(logits_of, params, samples).losses


def threshold(logits_of: LogitsOf, params: np.ndarray, held_out: LabelledSamples) -> Threshold:
    """Returns a model's threshold, from samples that it was not trained on."""
    false_alarms = held_out.targets.false_alarms
    assert false_alarms is not None
    return Threshold.of(errors_of(logits_of, params, held_out), false_alarms)
