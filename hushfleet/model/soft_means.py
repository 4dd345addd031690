"""Soft k-means on unlabelled images, a part of a device's own head; it begins with the classes that the head sees.

Each class has a mean of features: of its labelled images, which count `LABELLED` times, and of the unlabelled ones,
each with the probability that it is of the class. The own head gives these probabilities first, then the distances to
the means. The logits - SHARPNESS |phi - mean|^2 differ between classes by a linear function of phi, so the mean of the
head's logits and these is a linear head again.

Soft k-means takes classes to be equally frequent. Where the labels say that they differ (`Mix.unlike`), the logarithm
of each class's share is added.
"""

from __future__ import annotations

import numpy as np

from hushfleet.model.softmax import log_softmax

LABELLED, SHARPNESS, PASSES, LEAST = 2.0, 8.0, 3, 1e-6
"""LEAST: of a probability, so that each class has a mean."""


def soft_means(
    features: np.ndarray, labels: np.ndarray, unlabelled: np.ndarray, logits: np.ndarray, unlike: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weight `[C, F]` and bias `[C]` of the logits by distance.

    :param features: `[m, F]`, of the labelled images.
    :param labels: int `[m]`.
    :param unlabelled: `[u, F]`.
    :param logits: `[C, u]`, what the own head gives for these.
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
