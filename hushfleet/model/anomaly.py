"""Anomaly detection: a device calls a sample unusual that is given back worse than nearly all held-out ones.

Nobody labels anything. A device trains on four of five of its samples, and the errors of the fifth, which is never
trained on, set its threshold. Both stay on the device. The threshold is a conformal one (Laxhammar and Falkman,
Conformal Prediction for Distribution-Independent Anomaly Detection in Streaming Vessel Data, 2010): while a machine
behaves as in the held-out samples, at most the wanted share of its samples lies above it, whatever the network is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hushfleet.data.held_out import chosen_by_content
from hushfleet.data.samples import LabelledSamples
from hushfleet.errors import BadInput
from hushfleet.losses import normal
from hushfleet.model.evaluation import LogitsOf, evaluate_each

_ROUNDING = 1e-9
EVERY = 5
"""Every fifth sample is held out, or one in five by its content, so that samples that are appended later change nothing
for those before."""


def divided(labels: np.ndarray, *, by: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The places of the samples to train on, and of the held-out ones; a fault that a label marks is in neither.

    :param labels: `[n, 1]`, 0 for what is normal.
    :param by: the samples `[n, ...]`: the content of each says whether it is held out, of one in five by chance. None:
        every fifth is. Then one sample more or less moves all that follow, so that many others train in their places
        (`TaskSpec.divides_by_content`).
    """
    (kept,) = np.nonzero(normal(labels))
    held = np.arange(len(kept)) % EVERY == EVERY - 1 if by is None else chosen_by_content(by[kept], 1 / EVERY)
    return kept[~held], kept[held]


class Threshold(NamedTuple):
    """The error above which a sample is unusual.

    :param held_out: the number of samples that it was chosen by.
    :param false_alarms: the share of normal samples that lies above it, at most.
    """

    error: float
    held_out: int
    false_alarms: float

    @classmethod
    def of(cls, errors: np.ndarray, false_alarms: float) -> Threshold:
        """The smallest threshold that keeps to `false_alarms`; of too few samples the largest of their errors.

        :param errors: of held-out normal samples, `[n]`. Raises `BadInput` for none.
        """
        count = len(errors)
        if not count:
            raise BadInput(
                f"no sample is held out to choose a threshold by: every {EVERY}th normal sample of data.path is, or by "
                f"chance one in {EVERY}, so it needs {EVERY} of them at least"
            )
        above = max(
            1, math.floor((count + 1) * false_alarms + _ROUNDING)
        )  # of the places that a further error may take
        return cls(float(np.sort(errors)[-above]), count, above / (count + 1))


def errors_of(logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples) -> np.ndarray:
    """The reconstruction error of each sample, float64 `[n]`."""
    return evaluate_each(logits_of, params, samples).losses


def threshold(logits_of: LogitsOf, params: np.ndarray, held_out: LabelledSamples) -> Threshold:
    """The threshold of a model by samples that it was not trained on."""
    false_alarms = held_out.targets.false_alarms
    assert false_alarms is not None
    return Threshold.of(errors_of(logits_of, params, held_out), false_alarms)
