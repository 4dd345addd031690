"""Accuracy and loss of a model on labelled samples, in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import LabelledSamples
from hushfleet.model.objectives import CROSS_ENTROPY

EVALUATION_BATCH = 256


class Evaluation(NamedTuple):
    """`accuracy` in 0..1, the share of right answers (`hushfleet.model.targets`), and the mean `loss`, of a
    cross-entropy in nats; NaN where there are no samples."""

    accuracy: float
    loss: float


class Outcomes(NamedTuple):
    """What became of each sample: `correct` bool `[n]`, `losses` float64 `[n]`."""

    correct: np.ndarray
    losses: np.ndarray

    def mean(self) -> Evaluation:
        if not len(self.correct):
            return Evaluation(float("nan"), float("nan"))
        return Evaluation(float(self.correct.mean()), float(self.losses.mean()))

    def take(self, indices: np.ndarray) -> Outcomes:
        return Outcomes(self.correct[indices], self.losses[indices])


LogitsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]


def evaluate(logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples) -> Evaluation:
    """:param logits_of: (params `[d]`, images `[b, C, H, W]`) -> logits `[b, classes]`."""
    return evaluate_each(logits_of, params, samples).mean()


def evaluate_each(logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples) -> Outcomes:
    """The same for every sample, for means over parts of a test set."""
    objective = samples.targets.objective(CROSS_ENTROPY)
    correct, losses = np.empty(len(samples), bool), np.empty(len(samples))
    for first in range(0, len(samples), EVALUATION_BATCH):
        batch = samples.take(slice(first, first + EVALUATION_BATCH))
        logits = logits_of(params, batch.x).astype(np.float64)
        part = slice(first, first + len(batch))
        losses[part], _ = objective.loss_and_cotangent(logits, batch.y)
        correct[part] = samples.targets.right(logits, batch.labels)
    return Outcomes(correct, losses)
