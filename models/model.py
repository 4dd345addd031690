"""Represents a network as a pure function over named tensors, with its properties.

A network is written once, with `torch.nn.functional` calls on a dict of tensors; gradients, vmapped
gradients and ONNX graphs all come from that one function. Dropout is explicit: the caller draws the masks
(0, or 1 / (1 - rate) for a kept activation), so every runtime and every client uses the same masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import DropoutSpec

if TYPE_CHECKING:
    from torch import Tensor

Forward = Callable[[Mapping[str, "Tensor"], "Tensor", Sequence["Tensor"]], "Tensor"]


@dataclass(frozen=True)
class Model:
    """One architecture.

    :param source: where the architecture was published.
    :param input_shape: channels, height, width of one image.
    :param dropout: the masks that `forward` takes in training, in order; each mask is `[B, *shape]`.
    :param function: `(tensors, x, dropout) -> logits`; called through `forward`.
    :param starts_at_zero: True for a convex network, which needs no random start.
    :param start: returns the starting vector for a seed, if the network has its own.
    :param vocabulary: the number of tokens, if samples are tokens; 0: they are other numbers.
    :param hidden: like `function`, but up to the last layer's input, `[B, F]`; None if no layer comes before it.
    """

    name: str
    source: str
    input_shape: tuple[int, int, int]
    classes: int
    layout: ParamLayout
    dropout: tuple[DropoutSpec, ...]
    function: Forward
    starts_at_zero: bool = False
    hidden: Forward | None = None
    start: Callable[[int], np.ndarray] | None = None
    vocabulary: int = 0

    def forward(self, tensors: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor] = ()) -> Tensor:
        """Returns logits `[B, classes]` for images `x [B, C, H, W]` with `tensors` (see `layout.unflatten`).

        An empty `dropout` means inference; otherwise it has one mask `[B, *shape]` for each of `self.dropout`.
        """
        if dropout and len(dropout) != len(self.dropout):
            raise ValueError(
                f"{self.name} takes {len(self.dropout)} dropout masks or none, but was given {len(dropout)}"
            )
        return self.function(tensors, x, dropout)

    def init(self, seed: int) -> np.ndarray:
        """Returns a starting vector float32 `[d]`, with PyTorch's distributions for the same layers.

        Convolutions and linear layers: weight and bias uniform in +-1/sqrt(fan-in) (He et al. 2015 with
        a = sqrt(5), PyTorch's default). Normalisation layers: weight 1, bias 0. The generator is NumPy's, so
        that a seed gives the same vector with every PyTorch version.
        """
        if self.start is not None:
            return self.start(seed)
        rng = np.random.default_rng(seed)
        if self.starts_at_zero:
            return np.zeros(self.layout.size, np.float32)
        vector = np.empty(self.layout.size, np.float32)
        fan_in: dict[str, int] = {}
        for name, tensor in self.layout.unflatten(vector).items():
            layer, _, kind = name.rpartition(".")
            if kind == "weight":
                fan_in[layer] = math.prod(tensor.shape[1:]) if tensor.ndim > 1 else 0
            if fan_in[layer]:
                bound = 1 / math.sqrt(fan_in[layer])
                tensor[...] = rng.uniform(-bound, bound, tensor.shape)
            else:
                tensor[...] = 1 if kind == "weight" else 0
        return vector


def layout_of(**layers: tuple[int, ...]) -> ParamLayout:
    """Returns the layout of layers that each have a weight of the given shape and one bias per output."""
    tensors = {}
    for layer, weight_shape in layers.items():
        tensors[f"{layer}.weight"] = weight_shape
        tensors[f"{layer}.bias"] = weight_shape[:1]
    return ParamLayout(tuple(tensors), tuple(tensors.values()))
