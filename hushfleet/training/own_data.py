"""The device's samples, as a method may look at them outside of its training steps."""

from __future__ import annotations

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.methods.base import Array
from hushfleet.model.evaluation import Evaluation, LogitsOf, evaluate
from hushfleet.training.batch_gradient import GradientFunction

_FISHER_BATCH = 1  # squares of single gradients, one after the other: memory does not grow with the data
_LOGITS_BATCH = 256


class LocalData:
    """The device's samples as `hushfleet.methods.base.OwnData`."""

    def __init__(self, samples: Samples, gradient: GradientFunction, logits_of: LogitsOf) -> None:
        self.samples, self._gradient, self._logits_of = samples, gradient, logits_of

    def squared_gradient(self, params: Array) -> Array:
        total, one = np.zeros_like(params), np.empty_like(params)
        for first in range(0, len(self.samples), _FISHER_BATCH):
            batch = self.samples.take(slice(first, first + _FISHER_BATCH))
            self._gradient(params, batch.x, batch.y, out=one)
            one *= one
            total += one
        total /= len(self.samples)
        return total

    def logits(self, params: Array) -> np.ndarray:
        starts = range(0, len(self.samples), _LOGITS_BATCH)
        found = [self._logits_of(params, self.samples.take(slice(i, i + _LOGITS_BATCH)).x) for i in starts]
        return np.concatenate(found) if found else np.empty((0, 0), np.float32)

    def evaluate(self, params: Array) -> Evaluation:
        return evaluate(self._logits_of, params, self.samples)
