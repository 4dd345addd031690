"""Bounds the memory and work of a graph from its shapes, before ONNX Runtime reads a byte.

Every size is tracked for all batch sizes at once (`hushfleet.learning.graph_sizes`), and evaluated at the largest
batch, where it is largest. A graph is refused if a size is not known, or if it exceeds a cap:

- `memory`: the memory in use at once when nodes run in the file's order. Parameters and gradients, which belong to the
  caller, do not count; dropout masks, a teacher's logits and a kernel's own copies do. No single tensor may be larger
  either.
- `MAX_REORDERED` times `memory`: everything that the graph computes. ONNX Runtime may choose another order; in every
  order, no more than this can be in memory.
- `MAX_WORK_PER_SAMPLE` multiply-adds for each sample of a batch, and `MAX_WORK` in one run.

This interpreter can be removed when the board trains in a separate process with a memory and time limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_node import Node, Tensor
from hushfleet.learning.graph_operators import apply
from hushfleet.learning.graph_safety import ELEMENT_BYTES, ELEMENT_KINDS, GraphFacts
from hushfleet.learning.graph_sizes import BATCH, Size, at

MEMORY_BYTES = 2 << 30  # if no device says how much it has
MAX_REORDERED = 16
MAX_WORK_PER_SAMPLE = 1 << 36
MAX_WORK = 1 << 42
_MADE_HERE = ("dropout.", "teacher")  # inputs that a device allocates with the size in the graph
_MOST_ELEMENTS = 1 << 62  # of a tracked tensor: otherwise products of sizes would become huge integers


@dataclass(frozen=True)
class GraphCost:
    """Upper bounds of one run at some batch size.

    :param largest_bytes: of one tensor; `held_bytes`: at once, in the file's order; `all_bytes`: of all tensors.
    :param work: multiply-adds.
    """

    largest_bytes: int
    held_bytes: int
    all_bytes: int
    work: int


@dataclass(frozen=True)
class _Step:
    node: Node
    outputs: tuple[Tensor, ...]
    work: Size
    scratch: Size


def check_cost(facts: GraphFacts, *, batch: int, memory_bytes: int = MEMORY_BYTES) -> GraphCost:
    """Bounds the cost of the graph with up to `batch` samples. Raises `GraphRefused`."""
    cost = graph_cost(facts, batch)
    if max(cost.largest_bytes, cost.held_bytes) > memory_bytes or cost.all_bytes > MAX_REORDERED * memory_bytes:
        raise GraphRefused(
            f"with {batch} samples the graph holds {_mib(cost.held_bytes)} at once, {_mib(cost.largest_bytes)} of them "
            f"in one tensor, and computes {_mib(cost.all_bytes)} in all; this device gives it {_mib(memory_bytes)}, "
            f"and {MAX_REORDERED} times that in all"
        )
    if cost.work > min(MAX_WORK, MAX_WORK_PER_SAMPLE * batch):
        raise GraphRefused(
            f"with {batch} samples the graph takes {cost.work:.2g} multiply-adds, above the caps of "
            f"{MAX_WORK_PER_SAMPLE:.2g} for a sample and {MAX_WORK:.2g} in all"
        )
    return cost


def graph_cost(facts: GraphFacts, batch: int) -> GraphCost:
    """Bounds the cost of one run with `batch` samples. Raises `GraphRefused` if it is unknown."""
    steps = _steps(facts)
    last_use = {name: place for place, step in enumerate(steps) for name in step.node.inputs}
    inputs = [tensor for name, tensor in _inputs(facts).items() if name.startswith(_MADE_HERE)]
    made = [at(tensor.size, batch) * ELEMENT_BYTES[tensor.kind] for tensor in inputs]
    held = total = most = sum(made)
    largest, work = max(made, default=0), 0
    alive: dict[str, int] = {}
    for place, step in enumerate(steps):
        scratch = 4 * at(step.scratch, batch)
        for name, tensor in zip(step.node.outputs, step.outputs, strict=False):
            size = at(tensor.size, batch) * ELEMENT_BYTES[tensor.kind]
            total += size
            largest = max(largest, size)
            if name and name not in facts.outputs:
                alive[name] = size
                held += size
            else:
                scratch += size if not name else 0
        total += scratch
        most = max(most, held + scratch)
        work += at(step.work, batch)
        for name in {*step.node.inputs, *step.node.outputs}:
            if last_use.get(name, -1) <= place:
                held -= alive.pop(name, 0)
    return GraphCost(largest, most, total, work)


def shapes(facts: GraphFacts) -> Mapping[str, tuple[Size, ...]]:
    """Returns the shape of everything that the graph computes. Raises `GraphRefused`."""
    return {name: t.shape for step in _steps(facts) for name, t in zip(step.node.outputs, step.outputs, strict=False)}


def _steps(facts: GraphFacts) -> list[_Step]:
    values: dict[str, Tensor | None] = {"": None, **_inputs(facts), **facts.constants}
    steps = []
    for node in facts.nodes:
        try:
            given = apply(node, [values[name] for name in node.inputs])
        except GraphRefused as error:
            name = "".join(node.outputs[:1])
            raise GraphRefused(f"the sizes of {node.operator!r} ({name}) cannot be told: {error}") from error
        for tensor in given.outputs:
            if tensor.kind not in ELEMENT_BYTES or len(tensor.shape) > 8:
                raise GraphRefused(f"{node.operator!r} gives a tensor of a kind that is not allowed")
        if any(tensor.size > _MOST_ELEMENTS for tensor in given.outputs):
            raise GraphRefused(f"{node.operator!r} gives a tensor that is too large to be followed")
        if any(tensor.size == 0 for tensor in given.outputs):
            raise GraphRefused(f"{node.operator!r} gives an empty tensor, whose handling differs among runtimes")
        if len(node.outputs) > len(given.outputs):
            raise GraphRefused(f"{node.operator!r} has {len(node.outputs)} outputs")
        values |= zip(node.outputs, given.outputs, strict=False)
        values[""] = None
        steps.append(_Step(node, given.outputs, given.work, given.scratch))
    return steps


def _inputs(facts: GraphFacts) -> dict[str, Tensor]:
    """Returns the inputs as tensors; the batch is the first size, and only this size may be open."""
    inputs = {}
    for name, value in facts.inputs.items():
        shape: list[Size] = []
        for place, size in enumerate(value.shape):
            if isinstance(size, str) and place:
                raise GraphRefused(f"the input {name!r} has an open size besides the batch: {value.shape}")
            shape.append(BATCH if isinstance(size, str) else size)
        inputs[name] = Tensor(ELEMENT_KINDS[value.dtype], tuple(shape))
    return inputs


def _mib(count: int) -> str:
    return f"{-(-count // (1 << 20))} MiB"
