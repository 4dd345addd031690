"""Reconstructs a training image from the update that it caused, by an attacker that knows the network.

Geiping et al., Inverting Gradients, NeurIPS 2020: searches for an image whose gradient has the same direction as the
observed one (cosine distance, which clipping does not change), and which is smooth (total variation), by Adam on the
signs of this objective's gradient. All images are searched at once, independently and from several starts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hushfleet.array_api import one_torch_thread
from hushfleet.models.model import Model
from hushfleet.progress import doing

STEP = 0.1  # of Adam, in normalised pixels; as in Geiping et al., it decays after these parts of the steps
DECAYS = (3 / 8, 5 / 8, 7 / 8)


def gradients(model: Model, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns cross-entropy gradients of each image: `x [B, C, H, W]`, `y [B]` -> `[B, d]`, differentiable by `x`."""

    def loss(tensors: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model.forward(tensors, image[None]), label[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(model.layout.unflatten(params), x, y)
    return torch.cat([each[name].flatten(1) for name in model.layout.names], dim=1)


def reconstruct(
    model: Model,
    params: np.ndarray,
    updates: np.ndarray,
    labels: np.ndarray,
    limits: tuple[np.ndarray, np.ndarray],
    *,
    steps: int = 400,
    tries: int = 4,
    smooth: float = 1e-3,
    seed: int = 0,
) -> np.ndarray:
    """Returns the attacker's guess of the images behind `updates`.

    :param params: float32 `[d]`, the global model with which the devices started.
    :param updates: float32 `[B, d]`, the observed updates; only their directions count.
    :param labels: int64 `[B]`, known to the attacker.
    :param limits: least and greatest normalised pixel of each channel, `[C]` each.
    :param tries: number of starts of each search; the one with the lowest objective counts.
    :param smooth: weight of the total variation.
    :param seed: draws the starts of the searches, the same for all updates.
    :return: float32 `[B, C, H, W]`, normalised pixels.
    """
    low, high = (torch.from_numpy(np.asarray(each, np.float32))[:, None, None] for each in limits)
    count = len(updates)
    starts = np.random.default_rng(seed).standard_normal((tries, *model.input_shape), np.float32)
    x = torch.from_numpy(starts.repeat(count, axis=0)).requires_grad_()
    y, weights = torch.from_numpy(np.asarray(labels, np.int64)).repeat(tries), torch.from_numpy(params)
    sought = -torch.from_numpy(updates).repeat(tries, 1)

    def objective() -> Tensor:
        return 1 - F.cosine_similarity(gradients(model, weights, x, y), sought) + smooth * _variation(x)

    adam = torch.optim.Adam([x], lr=STEP)
    decay = torch.optim.lr_scheduler.MultiStepLR(adam, [int(part * steps) for part in DECAYS], gamma=0.1)
    # Each step has some hundred small operations: several threads would wait for each other longer than they work.
    with one_torch_thread(), doing("inverting updates", total=steps) as work:
        for _ in range(steps):
            (slope,) = torch.autograd.grad(objective().sum(), x)
            x.grad = slope.sign()
            adam.step()
            decay.step()
            with torch.no_grad():
                x.clamp_(low, high)
            work.count()
    with torch.no_grad():
        best = objective().reshape(tries, count).argmin(dim=0)
        found = x.reshape(tries, count, *model.input_shape)[best, torch.arange(count)]
    return np.asarray(found.numpy())


def _variation(x: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbours, across and down: `[B]`; 0 along sides of one pixel."""
    sides = [x.diff(dim=axis).abs().flatten(1) for axis in (2, 3) if x.shape[axis] > 1]
    return sum((each.mean(1) for each in sides), torch.zeros(len(x)))
