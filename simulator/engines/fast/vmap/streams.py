"""Computes a cohort's gradients of a large network on CUDA: one client after the other, on several streams.

vmap turns a convolution with each client's own weights into a grouped convolution, and cuDNN runs its groups one by
one, at a fraction of the GPU's speed. A large network fills the GPU with the batches of one or a few clients, so each
client has its own kernels here, and streams let the kernels of several clients overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hushfleet.models.torch_gradient import TorchGradient

LARGE = 1 << 20
"""A network is large from this size on: ResNet-18 has 11 million, `svhn-cnn` 1.6, `fashion-mnist-cnn` 1.2."""
STREAMS = 8


class StreamedGradient:
    """Implements `TorchGradient.clients` on CUDA tensors, equal up to the rounding of float32."""

    def __init__(self, gradient: TorchGradient, streams: int = STREAMS) -> None:
        self.gradient = gradient
        self._streams = [torch.cuda.Stream() for _ in range(streams)]

    def clients(
        self,
        params: Tensor,
        x: Tensor,
        y: Tensor,
        dropout: Sequence[Tensor] = (),
        out: Tensor | None = None,
        **weighed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the same as `TorchGradient.clients`."""
        out = torch.empty_like(params) if out is None else out
        losses = torch.empty(len(params), device=params.device)
        caller = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(caller)
        for row in range(len(params)):
            with torch.cuda.stream(self._streams[row % len(self._streams)]):
                own = {name: each[row] for name, each in weighed.items() if each is not None}
                masks = [mask[row] for mask in dropout]
                loss, _ = self.gradient.on_device(params[row], x[row], y[row], masks, out[row], **own)
                losses[row].copy_(loss)
        for stream in self._streams:
            caller.wait_stream(stream)
        return losses, out
