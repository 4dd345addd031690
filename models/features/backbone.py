"""The user's own network as features: any ONNX file that takes the task's images and gives one vector for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hushfleet.config.spec import MAX_GRAPH_BYTES
from hushfleet.errors import BadInput
from hushfleet.models.features.graph import Graph, without_traces
from hushfleet.models.features.whitening import add_unit_with_bias

Shape = tuple[int, int, int]
_LARGE = 1024  # values of a constant, from which on its floats are worth to be made bytes


def from_file(path: Path, image_shape: Shape) -> tuple[bytes, int]:
    """Reads a file for `from_bytes`. Raises `BadInput`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"model.features = {str(path)!r} cannot be read: {error}") from error
    return from_bytes(data, image_shape, what=f"model.features = {str(path)!r}")


def from_bytes(data: bytes, image_shape: Shape, *, what: str) -> tuple[bytes, int]:
    """The graph with unit norm and bias behind it, and its number of features. Raises `BadInput`.

    :param what: for errors.

    The file has one input, float32 `[batch, C, H, W]` of pixels in [0, 1], and its first output is `[batch, F]`; what
    the network wants subtracted and divided belongs into it. If it is too large for boards, its weights are rounded to
    bytes.
    """
    if len(data) > 4 * MAX_GRAPH_BYTES:
        raise BadInput(
            f"{what} has {len(data)} bytes: even with weights in bytes it is above the cap of {MAX_GRAPH_BYTES}"
        )
    try:
        model = without_traces(onnx.load_from_string(data))
        model = onnx.compose.add_prefix(onnx.shape_inference.infer_shapes(model), "backbone.")
    except Exception as error:  # protobuf's and onnx's own classes
        raise BadInput(f"{what} is not an ONNX file: {error}") from error
    graph = model.graph
    constants = {constant.name for constant in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1 or not graph.output:
        raise BadInput(f"{what} has {len(inputs)} inputs; it must take images alone")
    if len(data) > MAX_GRAPH_BYTES:
        _to_bytes(graph)
    shape, found = _shape(inputs[0]), _shape(graph.output[0])
    if len(shape) != 4 or any(size not in (0, wanted) for size, wanted in zip(shape[1:], image_shape, strict=True)):
        raise BadInput(f"{what} takes images of {shape[1:]}, the task has {list(image_shape)}")
    if len(found) != 2 or found[1] < 1:
        raise BadInput(f"{what} gives {found}; it must give [batch, features]")
    ends = Graph()
    result = add_unit_with_bias(ends, graph.output[0].name)
    return ends.appended_to(model, inputs[0].name, result, image_shape, found[1] + 1), found[1] + 1


def _to_bytes(graph: onnx.GraphProto) -> None:
    """Large float32 constants as int8 and a scale for each entry of their first axis (an output channel), in place."""
    made = []
    for constant in list(graph.initializer):
        if constant.data_type != onnx.TensorProto.FLOAT or np.prod(constant.dims) < _LARGE:
            continue
        name, values = constant.name, numpy_helper.to_array(constant)
        scale = np.abs(values).max(tuple(range(1, values.ndim)), keepdims=True, initial=1e-30) / np.float32(127)
        constant.CopyFrom(numpy_helper.from_array(np.rint(values / scale).astype(np.int8), f"{name}.int8"))
        graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
        made.append(helper.make_node("Cast", [f"{name}.int8"], [f"{name}.whole"], to=onnx.TensorProto.FLOAT))
        made.append(helper.make_node("Mul", [f"{name}.whole", f"{name}.scale"], [name]))
    for place, node in enumerate(made):
        graph.node.insert(place, node)


def _shape(value: onnx.ValueInfoProto) -> list[int]:
    """The sizes of a value; 0 if a size is open."""
    return [size.dim_value for size in value.type.tensor_type.shape.dim]
