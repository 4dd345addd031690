"""Uses the last linear layer of a trained network as a projection of its input.

A network for many classes has learned in its last layer which directions of its inner features distinguish things. So a
singular value decomposition of its weights, without their mean over the classes, orders these directions, and no data
are needed: W - mean = U s V^T, and features f become f V s, those with the largest s first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

LEAST = 32
"""The least number of directions for a projection: a classifier of ten classes says too little about other classes."""
MOST = 512
_AFTER = ("Identity", "LogSoftmax", "Sigmoid", "Softmax")  # what may follow the last layer
_LEAST_VALUE = 1e-3  # share of the largest: below it is the rounding error of a direction that all classes share


@dataclass(frozen=True, eq=False)
class Classifier:
    """The last linear layer.

    :param given: the name of its input, `[batch, F]`.
    :param weight: float `[classes, F]`.
    """

    given: str
    weight: np.ndarray

    def projection(self) -> np.ndarray:
        """Returns V s, float64 `[F, k]`; k is at most `MOST`."""
        centred = self.weight.astype(np.float64) - self.weight.mean(0, dtype=np.float64)
        _, values, axes = np.linalg.svd(centred, full_matrices=False)
        kept = min(MOST, int((values > _LEAST_VALUE * values[0]).sum()))
        projection: np.ndarray = axes[:kept].T * values[:kept]
        return projection


def find(graph: onnx.GraphProto, *, least: int = LEAST) -> Classifier | None:
    """Finds the linear layer that gives the graph's first output; None if there is none.

    :param least: the least number of directions that its weights must give.
    """
    made = {name: node for node in graph.node for name in node.output}
    node = made.get(graph.output[0].name)
    while node is not None and node.op_type in _AFTER:
        node = made.get(node.input[0])
    if node is not None and node.op_type == "Add":
        sources = [made.get(name) for name in node.input]
        node = next((each for each in sources if each is not None and each.op_type == "MatMul"), None)
    if node is None or node.op_type not in ("Gemm", "MatMul"):
        return None
    weight = _constant(graph, made, node.input[1])
    options = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if weight is None or weight.ndim != 2 or options.get("transA"):
        return None
    weight = weight if options.get("transB") else weight.T
    return Classifier(node.input[0], weight) if min(len(weight) - 1, weight.shape[1]) >= least else None


def _constant(graph: onnx.GraphProto, made: dict[str, onnx.NodeProto], name: str) -> np.ndarray | None:
    """Returns a constant's value; None if the name is not of a constant."""
    for constant in graph.initializer:
        if constant.name == name:
            return numpy_helper.to_array(constant)
    node = made.get(name)
    if node is None or node.op_type not in ("Constant", "Identity", "Transpose"):
        return None
    if node.op_type == "Constant":
        return numpy_helper.to_array(node.attribute[0].t)
    value = _constant(graph, made, node.input[0])
    return value if value is None or node.op_type == "Identity" else value.T


def cut(graph: onnx.GraphProto, result: str) -> None:
    """Removes everything that `result` does not need, in place."""
    needed, kept = {result}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed.update(node.input)
    constants = [each for each in graph.initializer if each.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(constants)
