"""Represents one operation of a graph: the known facts about its inputs, and the facts that a rule gives for outputs.

Only shapes are computed, and the few integers that form shapes (`Shape` of a tensor, a constant list of axes): nothing
here allocates in proportion to a tensor. A size may depend on the batch size; rules use only facts that are true for
every batch size, and a graph is refused if a needed fact does not hold for all of them.

This interpreter can be removed when the board trains in a separate process with a memory and time limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_sizes import Size, fixed

MAX_KNOWN = 64  # largest number of integers in a tensor with tracked values; a shape, axes or pads need no more
INT64, FLOAT32, FLOAT64, BOOL = 7, 1, 11, 9


class Tensor(NamedTuple):
    """The facts known about a value: its ONNX element type, its shape, and its integers if they were tracked."""

    kind: int
    shape: tuple[Size, ...]
    known: np.ndarray | None = None  # an array of objects, because they may be sizes

    @property
    def size(self) -> Size:
        return math.prod(self.shape)


class NodeCost(NamedTuple):
    """The outputs of an operator, and their cost.

    :param work: multiply-adds, or steps of another kind.
    :param scratch: elements that a kernel needs besides its inputs and outputs while it works.
    """

    outputs: tuple[Tensor, ...]
    work: Size
    scratch: Size = 0


@dataclass(frozen=True)
class Node:
    """One operation. An omitted input is named ''; the values of floating-point attributes are not kept."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]


@dataclass(frozen=True)
class Call:
    """A node and the known facts about its inputs; None is an omitted input."""

    node: Node
    inputs: Sequence[Tensor | None]

    def __getitem__(self, place: int) -> Tensor:
        tensor = self.get(place)
        if tensor is None:
            raise GraphRefused(f"it has fewer than {place + 1} inputs")
        return tensor

    def get(self, place: int) -> Tensor | None:
        """Returns the input at this place; None if it is omitted."""
        return self.inputs[place] if place < len(self.inputs) else None

    def first(self, count: int) -> list[Tensor]:
        """Returns the first `count` inputs. Raises `GraphRefused` if one is missing."""
        return [self[place] for place in range(count)]

    @property
    def results(self) -> int:
        return len(self.node.outputs)

    def number(self, name: str, default: int = 0) -> int:
        """Returns a whole number among the attributes. Methods here raise `GraphRefused` for other types."""
        return int(self._typed(name, int, default))

    def numbers(self, name: str) -> list[int] | None:
        """Returns a list of whole numbers among the attributes; None if there is none."""
        numbers: list[int] | None = self._typed(name, list, None)
        return numbers

    def text(self, name: str, default: str) -> str:
        """Returns a text among the attributes."""
        return str(self._typed(name, bytes, default.encode()), "latin-1")

    def tensor(self, name: str) -> Tensor | None:
        """Returns a constant among the attributes; None if there is none."""
        tensor: Tensor | None = self._typed(name, Tensor, None)
        return tensor

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self.node.attributes.get(name, default)
        require(value is default or isinstance(value, kind), f"its attribute {name!r} is of another type")
        return value


Rule = Callable[[Call], NodeCost]


def require(condition: bool, reason: str) -> None:
    """Raises `GraphRefused` with this reason unless the condition is true."""
    if not condition:
        raise GraphRefused(reason)


# helpers of several rules


def one_output(tensor: Tensor, *, work: Size = 0, scratch: Size = 0) -> NodeCost:
    """Returns the cost of an operator with one output; its work includes at least the writing of the output."""
    return NodeCost((tensor,), work + tensor.size, scratch)


def broadcast(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """Returns the shape that all of these broadcast to by ONNX's rules. Raises `GraphRefused` if there is none."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        others = set(sizes) - {1}
        require(len(others) <= 1, f"its inputs {list(shapes)} do not fit each other")
        result.append(others.pop() if others else 1)
    return tuple(result)


def axis_of(axis: int, rank: int) -> int:
    """Converts an axis that may be counted from the back to one counted from the front."""
    require(-rank <= axis < rank, f"its axis {axis} is not one of {rank}")
    return axis % rank


def axes_of(call: Call, rank: int, place: int = 1) -> list[int] | None:
    """Returns the axes from the attribute (older operator sets) or the input (newer ones); None without either."""
    axes = call.numbers("axes")
    if axes is None and call.get(place) is not None:
        axes = fixed_list(call.get(place), "axes")
    if axes is None:
        return None
    axes = [axis_of(axis, rank) for axis in axes]
    require(len(set(axes)) == len(axes), f"its axes {axes} repeat")
    return axes


def listed(tensor: Tensor | None, what: str) -> list[Size]:
    """Returns the integers of a tensor. Raises `GraphRefused` if they were not tracked."""
    if tensor is None or tensor.known is None:
        raise GraphRefused(f"its {what} cannot be told before it runs")
    return list(tensor.known.ravel())


def fixed_list(tensor: Tensor | None, what: str) -> list[int]:
    """Returns the integers of `listed`, which must not depend on the batch."""
    return [fixed(value) for value in listed(tensor, what)]


_TRUSTED = 1 << 31  # larger integers are not tracked, so that none overflows on the device


def followed(values: object) -> np.ndarray | None:
    """Returns these integers for `Tensor.known`; None if they are too many or too large."""
    values = np.asarray(values, object)
    trusted = values.size <= MAX_KNOWN and all(not isinstance(n, int) or abs(n) < _TRUSTED for n in values.ravel())
    return values if trusted else None
