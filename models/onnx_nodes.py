"""Builds a small ONNX graph node by node: images `x` float32 `[n, C, H, W]` -> `features` float32 `[n, count]`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
_IR_VERSION = 8


class Graph:
    """Nodes and constants in the order in which they are added; the returned names identify values."""

    def __init__(self, prefix: str = "") -> None:
        """:param prefix: of all names, if the nodes come before others."""
        self._prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: np.ndarray) -> str:
        """Adds a constant and returns its name."""
        name = f"{self._prefix}c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one result and returns the result's name."""
        name = f"{self._prefix}v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def copy(self, node: onnx.NodeProto, names: dict[str, str]) -> str:
        """Adds a node of another graph with one result, and returns the result's name.

        :param names: its inputs' names here.
        """
        copied, name = onnx.NodeProto(), f"{self._prefix}v{len(self.nodes)}"
        copied.CopyFrom(node)
        copied.name, copied.input[:], copied.output[:] = "", [names[each] for each in node.input], [name]
        self.nodes.append(copied)
        return name

    def to_bytes(self, result: str, image_shape: tuple[int, int, int], count: int) -> bytes:
        """Returns the ONNX file in which `result` is called `features`."""
        empty = to_model(helper.make_graph([], "features", [], []))
        return self.appended_to(empty, "x", result, image_shape, count)

    def appended_to(
        self, model: onnx.ModelProto, x: str, result: str, image_shape: tuple[int, int, int], count: int
    ) -> bytes:
        """Returns the ONNX file of `model`, followed by these nodes; `x` is its name of the images. Changes `model`."""
        graph = model.graph
        for node in graph.node:
            node.input[:] = ["x" if name == x else name for name in node.input]
        graph.node.extend(self.nodes)
        graph.node.append(helper.make_node("Identity", [result], ["features"]))
        graph.initializer.extend(self.constants)
        del graph.input[:], graph.output[:], graph.value_info[:]
        graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *image_shape]))
        graph.output.append(helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", count]))
        onnx.checker.check_model(model)
        data: bytes = model.SerializeToString(deterministic=True)
        return data


def to_model(graph: onnx.GraphProto) -> onnx.ModelProto:
    """Returns the file of a graph, for the operators that boards know."""
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)


def without_traces(model: onnx.ModelProto) -> onnx.ModelProto:
    """Removes, in place, the exporter's metadata, and shapes that are inferred again; returns the model."""
    del model.metadata_props[:], model.graph.metadata_props[:], model.graph.value_info[:]
    model.graph.doc_string = ""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = node.name = ""
    for value in [*model.graph.input, *model.graph.output, *model.graph.initializer]:
        del value.metadata_props[:]
        value.doc_string = ""
    return model
