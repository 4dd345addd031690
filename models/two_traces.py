"""Traces a function at two batch sizes and writes each whole number that differs as an expression of the batch.

PyTorch's symbolic trace fixes the batch size for some networks, most of them transformers: operators that it writes in
C++ ask a tensor for its sizes. A trace with plain numbers needs no symbols. Two traces must be the same but for whole
numbers, and each that differs must be `a * batch + b`. Another batch size is compared with PyTorch later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = (5, 7)
"""Two batch sizes, odd and prime, so that few constants of a network equal them."""


def trace_of_any_batch(
    function: Callable[..., Any], examples: Callable[[int], tuple[Tensor, ...]], batched: int, table: dict[Any, Any]
) -> fx.GraphModule:
    """Returns the trace of `function` for every batch size.

    :param examples: returns the arguments for a batch size.
    :param batched: the place of an argument whose first size is the batch.
    :param table: the decompositions.
    :raises ValueError: the traces differ in more than sizes that grow with the batch.
    """
    few, many = (_trace(function, examples(size), table) for size in SIZES)
    if len(few.graph.nodes) != len(many.graph.nodes):
        raise ValueError("its steps depend on the number of samples in a batch")
    placeholders = [node for node in few.graph.nodes if node.op == "placeholder"]
    with few.graph.inserting_after(placeholders[-1]):
        batch = few.graph.call_function(torch.ops.aten.sym_size.int, (placeholders[batched], 0))
    pairs = {}
    others = iter(many.graph.nodes)
    for node in [each for each in few.graph.nodes if each is not batch]:
        other = pairs[node] = next(others)
        _require_same(few, node, many, other)
        with few.graph.inserting_before(node):
            node.args = _unified(node.args, other.args, batch)
            node.kwargs = _unified(node.kwargs, other.kwargs, batch)
    few.graph.lint()
    few.recompile()
    return few


def _trace(function: Callable[..., Any], args: tuple[Tensor, ...], table: dict[Any, Any]) -> fx.GraphModule:
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have backward operators without decompositions
        return make_fx(function, decomposition_table=table)(*args)


def _require_same(few: fx.GraphModule, node: fx.Node, many: fx.GraphModule, other: fx.Node) -> None:
    same = node.op == other.op and node.target == other.target
    if same and node.op == "get_attr":
        same = torch.equal(getattr(few, node.target), getattr(many, other.target))
    if not same:
        raise ValueError(f"its step {node} depends on the number of samples in a batch")


def _unified(value: Any, other: Any, batch: fx.Node) -> Any:
    """Returns `value` with each whole number that differs from `other` as a node that computes it from `batch`."""
    if isinstance(value, list | tuple):
        if len(value) != len(other):
            raise ValueError("the rank of a tensor depends on the number of samples in a batch")
        return type(value)(_unified(one, two, batch) for one, two in zip(value, other, strict=True))
    if isinstance(value, dict):
        return {key: _unified(one, other[key], batch) for key, one in value.items()}
    if isinstance(value, fx.Node) or value == other:
        return value
    if not isinstance(value, int):
        raise ValueError(f"the number {value} depends on the number of samples in a batch")
    factor, rest = divmod(other - value, SIZES[1] - SIZES[0])
    if rest:
        raise ValueError(f"the size {value} is not a multiple of the batch and a constant")
    graph, constant = batch.graph, value - factor * SIZES[0]
    size = batch if factor == 1 else graph.call_function(operator.mul, (batch, factor))
    return size if constant == 0 else graph.call_function(operator.add, (size, constant))
