"""Lists the allowed ONNX operators, and computes the facts of their outputs for inputs of known shapes."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.graphs.compute_rules import COMPUTING
from hushfleet.graphs.move_rules import MOVING
from hushfleet.graphs.node import Call, Node, NodeCost, Tensor

_RULES = {**COMPUTING, **MOVING}
OPERATORS = frozenset(_RULES)


def apply(node: Node, inputs: Sequence[Tensor | None]) -> NodeCost:
    """Computes the outputs of `node` for these inputs; None is an omitted input. Raises `GraphRefused`."""
    return _RULES[node.operator](Call(node, inputs))
