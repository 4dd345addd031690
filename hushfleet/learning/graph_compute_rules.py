"""Defines rules for the ONNX operators that compute: their outputs, and their work.

The rules follow the ONNX specification, except for the batch sizes, see `hushfleet.learning.graph_node`.

This interpreter can be removed when the board trains in a separate process with a memory and time limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from hushfleet.learning.graph_node import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    Call,
    Node,
    NodeCost,
    Rule,
    Tensor,
    axes_of,
    axis_of,
    broadcast,
    fixed_list,
    followed,
    one_output,
    require,
)
from hushfleet.learning.graph_sizes import Size, fixed


def _elementwise(least: int, kind_of: int | None = None, first: int = 0) -> Rule:
    """:param kind_of: the element type of the output; None: the element type of the input `first`."""

    def rule(call: Call) -> NodeCost:
        call.first(least)
        given = [tensor for tensor in call.inputs if tensor is not None]
        kind = call[first].kind if kind_of is None else kind_of
        shape = broadcast([tensor.shape for tensor in given])
        return one_output(Tensor(kind, shape, _computed(call.node, given, kind)))

    return rule


_FLOATING = {FLOAT32, FLOAT64}
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {"Add": np.add, "Mul": np.multiply}


def _computed(node: Node, given: list[Tensor], kind: int) -> np.ndarray | None:
    """Returns the integers of a sum or a product of sizes; None if they are not known."""
    known = [tensor.known for tensor in given]
    function = _ARITHMETIC.get(node.operator)
    if function is None or len(known) != 2 or any(values is None for values in known) or kind not in (6, INT64):
        return None
    return followed(function(*known))


def _division(call: Call) -> NodeCost:
    """Allows whole numbers to be divided only by known numbers above zero.

    A division by 0, or of the smallest number by -1, may end the process. An end that depends on a label would reveal
    the label.
    """
    a, b = call.first(2)
    if {a.kind, b.kind} - _FLOATING:
        known = b.known is not None and all(n > 0 for n in b.known.ravel())
        require(known, "it divides whole numbers by something else than known numbers above zero")
    return _elementwise(2)(call)


def _same(least: int = 1, *, scratch: int = 0) -> Rule:
    """Returns a rule whose output has the first input's shape and type; `scratch` counts copies of that input."""

    def rule(call: Call) -> NodeCost:
        data = call.first(least)[0]
        return one_output(Tensor(data.kind, data.shape), work=4 * data.size, scratch=scratch * data.size)

    return rule


def _reduce(call: Call) -> NodeCost:
    data, rank = call[0], len(call[0].shape)
    axes = [axis_of(call.number("axis"), rank)] if call.node.operator == "ArgMax" else axes_of(call, rank)
    if not axes:
        axes = [] if call.number("noop_with_empty_axes") else list(range(rank))
    kept = call.number("keepdims", 1)
    shape = tuple(1 if i in axes else n for i, n in enumerate(data.shape) if kept or i not in axes)
    # A kernel may make a list of the places of the numbers that it adds up.
    kind = INT64 if call.node.operator == "ArgMax" else data.kind
    return one_output(Tensor(kind, shape), work=data.size, scratch=2 * data.size)


def _matmul(call: Call) -> NodeCost:
    a, b = call[0].shape, call[1].shape
    require(bool(a) and bool(b), "it multiplies a single number")
    left = (1, *a) if len(a) == 1 else a
    right = (*b, 1) if len(b) == 1 else b
    require(left[-1] == right[-2], f"{a} does not fit {b}")
    outer = broadcast([left[:-2], right[:-2]]) if len(left) > 2 or len(right) > 2 else ()
    work = math.prod(outer) * left[-2] * right[-1] * left[-1]
    shape = (*outer, *left[-2:-1][len(a) == 1 :], *right[-1:][len(b) == 1 :])
    return one_output(Tensor(call[0].kind, shape), work=work)


def _gemm(call: Call) -> NodeCost:
    a, b = call[0].shape, call[1].shape
    require(len(a) == len(b) == 2, f"it multiplies {a} and {b}")
    a, b = a[::-1] if call.number("transA") else a, b[::-1] if call.number("transB") else b
    require(a[1] == b[0], f"{a} does not fit {b}")
    shape = (a[0], b[1])
    if call.get(2) is not None:
        require(broadcast([shape, call[2].shape]) == shape, f"{call[2].shape} does not fit {shape}")
    return one_output(Tensor(call[0].kind, shape), work=a[0] * a[1] * b[1])


