"""Computes the baseline of training alone for a model with one linear layer on fixed features: the best of five ways.

The ways are softmax regression with three penalties, the nearest neighbour and the nearest class mean, on the same
features. The best one is chosen for each test by the fleet's mean on the test itself. No device could do this, so the
baseline is a little better than any real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import LabelledSamples
from hushfleet.learning.personalized_head import features_of
from hushfleet.learning.softmax import fit, rotated

AccuracyByWay = dict[str, float]
"""Accuracy in 0..1 for each way of training alone; NaN without test images."""
Predictions = dict[str, np.ndarray]
"""For each way the predicted class of each image, int `[n]`; empty for a device without training samples."""
PENALTIES = (0.01, 0.001, 0.0001)
"""Penalties of softmax regression on the norm of a head."""
_BATCH = 256


def accuracies(said: Predictions, labels: np.ndarray) -> AccuracyByWay:
    return {way: float((each == labels).mean()) if len(each) else float("nan") for way, each in said.items()}


def predict_local_only(trains: Sequence[LabelledSamples], test: LabelledSamples, *, classes: int) -> list[Predictions]:
    """Trains devices, each alone, in each of the ways; returns the classes that each device predicts for the test.

    :param trains: the features of each device, `[m, F, 1, 1]` or a similar shape. Without samples, the device's
        predictions are empty.
    """
    learned = [_Learned.of(train, classes) if len(train) else None for train in trains]
    found = [{way: np.zeros(len(test) if each else 0, np.int64) for way in _ways()} for each in learned]
    for first in range(0, len(test), _BATCH):
        part = slice(first, first + _BATCH)
        shown = features_of(test.take(part))  # converted once for all devices
        for said, each in zip(found, learned, strict=True):
            if each is not None:
                for way, answer in zip(_ways(), each.answers(shown), strict=True):
                    said[way][part] = answer
    return found


class _Learned(NamedTuple):
    """A device's heads and samples, from training alone.

    :param heads: softmax regression with each penalty, `[ways, C, F]`.
    :param means: the mean of each class in `present`, `[k, F]`.
    """

    heads: np.ndarray
    x: np.ndarray
    y: np.ndarray
    means: np.ndarray
    present: np.ndarray

    @classmethod
    def of(cls, train: LabelledSamples, classes: int) -> _Learned:
        x, y = features_of(train), train.y
        basis = rotated(x)
        offsets = np.zeros((len(PENALTIES), classes, len(y)), np.float32)
        heads = fit(basis.z, basis.moments, y, offsets, np.array(PENALTIES)) @ basis.axes
        present = np.unique(y)
        return cls(heads, x, y, np.stack([x[y == label].mean(0) for label in present]), present)

    def answers(self, shown: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the predicted classes int `[n]` of each way."""
        yield from (shown @ self.heads.swapaxes(1, 2)).argmax(2)
        yield self.y[_nearest(shown, self.x)]
        yield self.present[_nearest(shown, self.means)]


def best_way(found: Sequence[AccuracyByWay]) -> str:
    """Returns the way with the highest mean over devices."""
    return max(_ways(), key=lambda way: float(np.nanmean([each[way] for each in found] or [0.0])))


def _ways() -> list[str]:
    fits = [f"softmax regression (penalty {penalty:g})" for penalty in PENALTIES]
    return [*fits, "nearest neighbour", "nearest class mean"]


def _nearest(x: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Finds the nearest row of `others [m, F]` for each row of `x [n, F]`; int `[n]`."""
    return np.asarray(((others * others).sum(1) - 2 * (x @ others.T)).argmin(1))
