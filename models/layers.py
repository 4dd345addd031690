"""Describes networks as a sequence of layers, from which every runtime makes its own form.

PyTorch runs a `Layered` network directly; `hushfleet.models.native` writes a C program from the same layers.
Parameters are numbered: conv1, conv2, ..., fc1, fc2, ... PyTorch is imported only when it runs a network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hushfleet.models.model import layout_of
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import DropoutSpec

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conv:
    """A convolution with stride 1, bias and `padding` zeros around the image, then ReLU."""

    outputs: int
    kernel: int
    padding: int = 0


@dataclass(frozen=True)
class Pool:
    """Max-pooling of 2x2 windows; if the size is odd, the last row or column is left out."""


@dataclass(frozen=True)
class Dropout:
    """Multiplication by a mask that the caller draws: 0, or 1 / (1 - rate). It does nothing in inference."""

    rate: float


@dataclass(frozen=True)
class Linear:
    """A linear layer with bias on the flattened input, then ReLU except for logits."""

    outputs: int
    relu: bool = True


Layer = Conv | Pool | Dropout | Linear


@dataclass(frozen=True)
class Place:
    """A layer in its network: its parameters' name, if it has any, and one sample's shape before and after it."""

    layer: Layer
    name: str
    input_shape: Shape
    output_shape: Shape


@dataclass(frozen=True)
class Layered:
    """A network of `layers` on images of `input_shape` (channels, height, width).

    It is called like `Model.function`: `(tensors, x, dropout) -> logits`.
    """

    input_shape: tuple[int, int, int]
    layers: tuple[Layer, ...]

    @cached_property
    def places(self) -> tuple[Place, ...]:
        places: list[Place] = []
        shape: Shape = self.input_shape
        counts = {"conv": 0, "fc": 0}
        for layer in self.layers:
            kind, before = "", shape
            match layer:
                case Conv(outputs, kernel, padding):
                    kind, grown = "conv", 2 * padding + 1 - kernel
                    shape = (outputs, shape[1] + grown, shape[2] + grown)
                case Pool():
                    shape = (shape[0], shape[1] // 2, shape[2] // 2)
                case Linear(outputs):
                    kind, before, shape = "fc", (math.prod(shape),), (outputs,)
            if kind:
                counts[kind] += 1
            places.append(Place(layer, f"{kind}{counts[kind]}" if kind else "", before, shape))
        return tuple(places)

    @property
    def layout(self) -> ParamLayout:
        """A weight and a bias for each convolution and each linear layer, in order."""
        shapes: dict[str, Shape] = {}
        for place in self.places:
            match place.layer:
                case Conv(outputs, kernel):
                    shapes[place.name] = (outputs, place.input_shape[0], kernel, kernel)
                case Linear(outputs):
                    shapes[place.name] = (outputs, *place.input_shape)
        return layout_of(**shapes)

    @property
    def dropout(self) -> tuple[DropoutSpec, ...]:
        return tuple(
            DropoutSpec(place.output_shape, place.layer.rate)
            for place in self.places
            if isinstance(place.layer, Dropout)
        )

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        from torch.nn import functional as F

        masks = iter(dropout)
        for place in self.places:
            match place.layer:
                case Conv(padding=padding):
                    x = F.relu(F.conv2d(x, *_parameters(place, tensors), padding=padding))
                case Pool():
                    x = F.max_pool2d(x, 2)
                case Dropout() if dropout:
                    x = x * next(masks)
                case Linear(relu=relu):
                    x = F.linear(x.flatten(1), *_parameters(place, tensors))
                    x = F.relu(x) if relu else x
        return x


def _parameters(place: Place, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[f"{place.name}.weight"], tensors[f"{place.name}.bias"]
