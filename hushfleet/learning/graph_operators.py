"""Lists the allowed ONNX operators, and computes the facts of their outputs for inputs of known shapes."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.learning.graph_compute_rules import COMPUTING
from hushfleet.learning.graph_move_rules import MOVING
from hushfleet.learning.graph_node import Call, Node, NodeCost, Tensor

_RULES = {**COMPUTING, **MOVING}
OPERATORS = frozenset(_RULES)


def apply(node: Node, inputs: Sequence[Tensor | None]) -> NodeCost:
    """Computes the outputs of `node` for these inputs; None is an omitted input. Raises `GraphRefused`."""
    return _RULES[node.operator](Call(node, inputs))
