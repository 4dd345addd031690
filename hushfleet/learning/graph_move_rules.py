"""Defines rules for the ONNX operators that move or make values, among them the integers that form shapes.

The rules follow the ONNX specification, except for the batch sizes, see `hushfleet.learning.graph_node`.

This interpreter can be removed when the board trains in a separate process with a memory and time limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_node import (
    FLOAT32,
    INT64,
    Call,
    NodeCost,
    Rule,
    Tensor,
    axes_of,
    axis_of,
    broadcast,
    fixed_list,
    followed,
    listed,
    one_output,
    require,
)
from hushfleet.learning.graph_sizes import Size, divide, fixed

# operators that only move values


def _sizes(tensor: Tensor | None) -> tuple[Size, ...]:
    sizes = listed(tensor, "shape")
    require(len(sizes) <= 8 and all(n >= 0 for n in sizes), f"the shape {sizes[:9]} is not allowed")
    return tuple(sizes)


def _reshape(call: Call) -> NodeCost:
    data, wanted = call[0], listed(call[1], "shape")
    require(len(wanted) <= 8 and all(n >= -1 for n in wanted), f"the shape {wanted[:9]} is not allowed")
    if not call.number("allowzero"):
        require(all(n or i < len(data.shape) for i, n in enumerate(wanted)), "its shape copies a size that is missing")
        wanted = [n or data.shape[i] for i, n in enumerate(wanted)]
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        require(wanted.count(-1) == 1 and rest > 0, f"{data.shape} does not fill {wanted}")
        missing = divide(data.size, rest)
        if missing is None:
            raise GraphRefused(f"{data.shape} does not fill {wanted}")
        wanted = [missing if n == -1 else n for n in wanted]
    require(math.prod(wanted) == data.size, f"{data.shape} does not fill {wanted}")
    return _view(data, tuple(wanted))


def _view(data: Tensor, shape: tuple[Size, ...]) -> NodeCost:
    known = None if data.known is None or not data.size else _reshaped(data.known, shape)
    return one_output(Tensor(data.kind, shape, known))


def _reshaped(values: np.ndarray, shape: tuple[Size, ...]) -> np.ndarray:
    return np.asarray(values, object).reshape([fixed(n) for n in shape])


def _squeeze(call: Call) -> NodeCost:
    data = call[0]
    axes = axes_of(call, len(data.shape))
    axes = [i for i, n in enumerate(data.shape) if fixed(n) == 1] if axes is None else axes
    require(all(data.shape[axis] == 1 for axis in axes), f"it squeezes {axes} of {data.shape}")
    return _view(data, tuple(n for i, n in enumerate(data.shape) if i not in axes))


def _unsqueeze(call: Call) -> NodeCost:
    data = call[0]
    asked = call.numbers("axes")
    asked = fixed_list(call.get(1), "axes") if asked is None else asked
    rank = len(data.shape) + len(asked)
    axes = {axis_of(axis, rank) for axis in asked}
    require(len(axes) == len(asked), f"its axes {asked} repeat")
    rest = iter(data.shape)
    return _view(data, tuple(1 if i in axes else next(rest) for i in range(rank)))


def _flatten(call: Call) -> NodeCost:
    shape, axis = call[0].shape, call.number("axis", 1)
    require(-len(shape) <= axis <= len(shape), f"its axis {axis} is not one of {len(shape)}")
    axis += len(shape) if axis < 0 else 0
    return _view(call[0], (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _transpose(call: Call) -> NodeCost:
    shape, order = call[0].shape, call.numbers("perm")
    order = list(range(len(shape)))[::-1] if order is None else order
    require(sorted(order) == list(range(len(shape))), f"its order {order} is none of {len(shape)} axes")
    return one_output(Tensor(call[0].kind, tuple(shape[i] for i in order)))


def _concat(call: Call) -> NodeCost:
    inputs, first = call.first(len(call.inputs)), call[0].shape
    axis = axis_of(call.number("axis"), len(first))
    for tensor in inputs:
        fits = len(tensor.shape) == len(first) and tensor.shape[:axis] == first[:axis]
        require(fits and tensor.shape[axis + 1 :] == first[axis + 1 :], f"{tensor.shape} does not fit {first}")
    shape = (*first[:axis], sum(tensor.shape[axis] for tensor in inputs), *first[axis + 1 :])
    known = None
    parts = [tensor.known for tensor in inputs if tensor.known is not None]
    if len(parts) == len(inputs):
        known = followed(np.concatenate(parts, axis))
    return one_output(Tensor(call[0].kind, shape, known))


def _expand(call: Call) -> NodeCost:
    return one_output(Tensor(call[0].kind, broadcast([call[0].shape, _sizes(call[1])])))


_ALL = (1 << 31) - 1  # an end that is larger than any axis


def _slice(call: Call) -> NodeCost:
    data, rank = call[0], len(call[0].shape)
    starts, stops = fixed_list(call[1], "starts"), listed(call[2], "ends")
    axes = axes_of(call, rank, place=3)
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if call.get(4) is None else fixed_list(call[4], "steps")
    require(len(starts) == len(stops) == len(axes) == len(steps) <= rank and 0 not in steps, "its ranges do not fit")
    shape, known = list(data.shape), data.known
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        if start == 0 and step == 1 and (stop == shape[axis] or (isinstance(stop, int) and stop >= _ALL)):
            continue  # the whole axis, which may be the batch's
        places = _places(fixed(shape[axis]), start, fixed(stop), step)
        shape[axis] = len(places)
        known = None if known is None else known.take(places, axis)
    return one_output(Tensor(data.kind, tuple(shape), known))


def _places(size: int, start: int, stop: int, step: int) -> range:
    """Returns the places of a slice. Unlike in Python, with a negative step a start before the first place means the
    first place."""
    # ONNX Runtime and ONNX read an open end differently.
    require(step > 0 or stop < _ALL, "its step is negative and its end is open")
    start, stop = (edge + size if edge < 0 else edge for edge in (start, stop))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    return range(min(max(start, 0), max(high, 0)), min(max(stop, low), high), step) if size else range(0)


def _split(call: Call) -> NodeCost:
    data = call[0]
    axis, count = axis_of(call.number("axis"), len(data.shape)), call.results
    size = fixed(data.shape[axis])
    if call.get(1) is not None:
        sizes = fixed_list(call[1], "split")
    else:
        part = -(-size // count)
        sizes = [min(part, size - i * part) for i in range(count)]
        require(sizes[-1] > 0, f"it splits {size} into {count}")
    require(len(sizes) == count and sum(sizes) == size and min(sizes) >= 0, f"it splits {size} into {sizes[:9]}")
    shapes = [(*data.shape[:axis], part, *data.shape[axis + 1 :]) for part in sizes]
    return NodeCost(tuple(Tensor(data.kind, shape) for shape in shapes), data.size)


def _gather(call: Call) -> NodeCost:
    data, indices = call[0], call[1]
    axis = axis_of(call.number("axis"), len(data.shape))
    known = None
    if data.known is not None and indices.known is not None and data.known.ndim == 1:
        places = [fixed(i) for i in indices.known.ravel()]
        if all(-len(data.known) <= i < len(data.known) for i in places):
            known = _reshaped(np.asarray(data.known[places], object), indices.shape)
    return one_output(Tensor(data.kind, (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), known))


def _gather_elements(call: Call) -> NodeCost:
    require(len(call[0].shape) == len(call[1].shape), "its inputs differ in rank")
    return one_output(Tensor(call[0].kind, call[1].shape))


def _gather_nd(call: Call) -> NodeCost:
    data, indices, batch = call[0].shape, call[1].shape, call.number("batch_dims")
    require(bool(indices) and 0 <= batch < min(len(data), len(indices)), "its ranks do not fit")
    depth = fixed(indices[-1])
    require(data[:batch] == indices[:batch] and 0 < depth <= len(data) - batch, "its indices do not fit")
    return one_output(Tensor(call[0].kind, (*indices[:-1], *data[batch + depth :])))


def _scatter(call: Call) -> NodeCost:
    data, indices, updates = call[0], call[1], call[2]
    # A kernel copies the indices as 64-bit numbers, so each counts as two elements.
    return one_output(Tensor(data.kind, data.shape), work=indices.size + updates.size, scratch=2 * indices.size)


def _pad(call: Call) -> NodeCost:
    data, pads = call[0], fixed_list(call[1], "pads")
    require(bool(data.shape), "it pads a single number")  # ONNX Runtime cannot run this
    axes = axes_of(call, len(data.shape), place=3)
    axes = list(range(len(data.shape))) if axes is None else axes
    require(len(pads) == 2 * len(axes), f"{len(pads)} pads for {len(axes)} axes")
    shape = list(data.shape)
    for place, axis in enumerate(axes):
        added = pads[place] + pads[place + len(axes)]
        require(added >= 0 or fixed(shape[axis]) + added >= 0, "it cuts away more than there is")
        shape[axis] += added
    return one_output(Tensor(data.kind, tuple(shape)))


# operators that make values


def _shape_of(call: Call) -> NodeCost:
    rank = len(call[0].shape)
    sizes = call[0].shape[slice(call.number("start"), call.number("end", rank))]
    return one_output(Tensor(INT64, (len(sizes),), followed(list(sizes))))


def _size_of(call: Call) -> NodeCost:
    return one_output(Tensor(INT64, (), followed(call[0].size)))


def _constant(call: Call) -> NodeCost:
    value, ints, number = call.tensor("value"), call.numbers("value_ints"), call.node.attributes.get("value_int")
    if value is not None:
        return one_output(value)
    if ints is not None or number is not None:
        values = ints if number is None else number
        return one_output(Tensor(INT64, () if ints is None else (len(ints),), followed(values)))
    floats = call.numbers("value_floats")
    known = floats is not None or "value_float" in call.node.attributes
    require(known, "its value is of a kind that is not allowed")
    return one_output(Tensor(FLOAT32, () if floats is None else (len(floats),)))


def _constant_of_shape(call: Call) -> NodeCost:
    value = call.tensor("value")
    return one_output(Tensor(FLOAT32 if value is None else value.kind, _sizes(call[0])))


def _range(call: Call) -> NodeCost:
    require(all(tensor.size == 1 for tensor in call.first(len(call.inputs))), "its bounds are not single numbers")
    start, stop, step = (listed(call[place], "bounds")[0] for place in range(3))
    if start == 0 and step == 1:  # then the end may be the batch
        return one_output(Tensor(call[0].kind, (stop if stop > 0 else 0,)))
    by = fixed(step)
    require(by != 0, "its step is 0")
    return one_output(Tensor(call[0].kind, (max(0, -((fixed(start) - fixed(stop)) // by)),)))  # len() has a limit


def _cast(call: Call) -> NodeCost:
    kind = call[1].kind if call.node.operator == "CastLike" else call.number("to")
    known = call[0].known if kind in (6, INT64) else None
    if known is not None and kind != INT64:
        known = followed(known)  # the cast keeps only 32 bits of a larger number
    return one_output(Tensor(kind, call[0].shape, known))


def _identity(call: Call) -> NodeCost:
    return one_output(call[0])


MOVING: Mapping[str, Rule] = {
    "Cast": _cast, "CastLike": _cast, "Concat": _concat, "Constant": _constant,
    "ConstantOfShape": _constant_of_shape, "Expand": _expand, "Flatten": _flatten, "Gather": _gather,
    "GatherElements": _gather_elements, "GatherND": _gather_nd, "Identity": _identity, "Pad": _pad, "Range": _range,
    "Reshape": _reshape, "ScatterElements": _scatter, "ScatterND": _scatter, "Shape": _shape_of, "Size": _size_of,
    "Slice": _slice, "Split": _split, "Squeeze": _squeeze, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
}  # fmt: skip
