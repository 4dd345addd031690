"""Computes loss and flat gradient of a network in PyTorch: for one client, and for many at once.

The flat vector itself is never differentiated, because the backward of a slice allocates `d` zeros, once for every
tensor. Instead, each tensor is a leaf that shares the vector's memory, and its gradient is written to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushfleet.models.losses import distilled_losses, losses_of, mean_loss
from hushfleet.models.model import Model
from hushfleet.objectives import CROSS_ENTROPY, Objective, both_or_none


class TorchGradient:
    """`(params, x, y, dropout) -> (loss, gradient)` of `model` for a batch's mean loss of `objective`.

    A call may get a teacher's values float32 `[B, ...]` and the distillation's weights float32 `[B]`; without
    them, it computes the loss without a teacher.

    NumPy arrays give NumPy arrays, computed on `device`; tensors give tensors on their device. Images are
    float32 `[B, C, H, W]`, labels int64 `[B]` or targets float32 `[B, classes]`, params and gradients
    float32 `[d]`.
    """

    def __init__(
        self, model: Model, *, device: str | torch.device = "cpu", objective: Objective = CROSS_ENTROPY
    ) -> None:
        self.model = model
        self.objective = objective
        self.layout = model.layout
        self.device = torch.device(device)

    def __call__(
        self,
        params: Any,
        x: Any,
        y: Any,
        dropout: Sequence[Any] = (),
        out: Any | None = None,
        teacher: Any | None = None,
        distill: Any | None = None,
    ) -> tuple[float, Any]:
        """Returns the batch's mean loss and its gradient `[d]`, written into `out` if given."""
        loss, gradient = self.on_device(params, x, y, dropout, out, teacher=teacher, distill=distill)
        return loss.item(), gradient

    def on_device(
        self, params: Any, x: Any, y: Any, dropout: Sequence[Any] = (), out: Any | None = None, **weighed: Any | None
    ) -> tuple[Tensor, Any]:
        """Computes the same as a call, but leaves the loss on the device, so that nothing waits for it.

        :param weighed: `teacher` and `distill` as in a call, and `weights`, float32 `[B]`: the loss is the weighted
            mean over the samples.
        """
        leaves = {
            name: view.detach().requires_grad_() for name, view in self.layout.unflatten(self._tensor(params)).items()
        }
        loss = self._loss(leaves, self._tensor(x), self._tensor(y), self._tensors(dropout), **self._more(**weighed))
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return loss.detach(), self._flat(dict(zip(leaves, grads, strict=True)), like=params, out=out)

    def clients(
        self, params: Any, x: Any, y: Any, dropout: Sequence[Any] = (), out: Any | None = None, **weighed: Any | None
    ) -> tuple[Any, Any]:
        """Computes many clients in one pass: `params [c, d]`, `x [c, B, C, H, W]`, `y [c, B]`, masks `[c, B, *shape]`.

        :param weighed: `teacher` `[c, B, ...]`, `distill` `[c, B]`, and `weights`, float32 `[c, B]`, not negative, with
            a positive value in each row: each client's loss is the weighted mean over its samples. The padding of a
            smaller batch has weight zero.
        :return: losses `[c]` and gradients `[c, d]`.
        """

        def loss(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, dropout: Any, more: dict[str, Tensor]) -> Tensor:
            return self._loss(tensors, x, y, dropout, **more)

        return self._many(torch.func.grad_and_value(loss), params, x, y, dropout, self._more(**weighed), out)

    def records(
        self, params: Any, x: Any, y: Any, dropout: Sequence[Any] = (), out: Any | None = None, **taught: Any | None
    ) -> tuple[Any, Any]:
        """Computes single samples of many clients in one pass, with the arguments of `clients` but for `weights`.

        :return: each sample's loss `[c, B]` and gradient `[c, B, d]`.
        """

        def loss(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, dropout: Any, more: dict[str, Tensor]) -> Tensor:
            alone = {name: each[None] for name, each in more.items()}
            return self._loss(tensors, x[None], y[None], [mask[None] for mask in dropout], **alone)

        of_client = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0, 0, 0))
        return self._many(of_client, params, x, y, dropout, self._more(**taught), out)

    @torch.no_grad()
    def logits(self, params: Any, x: Any) -> Any:
        """Returns logits `[B, classes]` with `params [d]`, without dropout."""
        tensors = self.layout.unflatten(self._tensor(params))
        return _like(self.model.forward(tensors, self._tensor(x)), params)

    def _many(
        self,
        of_client: Callable[..., Any],
        params: Any,
        x: Any,
        y: Any,
        dropout: Sequence[Any],
        more: dict[str, Tensor],
        out: Any | None,
    ) -> tuple[Any, Any]:
        """Returns losses and flat gradients of all clients; `of_client` computes named gradients and losses of one."""
        tensors = self.layout.unflatten(self._tensor(params))
        grads, losses = torch.func.vmap(of_client)(
            tensors, self._tensor(x), self._tensor(y), self._tensors(dropout), more
        )
        return _like(losses.detach(), params), self._flat(grads, like=params, out=out)

    def _more(
        self, teacher: Any | None = None, distill: Any | None = None, weights: Any | None = None
    ) -> dict[str, Tensor]:
        """Returns the optional arguments of `_loss` that a call has, by name."""
        given = both_or_none(teacher, distill, distills=self.objective.distills)
        more = {} if given is None else {"teacher": given[0], "distill": given[1]}
        return {name: self._tensor(each) for name, each in (more | {"weights": weights}).items() if each is not None}

    def _loss(
        self,
        tensors: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        dropout: Sequence[Tensor],
        teacher: Tensor | None = None,
        distill: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        logits = self.model.forward(tensors, x, dropout)
        if teacher is not None and distill is not None:
            losses = distilled_losses(self.objective, logits, y, teacher, distill)
        elif weights is None:
            return mean_loss(self.objective, logits, y)
        else:
            losses = losses_of(self.objective, logits, y)
        return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()

    def _flat(self, grads: Mapping[str, Tensor], *, like: Any, out: Any | None) -> Any:
        """Writes named gradients `[..., *shape]` into one `[..., d]`: `out` or a new one like `like`."""
        first = next(iter(grads.values()))
        lead = first.shape[: first.ndim - len(self.layout.shapes[0])]
        target = out if out is not None else _empty((*lead, self.layout.size), like, first)
        if tuple(target.shape) != (*lead, self.layout.size):
            raise ValueError(f"out has shape {tuple(target.shape)}, expected {(*lead, self.layout.size)}")
        flat = torch.from_numpy(target) if isinstance(target, np.ndarray) else target
        for name, place in self.layout.slices.items():
            flat[..., place].copy_(grads[name].detach().reshape(*lead, -1))
        return target

    def _tensors(self, arrays: Sequence[Any]) -> tuple[Tensor, ...]:
        return tuple(self._tensor(array) for array in arrays)

    def _tensor(self, array: Any) -> Tensor:
        if isinstance(array, Tensor):
            return array
        # PyTorch has no read-only tensors and warns; nothing here writes to its inputs, but a copy is cheap.
        array = array if array.flags.writeable else array.copy()
        return torch.from_numpy(array).to(self.device)


def _like(tensor: Tensor, like: Any) -> Any:
    return tensor if isinstance(like, Tensor) else tensor.cpu().numpy()


def _empty(shape: tuple[int, ...], like: Any, grad: Tensor) -> Any:
    if isinstance(like, Tensor):
        return torch.empty(shape, dtype=grad.dtype, device=grad.device)
    return np.empty(shape, np.float32)
