"""Runs soft k-means on unlabelled images, for a part of a device's personalized head; it starts with the head's
predictions.

Each class has a mean of features: of its labelled images, which count `LABELLED` times, and of the unlabelled ones,
each weighted with the probability that it belongs to the class. At first the personalized head gives these
probabilities, then the distances to the means. The logits - SHARPNESS |phi - mean|^2 differ between classes by a linear
function of phi, so the mean of the head's logits and these logits is a linear head again.

Soft k-means assumes that classes are equally frequent. If the labels show that they differ (`Mix.unlike`), the
logarithm of each class's share is added.
"""

from __future__ import annotations

import numpy as np

from hushfleet.learning.softmax import log_softmax

LABELLED, SHARPNESS, PASSES, LEAST = 2.0, 8.0, 3, 1e-6
"""LEAST: the lower limit of a probability, so that each class has a mean."""


def soft_means(
    features: np.ndarray, labels: np.ndarray, unlabelled: np.ndarray, logits: np.ndarray, unlike: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns weight `[C, F]` and bias `[C]` of the logits that the distances give.

    :param features: `[m, F]`, the features of the labelled images.
    :param labels: int `[m]`.
    :param unlabelled: `[u, F]`.
    :param logits: `[C, u]`, the personalized head's logits for these.
    """
    known = LABELLED * (np.arange(len(logits))[:, None] == labels)
    for _ in range(PASSES):
        parts = np.concatenate([known, np.maximum(np.exp(log_softmax(logits)), LEAST)], 1)
        mass = parts.sum(1)
        means = parts @ np.concatenate([features, unlabelled]) / mass[:, None]
        bias = unlike * np.log(mass / mass.sum()) - SHARPNESS * (means**2).sum(1)
        weight = 2 * SHARPNESS * means
        logits = weight @ unlabelled.T + bias[:, None]
    return weight, bias
