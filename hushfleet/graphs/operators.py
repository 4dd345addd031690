"""What each allowed ONNX operator gives for inputs of known shapes: the shapes of its outputs, and its work.

Only shapes are computed, and the few integers that shapes are made of (`Shape` of a tensor, a constant list of axes):
nothing here allocates in proportion to a tensor. A size may depend on the batch's; rules keep to what is true for every
batch size, and what cannot be told for all of them is refused. Otherwise they follow the ONNX specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hushfleet.errors import GraphRefused
from hushfleet.graphs.sizes import Size, divide, fixed

MAX_KNOWN = 64  # integers of one tensor whose values are followed; a shape, axes or pads need no more
INT64, FLOAT32, BOOL = 7, 1, 9


class Tensor(NamedTuple):
    """What is known of a value: its ONNX element type, its shape, and its integers where they were followed."""

    kind: int
    shape: tuple[Size, ...]
    known: np.ndarray | None = None  # of objects, since they may be sizes

    @property
    def size(self) -> Size:
        return math.prod(self.shape)


class Given(NamedTuple):
    """What an operator computes.

    :param work: multiply-adds, or steps of another kind.
    :param scratch: elements that a kernel keeps beside its inputs and outputs while it works.
    """

    outputs: tuple[Tensor, ...]
    work: Size
    scratch: Size = 0


@dataclass(frozen=True)
class Node:
    """One operation. An input that is left out is named ''; attributes of floating-point numbers have no value."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]


@dataclass(frozen=True)
class Call:
    """A node and what is known of its inputs; None is an input that is left out."""

    node: Node
    inputs: Sequence[Tensor | None]

    def __getitem__(self, place: int) -> Tensor:
        tensor = self.get(place)
        if tensor is None:
            raise GraphRefused(f"it has fewer than {place + 1} inputs")
        return tensor

    def get(self, place: int) -> Tensor | None:
        return self.inputs[place] if place < len(self.inputs) else None

    def first(self, count: int) -> list[Tensor]:
        return [self[place] for place in range(count)]

    @property
    def results(self) -> int:
        return len(self.node.outputs)

    def number(self, name: str, default: int = 0) -> int:
        return int(self._typed(name, int, default))

    def numbers(self, name: str) -> list[int] | None:
        numbers: list[int] | None = self._typed(name, list, None)
        return numbers

    def text(self, name: str, default: str) -> str:
        return str(self._typed(name, bytes, default.encode()), "latin-1")

    def tensor(self, name: str) -> Tensor | None:
        tensor: Tensor | None = self._typed(name, Tensor, None)
        return tensor

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self.node.attributes.get(name, default)
        require(value is default or isinstance(value, kind), f"its attribute {name!r} is of another type")
        return value


Rule = Callable[[Call], Given]


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise GraphRefused(reason)


def apply(node: Node, inputs: Sequence[Tensor | None]) -> Given:
    """What `node` gives for these inputs; None is an input that is left out. Raises `GraphRefused`."""
    return _RULES[node.operator](Call(node, inputs))


# broadcasting


