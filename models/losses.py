"""Implements the objectives of `hushfleet.objectives` in PyTorch, with operators that support grad, vmap and export."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hushfleet.losses import TINY, loss_of
from hushfleet.models.own_loss import own_loss
from hushfleet.objectives import Objective

EXCLUDED = -1e30  # a logit with probability exactly 0; unlike infinity, it does not produce NaN


def mean_loss(objective: Objective, logits: Tensor, y: Tensor) -> Tensor:
    """Returns the mean loss without a teacher: logits `[B, C]`, labels int64 `[B]` or targets float32 `[B, C]`."""
    plain = objective.of_classes and not objective.own
    return F.cross_entropy(logits, y) if plain else losses_of(objective, logits, y).mean()


def losses_of(objective: Objective, logits: Tensor, y: Tensor) -> Tensor:
    """Returns each sample's loss `[B]`, without a teacher."""
    if objective.own:
        return own_loss(objective.own)(logits, y)
    if objective.of_classes:
        return F.cross_entropy(logits, y, reduction="none")
    losses: Tensor = loss_of(objective).each(logits, y)[0].mean(1)
    return losses


def distilled_losses(objective: Objective, logits: Tensor, y: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """Returns each sample's loss `[B]`: logits `[B, C]`, the teacher's values `[B, ...]`, labels and weights `[B]`."""
    logits = logits.to(teacher.dtype)  # losses are float32 even for a network in bfloat16
    if objective.kind == "distillation":
        t = objective.temperature
        divergence = t * t * _divergence(logits / t, teacher / t)
    elif objective.kind == "contrastive":
        near, far = (_cosine(logits, each) for each in teacher.chunk(2, 1))
        divergence = torch.logaddexp(torch.zeros_like(near), (far - near) / objective.temperature)
    else:
        divergence = _decoupled(objective, logits, y, teacher)
    return (1 - weight) * F.cross_entropy(logits, y, reduction="none") + weight * divergence


def _decoupled(objective: Objective, logits: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    label = torch.arange(logits.shape[1], device=y.device) == y.unsqueeze(1)
    two, others = [], []
    for values in (logits, teacher):
        warm = values if objective.target_temperature == 1 else values / objective.target_temperature
        rest = torch.where(label, EXCLUDED, warm)
        two.append(torch.stack([torch.where(label, warm, 0).sum(1), rest.logsumexp(1)], 1))
        others.append(torch.where(label, EXCLUDED, values / objective.temperature))
    return _divergence(*two) + objective.non_target_weight * _divergence(*others)


def _cosine(student: Tensor, other: Tensor) -> Tensor:
    ours, theirs = (each.square().sum(1).clamp(min=TINY).rsqrt() for each in (student, other))
    return (student * other).sum(1) * ours * theirs


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    theirs = F.log_softmax(teacher, 1)
    return (theirs.exp() * (theirs - F.log_softmax(student, 1))).sum(1)
