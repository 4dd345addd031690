"""Chooses the images of the common test set that a report shows, and predicts their classes."""

from __future__ import annotations

import numpy as np

from hushfleet.data.samples import LabelledSamples
from hushfleet.learning.evaluation import EVALUATION_BATCH, LogitsOf

EXAMPLES = 12
_EXAMPLE_STREAM = 0x45584D50


def choose_examples(common_test: LabelledSamples, *, seed: int) -> np.ndarray:
    """Returns indices of the shown images, int `[EXAMPLES]` at most: drawn at random, so that nobody selects them."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_EXAMPLE_STREAM,)))
    return rng.permutation(len(common_test))[:EXAMPLES]


def answers(logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples) -> np.ndarray:
    """Returns the class that a model predicts for each sample, int `[n]`."""
    starts = range(0, len(samples), EVALUATION_BATCH)
    batches = (samples.take(slice(first, first + EVALUATION_BATCH)) for first in starts)
    return np.concatenate([np.zeros(0, np.int64), *(logits_of(params, batch.x).argmax(1) for batch in batches)])
