"""Losses of your own for classes: functions of logits `[B, C]` and classes `[B]` that return one loss for each sample.

hushfleet simulate tasks/digits-record.toml --set model.loss=examples/losses.py:focal
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GAMMA = 2.0
WEIGHTS = torch.tensor([1.0, 1, 1, 1, 1, 4, 1, 1, 1, 1])  # one for each class
SMOOTHING = 0.1


def focal(logits: Tensor, y: Tensor) -> Tensor:
    """Counts samples that are right and sure less: -(1 - p)^gamma log p (Lin et al., ICCV 2017)."""
    losses = F.cross_entropy(logits, y, reduction="none")
    return (1 - torch.exp(-losses)) ** GAMMA * losses


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    """Counts some classes more: the cross-entropy times the weight of the sample's class."""
    return WEIGHTS.to(logits.device)[y] * F.cross_entropy(logits, y, reduction="none")


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    """Learns the class with 1 - s and all classes with s / C each (Szegedy et al., CVPR 2016)."""
    logs = F.log_softmax(logits, 1)
    right = logs.gather(1, y.unsqueeze(1)).squeeze(1)
    return -(1 - SMOOTHING) * right - SMOOTHING * logs.mean(1)
