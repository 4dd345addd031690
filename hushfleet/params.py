"""Represents a model as a flat vector: one float32 vector of `d` entries plus a `ParamLayout`.

Masks, optimizer steps, clipping, noise, quantisation and aggregation are arithmetic on arrays whose last
axis is `d`. So the same code works on a device's `[d]` and the simulator's `[clients, d]`, in NumPy and
in PyTorch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from hushfleet.array_api import np
from hushfleet.errors import Malformed

MAX_PARAMS = 1 << 28
MAX_TENSORS = 4096
_Shape = Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_PARAMS)], ...], Meta(max_length=8)]
WEIGHT, PRIOR = "head.weight", "prior"
"""The names of the tensors of a linear model."""
MOMENTS = "moments"
"""The name of the only tensor of a model of second moments."""
_Tensors = Annotated[tuple[tuple[str, _Shape], ...], Meta(max_length=MAX_TENSORS)]


class LayerSpan(NamedTuple):
    """The entries `start:stop` of the flat vector that one layer's tensors occupy."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class ParamLayout:
    """The place of each named tensor in the flat vector.

    A layer is a module: the weight and the bias of `conv1` form one layer, because the papers clip,
    weight and personalise them together. The tensors of one layer are adjacent.

    :param names: tensor names, `layer.weight` style, in the order of the flat vector.
    :param shapes: the shape of each tensor.
    """

    def __init__(self, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
        self.names = names
        self.shapes = shapes
        if len(names) != len(shapes) or not names:
            raise ValueError("a layout needs one shape for each of its names, and at least one")
        if len(set(names)) != len(names):
            raise ValueError(f"tensor names repeat in the layout: {names}")
        layer_names = [span.name for span in self.layers]
        if len(set(layer_names)) != len(layer_names):
            raise ValueError(f"tensors of one layer must be adjacent, got {names}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamLayout) and (self.names, self.shapes) == (other.names, other.shapes)

    def __hash__(self) -> int:
        return hash((self.names, self.shapes))

    def __repr__(self) -> str:
        return f"ParamLayout(names={self.names}, shapes={self.shapes})"

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """`d`, the length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Each tensor's place in the flat vector."""
        slices, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            slices[name] = slice(start, start + size)
            start += size
        return slices

    @cached_property
    def layers(self) -> tuple[LayerSpan, ...]:
        """The layers in order; together they cover `0:d`."""
        spans: list[LayerSpan] = []
        for name, place in self.slices.items():
            layer = name.rpartition(".")[0] or name
            if spans and spans[-1].name == layer:
                spans[-1] = spans[-1]._replace(stop=place.stop)
            else:
                spans.append(LayerSpan(layer, place.start, place.stop))
        return tuple(spans)

    def unflatten(self, vector: Any) -> dict[str, Any]:
        """Returns named views `[..., *shape]` into `vector [..., d]` (NumPy or PyTorch; nothing is copied).

        >>> layout = ParamLayout(("w", "b"), ((2, 3), (2,)))
        >>> {name: view.shape for name, view in layout.unflatten(np.zeros(layout.size)).items()}
        {'w': (2, 3), 'b': (2,)}
        """
        lead = tuple(vector.shape[:-1])
        return {
            name: vector[..., place].reshape(lead + shape)
            for (name, place), shape in zip(self.slices.items(), self.shapes, strict=True)
        }

    def layers_alike(self, vectors: Sequence[np.ndarray]) -> int:
        """Counts the layers, from the first one on, that are equal in all vectors `[d]`."""
        first, *others = vectors
        for number, layer in enumerate(self.layers):
            part = slice(layer.start, layer.stop)
            if not all(np.array_equal(first[part], other[part]) for other in others):
                return number
        return len(self.layers)

    def to_wire(self) -> list[list[Any]]:
        """Returns the name and the shape of each tensor, in order.

        >>> ParamLayout(("w", "b"), ((2, 3), (2,))).to_wire()
        [['w', [2, 3]], ['b', [2]]]
        """
        return [[name, list(shape)] for name, shape in zip(self.names, self.shapes, strict=True)]

    @classmethod
    def from_wire(cls, data: object) -> ParamLayout:
        """Reads a layout from network data, the inverse of `to_wire`. Raises `Malformed`."""
        try:
            tensors = msgspec.convert(data, _Tensors)
            layout = cls(tuple(name for name, _ in tensors), tuple(shape for _, shape in tensors))
        except ValueError as error:
            raise Malformed(f"the parameter layout does not parse: {error}") from error
        if layout.size > MAX_PARAMS:
            raise Malformed(f"the layout has {layout.size} parameters, above the cap of {MAX_PARAMS}")
        return layout

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names and shapes: two sides with the same digest interpret vectors in the same way."""
        return hashlib.sha256(msgspec.msgpack.encode(self.to_wire())).hexdigest()


def is_linear(layout: ParamLayout) -> bool:
    """Returns whether the model is one linear layer on features (`models/linear.py`); a device then makes its head."""
    (weight, *others), names = layout.shapes, layout.names
    return names == (WEIGHT, PRIOR) and len(weight) == 2 and others == [weight[:1]]


def is_moments(layout: ParamLayout) -> bool:
    """Returns whether the model is one of second moments (`models/second_moments.py`)."""
    return layout.names == (MOMENTS,) and len(layout.shapes[0]) == 3
