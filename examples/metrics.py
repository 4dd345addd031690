"""Metrics of one's own: functions of logits [n, C] and labels [n] that return a number, or several as a dict or a list.

hushfleet simulate tasks/digits-hush.toml --set model.metrics='["examples/metrics.py:balanced_accuracy"]'
"""

from __future__ import annotations

import numpy as np


def per_class_recall(logits: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """Returns the share of right answers for each class that occurs."""
    right = logits.argmax(1) == labels
    return {int(label): float(right[labels == label].mean()) for label in np.unique(labels)}


def balanced_accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean of the classes' recalls."""
    return float(np.mean(list(per_class_recall(logits, labels).values())))


def calibration_error(logits: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Returns the expected calibration error: the gap of confidence and accuracy in bins of confidence, weighed by
    their samples (Guo et al., 2017)."""
    odds = np.exp(logits - logits.max(1, keepdims=True))
    confidence, right = (odds / odds.sum(1, keepdims=True)).max(1), logits.argmax(1) == labels
    bin_of = np.minimum(np.ceil(confidence * bins).astype(int), bins)
    gaps = [abs(np.sum(right[bin_of == each] - confidence[bin_of == each])) for each in range(bins + 1)]
    return float(np.sum(gaps) / len(labels))