def broadcast(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        others = set(sizes) - {1}
        require(len(others) <= 1, f"its inputs {list(shapes)} do not fit each other")
        result.append(others.pop() if others else 1)
    return tuple(result)


def _elementwise(least: int, kind_of: int | None = None, first: int = 0) -> Rule:
    """:param kind_of: the element type of the output, else that of the input `first`."""

    def rule(call: Call) -> Given:
        call.first(least)
        given = [tensor for tensor in call.inputs if tensor is not None]
        kind = call[first].kind if kind_of is None else kind_of
        shape = broadcast([tensor.shape for tensor in given])
        return _one(Tensor(kind, shape, _computed(call.node, given, kind)))

    return rule


_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {"Add": np.add, "Mul": np.multiply}
_TRUSTED = 1 << 31  # integers beyond are not followed, so that none overflows on the device


def _computed(node: Node, given: list[Tensor], kind: int) -> np.ndarray | None:
    """The integers of a sum or a product of sizes."""
    known = [tensor.known for tensor in given]
    function = _ARITHMETIC.get(node.operator)
    if function is None or len(known) != 2 or any(values is None for values in known) or kind not in (6, INT64):
        return None
    return _followed(function(*known))


def _followed(values: object) -> np.ndarray | None:
    values = np.asarray(values, object)
    trusted = values.size <= MAX_KNOWN and all(not isinstance(n, int) or abs(n) < _TRUSTED for n in values.ravel())
    return values if trusted else None


def _one(tensor: Tensor, *, work: Size = 0, scratch: Size = 0) -> Given:
    return Given((tensor,), work + tensor.size, scratch)


def _same(least: int = 1, *, scratch: int = 0) -> Rule:
    """The first input's shape and type; `scratch` is in copies of it."""

    def rule(call: Call) -> Given:
        data = call.first(least)[0]
        return _one(Tensor(data.kind, data.shape), work=4 * data.size, scratch=scratch * data.size)

    return rule


# what only moves values


def _axis(axis: int, rank: int) -> int:
    require(-rank <= axis < rank, f"its axis {axis} is not one of {rank}")
    return axis % rank


def _list(tensor: Tensor | None, what: str) -> list[Size]:
    if tensor is None or tensor.known is None:
        raise GraphRefused(f"its {what} cannot be told before it runs")
    return list(tensor.known.ravel())


def _ints(tensor: Tensor | None, what: str) -> list[int]:
    """Those that must not depend on the batch."""
    return [fixed(value) for value in _list(tensor, what)]


def _sizes(tensor: Tensor | None) -> tuple[Size, ...]:
    sizes = _list(tensor, "shape")
    require(len(sizes) <= 8 and all(n >= 0 for n in sizes), f"the shape {sizes[:9]} is not allowed")
    return tuple(sizes)


def _axes(call: Call, rank: int, place: int = 1) -> list[int] | None:
    """From the attribute of older operator sets or the input of newer ones; None where neither is there."""
    axes = call.numbers("axes")
    if axes is None and call.get(place) is not None:
        axes = _ints(call.get(place), "axes")
    if axes is None:
        return None
    axes = [_axis(axis, rank) for axis in axes]
    require(len(set(axes)) == len(axes), f"its axes {axes} repeat")
    return axes


def _reshape(call: Call) -> Given:
    data, wanted = call[0], _list(call[1], "shape")
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


def _view(data: Tensor, shape: tuple[Size, ...]) -> Given:
    return _one(Tensor(data.kind, shape, None if data.known is None else _reshaped(data.known, shape)))


def _reshaped(values: np.ndarray, shape: tuple[Size, ...]) -> np.ndarray:
    return np.asarray(values, object).reshape([fixed(n) for n in shape])


def _squeeze(call: Call) -> Given:
    data = call[0]
    axes = _axes(call, len(data.shape))
    axes = [i for i, n in enumerate(data.shape) if fixed(n) == 1] if axes is None else axes
    require(all(data.shape[axis] == 1 for axis in axes), f"it squeezes {axes} of {data.shape}")
    return _view(data, tuple(n for i, n in enumerate(data.shape) if i not in axes))


def _unsqueeze(call: Call) -> Given:
    data = call[0]
    asked = call.numbers("axes")
    asked = _ints(call.get(1), "axes") if asked is None else asked
    rank = len(data.shape) + len(asked)
    axes = {_axis(axis, rank) for axis in asked}
    require(len(axes) == len(asked), f"its axes {asked} repeat")
    rest = iter(data.shape)
    return _view(data, tuple(1 if i in axes else next(rest) for i in range(rank)))


def _flatten(call: Call) -> Given:
    shape, axis = call[0].shape, call.number("axis", 1)
    require(-len(shape) <= axis <= len(shape), f"its axis {axis} is not one of {len(shape)}")
    axis += len(shape) if axis < 0 else 0
    return _view(call[0], (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _transpose(call: Call) -> Given:
    shape, order = call[0].shape, call.numbers("perm")
    order = list(range(len(shape)))[::-1] if order is None else order
    require(sorted(order) == list(range(len(shape))), f"its order {order} is none of {len(shape)} axes")
    return _one(Tensor(call[0].kind, tuple(shape[i] for i in order)))


def _concat(call: Call) -> Given:
    inputs, first = call.first(len(call.inputs)), call[0].shape
    axis = _axis(call.number("axis"), len(first))
    for tensor in inputs:
        fits = len(tensor.shape) == len(first) and tensor.shape[:axis] == first[:axis]
        require(fits and tensor.shape[axis + 1 :] == first[axis + 1 :], f"{tensor.shape} does not fit {first}")
    shape = (*first[:axis], sum(tensor.shape[axis] for tensor in inputs), *first[axis + 1 :])
    known = None
    parts = [tensor.known for tensor in inputs if tensor.known is not None]
    if len(parts) == len(inputs):
        known = _followed(np.concatenate(parts, axis))
    return _one(Tensor(call[0].kind, shape, known))


def _expand(call: Call) -> Given:
    return _one(Tensor(call[0].kind, broadcast([call[0].shape, _sizes(call[1])])))


_ALL = (1 << 31) - 1  # as an end: more than any axis has


def _slice(call: Call) -> Given:
    data, rank = call[0], len(call[0].shape)
    starts, stops = _ints(call[1], "starts"), _list(call[2], "ends")
    axes = _axes(call, rank, place=3)
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if call.get(4) is None else _ints(call[4], "steps")
    require(len(starts) == len(stops) == len(axes) == len(steps) <= rank and 0 not in steps, "its ranges do not fit")
    shape, known = list(data.shape), data.known
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        if start == 0 and step == 1 and (stop == shape[axis] or (isinstance(stop, int) and stop >= _ALL)):
            continue  # the whole axis, which may be the batch's
        places = _places(fixed(shape[axis]), start, fixed(stop), step)
        shape[axis] = len(places)
        known = None if known is None else known.take(places, axis)
    return _one(Tensor(data.kind, tuple(shape), known))


def _places(size: int, start: int, stop: int, step: int) -> range:
    """Not Python's rule: with a negative step, a start before the first place is the first place."""
    # ONNX Runtime and ONNX read an open end differently.
    require(step > 0 or stop < _ALL, "its step is negative and its end is open")
    start, stop = (edge + size if edge < 0 else edge for edge in (start, stop))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    return range(min(max(start, 0), max(high, 0)), min(max(stop, low), high), step) if size else range(0)


def _split(call: Call) -> Given:
    data = call[0]
    axis, count = _axis(call.number("axis"), len(data.shape)), call.results
    size = fixed(data.shape[axis])
    if call.get(1) is not None:
        sizes = _ints(call[1], "split")
    else:
        part = -(-size // count)
        sizes = [min(part, size - i * part) for i in range(count)]
        require(sizes[-1] > 0, f"it splits {size} into {count}")
    require(len(sizes) == count and sum(sizes) == size and min(sizes) >= 0, f"it splits {size} into {sizes[:9]}")
    shapes = [(*data.shape[:axis], part, *data.shape[axis + 1 :]) for part in sizes]
    return Given(tuple(Tensor(data.kind, shape) for shape in shapes), data.size)


def _gather(call: Call) -> Given:
    data, indices = call[0], call[1]
    axis = _axis(call.number("axis"), len(data.shape))
    known = None
    if data.known is not None and indices.known is not None and data.known.ndim == 1:
        places = [fixed(i) for i in indices.known.ravel()]
        if all(-len(data.known) <= i < len(data.known) for i in places):
            known = _reshaped(np.asarray(data.known[places], object), indices.shape)
    return _one(Tensor(data.kind, (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), known))


def _gather_elements(call: Call) -> Given:
    require(len(call[0].shape) == len(call[1].shape), "its inputs differ in rank")
    return _one(Tensor(call[0].kind, call[1].shape))


def _gather_nd(call: Call) -> Given:
    data, indices, batch = call[0].shape, call[1].shape, call.number("batch_dims")
    require(bool(indices) and 0 <= batch < min(len(data), len(indices)), "its ranks do not fit")
    depth = fixed(indices[-1])
    require(data[:batch] == indices[:batch] and 0 < depth <= len(data) - batch, "its indices do not fit")
    return _one(Tensor(call[0].kind, (*indices[:-1], *data[batch + depth :])))


def _scatter(call: Call) -> Given:
    data, indices, updates = call[0], call[1], call[2]
    # A kernel copies the indices, as 64-bit numbers; they count as two elements each.
    return _one(Tensor(data.kind, data.shape), work=indices.size + updates.size, scratch=2 * indices.size)


def _pad(call: Call) -> Given:
    data, pads = call[0], _ints(call[1], "pads")
    require(bool(data.shape), "it pads a single number")  # which ONNX Runtime fails to run
    axes = _axes(call, len(data.shape), place=3)
    axes = list(range(len(data.shape))) if axes is None else axes
    require(len(pads) == 2 * len(axes), f"{len(pads)} pads for {len(axes)} axes")
    shape = list(data.shape)
    for place, axis in enumerate(axes):
        added = pads[place] + pads[place + len(axes)]
        require(added >= 0 or fixed(shape[axis]) + added >= 0, "it cuts away more than there is")
        shape[axis] += added
    return _one(Tensor(data.kind, tuple(shape)))


# what makes values


def _shape_of(call: Call) -> Given:
    rank = len(call[0].shape)
    sizes = call[0].shape[slice(call.number("start"), call.number("end", rank))]
    return _one(Tensor(INT64, (len(sizes),), _followed(list(sizes))))


def _size_of(call: Call) -> Given:
    return _one(Tensor(INT64, (), _followed(call[0].size)))


def _constant(call: Call) -> Given:
    value, ints, number = call.tensor("value"), call.numbers("value_ints"), call.node.attributes.get("value_int")
    if value is not None:
        return _one(value)
    if ints is not None or number is not None:
        values = ints if number is None else number
        return _one(Tensor(INT64, () if ints is None else (len(ints),), _followed(values)))
    floats = call.numbers("value_floats")
    known = floats is not None or "value_float" in call.node.attributes
    require(known, "its value is of a kind that is not allowed")
    return _one(Tensor(FLOAT32, () if floats is None else (len(floats),)))


def _constant_of_shape(call: Call) -> Given:
    value = call.tensor("value")
    return _one(Tensor(FLOAT32 if value is None else value.kind, _sizes(call[0])))


def _range(call: Call) -> Given:
    require(all(tensor.size == 1 for tensor in call.first(len(call.inputs))), "its bounds are not single numbers")
    start, stop, step = (_list(call[place], "bounds")[0] for place in range(3))
    if start == 0 and step == 1:  # then the end may be the batch
        return _one(Tensor(call[0].kind, (stop if stop > 0 else 0,)))
    by = fixed(step)
    require(by != 0, "its step is 0")
    return _one(Tensor(call[0].kind, (len(range(fixed(start), fixed(stop), by)),)))


def _cast(call: Call) -> Given:
    kind = call[1].kind if call.node.operator == "CastLike" else call.number("to")
    known = call[0].known if kind in (6, INT64) else None
    return _one(Tensor(kind, call[0].shape, known))


def _identity(call: Call) -> Given:
    return _one(call[0])


# what computes


def _reduce(call: Call) -> Given:
    data, rank = call[0], len(call[0].shape)
    axes = [_axis(call.number("axis"), rank)] if call.node.operator == "ArgMax" else _axes(call, rank)
    if not axes:
        axes = [] if call.number("noop_with_empty_axes") else list(range(rank))
    kept = call.number("keepdims", 1)
    shape = tuple(1 if i in axes else n for i, n in enumerate(data.shape) if kept or i not in axes)
    # A kernel may list where each number that it adds up lies.
    kind = INT64 if call.node.operator == "ArgMax" else data.kind
    return _one(Tensor(kind, shape), work=data.size, scratch=2 * data.size)


def _matmul(call: Call) -> Given:
    a, b = call[0].shape, call[1].shape
    require(bool(a) and bool(b), "it multiplies a single number")
    left = (1, *a) if len(a) == 1 else a
    right = (*b, 1) if len(b) == 1 else b
    require(left[-1] == right[-2], f"{a} does not fit {b}")
    outer = broadcast([left[:-2], right[:-2]]) if len(left) > 2 or len(right) > 2 else ()
    work = math.prod(outer) * left[-2] * right[-1] * left[-1]
    shape = (*outer, *left[-2:-1][len(a) == 1 :], *right[-1:][len(b) == 1 :])
    return _one(Tensor(call[0].kind, shape), work=work)


def _gemm(call: Call) -> Given:
    a, b = call[0].shape, call[1].shape
    require(len(a) == len(b) == 2, f"it multiplies {a} and {b}")
    a, b = a[::-1] if call.number("transA") else a, b[::-1] if call.number("transB") else b
    require(a[1] == b[0], f"{a} does not fit {b}")
    shape = (a[0], b[1])
    if call.get(2) is not None:
        require(broadcast([shape, call[2].shape]) == shape, f"{call[2].shape} does not fit {shape}")
    return _one(Tensor(call[0].kind, shape), work=a[0] * a[1] * b[1])


def _windows(call: Call, spatial: list[int], kernel: list[int], pads: list[int]) -> list[int]:
    """How many windows fit along each spatial axis."""
    strides, dilations = _per_axis(call, "strides", len(kernel)), _per_axis(call, "dilations", len(kernel))
    mode = call.text("auto_pad", "NOTSET")
    counts = []
    for i, (size, width) in enumerate(zip(spatial, kernel, strict=True)):
        reach = (width - 1) * dilations[i] + 1
        require(width > 0 and reach > 0, "its kernel is empty")
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            counts.append(-(-size // strides[i]))
            continue
        require(mode in ("NOTSET", "VALID"), f"its auto_pad {mode!r} is not known")
        room = size - reach + (pads[i] + pads[i + len(kernel)] if mode == "NOTSET" else 0)
        require(room >= 0, "its kernel is larger than what it is moved over")
        count = (-(-room // strides[i]) if call.number("ceil_mode") else room // strides[i]) + 1
        if call.number("ceil_mode") and (count - 1) * strides[i] >= size + (pads[i] if mode == "NOTSET" else 0):
            count -= 1  # a window that would begin in the padding behind
        counts.append(count)
    return counts


def _per_axis(call: Call, name: str, rank: int, *, default: int = 1, least: int = 1) -> list[int]:
    values = call.numbers(name)
    values = [default] * rank if values is None else values
    require(len(values) == rank and min(values, default=least) >= least, f"its {name} {values[:9]} are not allowed")
    return values


def _image(call: Call) -> tuple[Size, Size, list[int]]:
    shape = call[0].shape
    require(len(shape) >= 3, f"{shape} is no batch of images")
    return shape[0], shape[1], [fixed(n) for n in shape[2:]]


def _kernel(call: Call, rank: int) -> tuple[tuple[Size, ...], int, list[int]]:
    """A convolution's weights' shape, its groups, and its kernel's shape."""
    weights, groups = call[1].shape, call.number("group", 1)
    require(len(weights) == rank + 2 and groups > 0, f"weights {weights} do not fit {call[0].shape}")
    require(groups == 1 or fixed(weights[0]) % groups == 0, f"{weights} in {groups} groups")
    kernel = [fixed(n) for n in weights[2:]]
    require(call.numbers("kernel_shape") in (None, kernel), "its kernel_shape is not that of its weights")
    return weights, groups, kernel


def _conv(call: Call) -> Given:
    batch, channels, spatial = _image(call)
    weights, groups, kernel = _kernel(call, len(spatial))
    require(channels == weights[1] * groups, f"{channels} channels for {weights}")
    pads = _per_axis(call, "pads", 2 * len(kernel), default=0, least=0)
    counts = _windows(call, spatial, kernel, pads)
    shape = (batch, weights[0], *counts)
    taps = weights[1] * math.prod(kernel)
    # A kernel may lay out one image's windows before it multiplies.
    return _one(Tensor(call[0].kind, shape), work=math.prod(shape) * taps, scratch=taps * math.prod(counts))


def _conv_transpose(call: Call) -> Given:
    batch, channels, spatial = _image(call)
    rank = len(spatial)
    weights, groups, kernel = _kernel(call, rank)
    require(channels == weights[0], f"{channels} channels for {weights}")
    require(call.text("auto_pad", "NOTSET") == "NOTSET" and call.numbers("output_shape") is None, "it pads by itself")
    strides, dilations = _per_axis(call, "strides", rank), _per_axis(call, "dilations", rank)
    pads = _per_axis(call, "pads", 2 * rank, default=0, least=0)
    extra = _per_axis(call, "output_padding", rank, default=0, least=0)
    sizes = [
        strides[i] * (spatial[i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - pads[i] - pads[i + rank]
        for i in range(rank)
    ]
    require(min(sizes) >= 0, f"its sizes {sizes} are not allowed")
    taps = weights[1] * math.prod(kernel)
    work = batch * channels * math.prod(spatial) * taps
    shape = (batch, weights[1] * groups, *sizes)
    return _one(Tensor(call[0].kind, shape), work=work, scratch=taps * math.prod(spatial))


def _pool(call: Call) -> Given:
    batch, channels, spatial = _image(call)
    kernel = _per_axis(call, "kernel_shape", len(spatial))
    pads = _per_axis(call, "pads", 2 * len(kernel), default=0, least=0)
    shape = (batch, channels, *_windows(call, spatial, kernel, pads))
    pooled = Tensor(call[0].kind, shape)
    places = (Tensor(INT64, shape),) * (call.results - 1)
    return Given((pooled, *places), math.prod(shape) * (math.prod(kernel) + len(places)))


def _global_pool(call: Call) -> Given:
    batch, channels, spatial = _image(call)
    return _one(Tensor(call[0].kind, (batch, channels, *(1 for _ in spatial))), work=call[0].size)


def _layer_norm(call: Call) -> Given:
    data, _ = call.first(2)
    axis = _axis(call.number("axis", -1), len(data.shape))
    moments = Tensor(FLOAT32, (*data.shape[:axis], *(1 for _ in data.shape[axis:])))
    outputs = (Tensor(data.kind, data.shape), moments, moments)
    return Given(outputs[: call.results], 8 * data.size, 2 * data.size)


def _batch_norm(call: Call) -> Given:
    data, scale, *_ = call.first(5)
    moments = Tensor(scale.kind, scale.shape)
    outputs = (Tensor(data.kind, data.shape), moments, moments, moments, moments)
    return Given(outputs[: call.results], 8 * data.size)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: Mapping[str, Rule] = (
    _each("Add Sub Mul Div Pow PRelu And Or Xor", _elementwise(2))
    | _each("Max Min Mean Sum", _elementwise(1))
    | _each("Equal Greater GreaterOrEqual Less LessOrEqual", _elementwise(2, BOOL))
    | _each("Where", _elementwise(3, first=1))
    | _each("Abs Elu Erf Exp HardSigmoid LeakyRelu Log Neg Not Reciprocal Relu Selu Sigmoid Sign", _same())
    | _each("Softplus Sqrt Tanh Trilu Clip", _same())
    # Some of these are expanded to several nodes, or work on a copy.
    | _each("Gelu HardSwish LogSoftmax Softmax", _same(scratch=4))
    | _each("GroupNormalization InstanceNormalization", _same(3, scratch=4))
    | _each("BatchNormalization", _batch_norm)
    | _each("LayerNormalization", _layer_norm)
    | _each("ArgMax ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin", _reduce)
    | _each("ReduceProd ReduceSum ReduceSumSquare", _reduce)
    | _each("MaxPool AveragePool", _pool)
    | _each("GlobalAveragePool GlobalMaxPool", _global_pool)
    | {
        "Cast": _cast, "CastLike": _cast, "Concat": _concat, "Constant": _constant,
        "ConstantOfShape": _constant_of_shape, "Conv": _conv, "ConvTranspose": _conv_transpose, "Expand": _expand,
        "Flatten": _flatten, "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd,
        "Gemm": _gemm, "Identity": _identity, "MatMul": _matmul, "Pad": _pad, "Range": _range, "Reshape": _reshape,
        "ScatterElements": _scatter, "ScatterND": _scatter, "Shape": _shape_of, "Size": _size_of, "Slice": _slice,
        "Split": _split, "Squeeze": _squeeze, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    }
)  # fmt: skip
OPERATORS = frozenset(_RULES)