def _windows(call: Call, spatial: list[int], kernel: list[int], pads: list[int]) -> list[int]:
    """Returns how many windows fit along each spatial axis."""
    strides, dilations = _per_axis(call, "strides", len(kernel)), _per_axis(call, "dilations", len(kernel))
    mode = call.text("auto_pad", "NOTSET")
    counts = []
    for i, (size, width) in enumerate(zip(spatial, kernel, strict=True)):
        reach = (width - 1) * dilations[i] + 1
        require(width > 0 and reach > 0, "its kernel is empty")
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            require(dilations[i] == 1, f"its auto_pad {mode!r} is not defined for windows with gaps")  # runtimes differ
            counts.append(-(-size // strides[i]))
            continue
        require(mode in ("NOTSET", "VALID"), f"its auto_pad {mode!r} is not known")
        room = size - reach + (pads[i] + pads[i + len(kernel)] if mode == "NOTSET" else 0)
        require(room >= 0, "its kernel is larger than what it is moved over")
        count = (-(-room // strides[i]) if call.number("ceil_mode") else room // strides[i]) + 1
        if call.number("ceil_mode") and (count - 1) * strides[i] >= size + (pads[i] if mode == "NOTSET" else 0):
            count -= 1  # a window that would start in the padding at the end
        counts.append(count)
    return counts


def _per_axis(call: Call, name: str, rank: int, *, default: int = 1, least: int = 1) -> list[int]:
    values = call.numbers(name)
    values = [default] * rank if values is None else values
    require(len(values) == rank and min(values, default=least) >= least, f"its {name} {values[:9]} are not allowed")
    return values


def _image(call: Call) -> tuple[Size, Size, list[int]]:
    shape = call[0].shape
    require(len(shape) >= 3, f"{shape} is not a batch of images")
    return shape[0], shape[1], [fixed(n) for n in shape[2:]]


def _kernel(call: Call, rank: int) -> tuple[tuple[Size, ...], int, list[int]]:
    """Returns the shape of a convolution's weights, its groups, and its kernel's shape."""
    weights, groups = call[1].shape, call.number("group", 1)
    require(len(weights) == rank + 2 and groups > 0, f"weights {weights} do not fit {call[0].shape}")
    require(groups == 1 or fixed(weights[0]) % groups == 0, f"{weights} in {groups} groups")
    kernel = [fixed(n) for n in weights[2:]]
    require(call.numbers("kernel_shape") in (None, kernel), "its kernel_shape is not that of its weights")
    return weights, groups, kernel


def _conv(call: Call) -> NodeCost:
    batch, channels, spatial = _image(call)
    weights, groups, kernel = _kernel(call, len(spatial))
    require(channels == weights[1] * groups, f"{channels} channels for {weights}")
    pads = _per_axis(call, "pads", 2 * len(kernel), default=0, least=0)
    counts = _windows(call, spatial, kernel, pads)
    shape = (batch, weights[0], *counts)
    taps = weights[1] * math.prod(kernel)
    # A kernel may copy one image's windows to a matrix before it multiplies.
    return one_output(Tensor(call[0].kind, shape), work=math.prod(shape) * taps, scratch=taps * math.prod(counts))


def _conv_transpose(call: Call) -> NodeCost:
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
    return one_output(Tensor(call[0].kind, shape), work=work, scratch=taps * math.prod(spatial))


def _pool(call: Call) -> NodeCost:
    batch, channels, spatial = _image(call)
    kernel = _per_axis(call, "kernel_shape", len(spatial))
    pads = _per_axis(call, "pads", 2 * len(kernel), default=0, least=0)
    shape = (batch, channels, *_windows(call, spatial, kernel, pads))
    pooled = Tensor(call[0].kind, shape)
    places = (Tensor(INT64, shape),) * (call.results - 1)
    return NodeCost((pooled, *places), math.prod(shape) * (math.prod(kernel) + len(places)))


def _global_pool(call: Call) -> NodeCost:
    batch, channels, spatial = _image(call)
    return one_output(Tensor(call[0].kind, (batch, channels, *(1 for _ in spatial))), work=call[0].size)


def _layer_norm(call: Call) -> NodeCost:
    data, _ = call.first(2)
    axis = axis_of(call.number("axis", -1), len(data.shape))
    moments = Tensor(FLOAT32, (*data.shape[:axis], *(1 for _ in data.shape[axis:])))
    outputs = (Tensor(data.kind, data.shape), moments, moments)
    return NodeCost(outputs[: call.results], 8 * data.size, 2 * data.size)


def _batch_norm(call: Call) -> NodeCost:
    """Refuses the training mode: in it ONNX Runtime updates the averages, so a graph would remember other records."""
    data, *_ = call.first(5)
    require(call.results == 1 and not call.number("training_mode"), "it keeps averages of what it was given")
    return one_output(Tensor(data.kind, data.shape), work=7 * data.size)


def _cumulated(call: Call) -> NodeCost:
    (axis,) = _single(call, 1, "axis")
    axis_of(axis, len(call[0].shape))
    return _same()(call)


def _top(call: Call) -> NodeCost:
    data = call[0]
    axis = axis_of(call.number("axis", -1), len(data.shape))
    (count,) = _single(call, 1, "count")
    require(0 < count <= fixed(data.shape[axis]), f"it takes the largest {count} of {data.shape[axis]}")
    shape = (*data.shape[:axis], count, *data.shape[axis + 1 :])
    outputs = Tensor(data.kind, shape), Tensor(INT64, shape)
    return NodeCost(outputs[: call.results], 32 * data.size, 4 * data.size)  # sorting; pairs of a value and its place


def _fourier(call: Call) -> NodeCost:
    """The work is that of the sums by definition, because a length may be a prime."""
    data, given = call[0], call.get(2)
    rank = len(data.shape)
    require(rank >= 2 and data.shape[-1] in (1, 2) and data.kind in _FLOATING, f"{data.shape} are no complex numbers")
    axis = axis_of(call.number("axis", 1) if given is None else _single(call, 2, "axis")[0], rank)
    length = fixed(data.shape[axis]) if call.get(1) is None else _single(call, 1, "length")[0]
    half = call.number("onesided")
    require(axis < rank - 1 and length > 0 and not (half and call.number("inverse")), "its axis or kind is not allowed")
    shape = (*data.shape[:axis], length // 2 + 1 if half else length, *data.shape[axis + 1 : -1], 2)
    size = math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) * length
    return one_output(Tensor(data.kind, shape), work=4 * size * length, scratch=2 * size + 16 * length)


def _short_fourier(call: Call) -> NodeCost:
    signal, window = call[0], call.get(2)
    require(len(signal.shape) == 3 and signal.shape[2] in (1, 2), f"{signal.shape} is not a batch of signals")
    require(signal.kind in _FLOATING, "its signal is of another kind")
    (step,), sizes = _single(call, 1, "step"), [] if window is None else [fixed(n) for n in window.shape]
    require(len(sizes) <= 1, f"its window is {sizes}")
    length = sizes[0] if call.get(3) is None and sizes else _single(call, 3, "length")[0]
    room = fixed(signal.shape[1]) - length
    require(step > 0 and length > 0 <= room and sizes in ([], [length]), f"a window of {length} does not fit")
    frames, bins = room // step + 1, length // 2 + 1 if call.number("onesided", 1) else length
    shape = (signal.shape[0], frames, bins, 2)
    size = signal.shape[0] * frames * length
    return one_output(Tensor(signal.kind, shape), work=8 * size * length, scratch=4 * size + 16 * length)


def _single(call: Call, place: int, what: str) -> list[int]:
    numbers = fixed_list(call.get(place), what)
    require(len(numbers) == 1, f"its {what} is not one number")
    return numbers


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


COMPUTING: Mapping[str, Rule] = (
    _each("Add Sub Mul Pow PRelu And Or Xor", _elementwise(2))
    | _each("Div", _division)
    | _each("Max Min Mean Sum", _elementwise(1))
    | _each("Equal Greater GreaterOrEqual Less LessOrEqual", _elementwise(2, BOOL))
    | _each("Where", _elementwise(3, first=1))
    | _each("Abs Elu Erf Exp HardSigmoid LeakyRelu Log Neg Not Reciprocal Relu Selu Sigmoid Sign", _same())
    | _each("Softplus Sqrt Tanh Trilu Clip Ceil Cos Floor Round Sin", _same())
    # Some of these are expanded to several nodes, or work on a copy.
    | _each("Gelu HardSwish LogSoftmax Softmax", _same(scratch=4))
    | _each("GroupNormalization InstanceNormalization", _same(3, scratch=4))
    | _each("BatchNormalization", _batch_norm)
    | _each("LayerNormalization", _layer_norm)
    | _each("ArgMax ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin", _reduce)
    | _each("ReduceProd ReduceSum ReduceSumSquare", _reduce)
    | _each("MaxPool AveragePool", _pool)
    | _each("GlobalAveragePool GlobalMaxPool", _global_pool)
    | {"CumSum": _cumulated, "DFT": _fourier, "STFT": _short_fourier, "TopK": _top}
    | {"Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "MatMul": _matmul}
)
