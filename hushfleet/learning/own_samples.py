"""Gives a method access to the device's samples outside of its training steps; all results are private."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from hushfleet.array_api import Array
from hushfleet.data.samples import LabelledSamples
from hushfleet.errors import GraphRefused, PrivacyError
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.evaluation import Evaluation, LogitsOf, evaluate

_LOGITS_BATCH = 256
_SQUARES_BATCH = 32


class Teacher(NamedTuple):
    """The teacher of a distillation: its values of the own samples, float32 `[n, ...]` (`Objective.teacher_values`),
    and the weight in [0, 1] of the distillation relative to the cross-entropy."""

    logits: np.ndarray
    weight: float


class OwnSamples(Protocol):
    """The device's own samples, with the operations that a method may use.

    :param count: their number.
    """

    count: int

    def gradient(self, params: Array, indices: np.ndarray) -> tuple[float, Array]:
        """Returns mean loss and mean gradient, float32 `[d]`, at `params [d]` of the samples at these indices, int
        `[b]`, without dropout, augmentation and penalties."""

    def squared_gradient(self, params: Array) -> Array:
        """Returns the mean over the samples of each sample's squared gradient, float32 `[d]`: the diagonal of the
        empirical Fisher information at `params [d]`."""

    def logits(self, params: Array) -> np.ndarray:
        """Returns logits float32 `[n, C]` of all samples, without dropout."""

    def evaluate(self, params: Array) -> Evaluation:
        """Computes accuracy and mean loss of a model, float `[d]`, on all samples."""

    def label_counts(self, classes: int) -> np.ndarray:
        """Returns the number of samples of each class, int64 `[classes]`."""


class LoadedSamples:
    """The implementation for samples in memory.

    :param by_record: each sample's logits are computed alone, because a graph may mix several samples. If this fails,
        the logits are NaN, and only this sample's gradient counts as zero.
    """

    def __init__(
        self, samples: LabelledSamples, gradient: GradientFunction, logits_of: LogitsOf, *, by_record: bool = False
    ) -> None:
        self.samples, self.gradient_of, self._logits_of = samples, gradient, logits_of
        self._by_record = by_record
        self.count = len(samples)

    def gradient(self, params: Array, indices: np.ndarray) -> tuple[float, Array]:
        batch = self.samples.take(indices)
        return self.gradient_of(params, batch.x, batch.y, out=np.empty_like(params))

    def squared_gradient(self, params: Array) -> Array:
        """Computes it in batches: memory does not grow with the data."""
        at_once = getattr(self.gradient_of, "squared_sum", None)  # a runtime that never stores single gradients
        step = 1 if at_once is None else _SQUARES_BATCH
        total, one = np.zeros_like(params), np.empty_like(params)
        for start in range(0, len(self.samples), step):
            batch = self.samples.take(slice(start, start + step))
            if at_once is None:
                self.gradient_of(params, batch.x, batch.y, out=one)
                one *= one
            else:
                one = at_once(params, batch.x, batch.y)
            total += one
        total /= len(self.samples)
        return total

    def logits(self, params: Array) -> np.ndarray:
        found: list[np.ndarray | None] = []
        together = 1 if self._by_record else _LOGITS_BATCH
        for first in range(0, len(self.samples), together):
            part = self.samples.take(slice(first, first + together))
            try:
                found.append(self._logits_of(params, part.x))
            except GraphRefused:
                if not self._by_record:
                    raise
                found.append(None)
        width = next((logits.shape[1] for logits in found if logits is not None), 0)
        unknown = np.full((1, width), np.nan, np.float32)
        return np.concatenate([unknown if logits is None else logits for logits in [*found, unknown[:0]]])

    def evaluate(self, params: Array) -> Evaluation:
        return evaluate(self._logits_of, params, self.samples)

    def label_counts(self, classes: int) -> np.ndarray:
        return np.bincount(self.samples.labels, minlength=classes)


class HiddenSamples:
    """Refuses every access: with the unit `record`, samples are used only in noised gradients."""

    def __getattr__(self, question: str) -> Any:
        raise PrivacyError('a method may not look at samples outside of noised gradients with privacy unit "record"')


def distillation_inputs(teacher: Teacher | None, indices: np.ndarray) -> dict[str, Any]:
    """Returns the arguments of a distilling objective for some samples; without a teacher it is the cross-entropy."""
    if teacher is None:
        return {"teacher": None, "distill": None}
    return {"teacher": teacher.logits[indices], "distill": np.full(len(indices), teacher.weight, np.float32)}
