"""Uses a network for features: any ONNX file that takes the task's images and gives one vector for each.

If the file ends with a classifier, the features are the input of its last layer, projected by that layer
(`models.features.classifier`), so that they have an order. Otherwise they are the file's output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from onnx import helper, numpy_helper

from hushfleet.errors import BadInput
from hushfleet.learning.graph_operators import OPERATORS
from hushfleet.learning.graph_safety import IR_VERSIONS, OPSETS
from hushfleet.models.features import classifier
from hushfleet.models.features.log_mel import LogMel
from hushfleet.models.features.whitening import Whitening, add_unit_with_bias
from hushfleet.models.onnx_nodes import Graph, without_traces
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, SOUND, BlobRef, FeatureSpec, Shape

_LARGE = 1024  # a constant with at least this many float values is converted to bytes


@dataclass(frozen=True)
class FeatureExtractor:
    """A fixed function of an image.

    :param image_shape: channels, height, width; pixels are in [0, 1], or normalised for `hidden_features`.
    :param graph: ONNX file, `x` float32 `[batch, C, H, W]` -> `features` float32 `[batch, count]`.
    :param count: the number of features of an image, including the bias.
    :param shared: how many of them, from the first on, a shared head takes. The others are for the devices'
        personalized heads.
    :param has_order: whether the features that distinguish classes best come first.
    :param about: the licence and the size of weights that somebody else trained; empty if there are none.
    :param shape: of the features, if they are no vector.
    """

    image_shape: Shape
    graph: bytes
    count: int
    shared: int
    has_order: bool = False
    about: str = ""
    shape: Shape | None = None

    @property
    def input_shape(self) -> Shape:
        """The shape of a network's input."""
        return self.shape or (self.shared, 1, 1)

    @property
    def spec(self) -> FeatureSpec:
        """The specification in a task package."""
        return FeatureSpec(self.image_shape, self.count, BlobRef.of(self.graph))


def from_file(path: Path, image_shape: Shape) -> FeatureExtractor:
    """Reads a file for `from_bytes`. Raises `BadInput`."""
    return from_bytes(_read(path), image_shape, what=f"model.features = {str(path)!r}")


def of_sound(path: Path, image_shape: Shape, sample_rate: int) -> FeatureExtractor:
    """Reads a file for `from_bytes` that takes sound, or log-mel spectra as of `LogMel` with any number of mels.

    Its input may have axes of size 1 in any place, and a fixed batch of 1. Raises `BadInput`.
    """
    data, what = _read(path), f"model.features = '{SOUND}{path}'"
    found = _model(data, what=what)
    licences = [each.value for each in onnx.load_from_string(data).metadata_props if "licen" in each.key.lower()]
    about = f"{path.name}: {len(data) / 1e6:.1f} MB; licence: {', '.join(licences) or 'the file names none'}"
    if len(inputs := open_inputs(found.graph)) == 1 and found.graph.output:
        _put_before(found.graph, inputs[0], image_shape, sample_rate, what)
        _flatten(found.graph)
    return replace(from_bytes(found.SerializeToString(), image_shape, what=what), about=about)


def _put_before(
    graph: onnx.GraphProto, taken: onnx.ValueInfoProto, image_shape: Shape, sample_rate: int, what: str
) -> None:
    """Puts nodes, in place, before a network of sound, so that it takes `x [batch, 1, 1, T]`."""
    batch, *sizes = _shape(taken)
    many = [size for size in sizes if size != 1]
    before, spectra = Graph("before."), LogMel.of(image_shape, sample_rate)
    _, mels, frames = spectra.shape
    if len(many) == 1 and many[0] in (0, image_shape[2]):
        data, lengths = "x", [image_shape[2]]
    elif len(many) == 2 and many[0] and many[1] in (0, frames):
        data, lengths = replace(spectra, mels=many[0]).add(before, "x"), [many[0], frames]
    else:
        raise BadInput(
            f"{what} takes {sizes}; it must take sound of the task's {image_shape[2]} samples (data.segment_s times "
            f"data.sample_rate), or log-mel spectra such as {[mels, frames]}"
        )
    rest = iter(lengths)
    shape = [-1, *(1 if size == 1 else next(rest) for size in sizes)]
    if batch == 1:
        _open_batch(graph, taken.name)
    result = before.node("Reshape", data, before.constant(np.array(shape)))
    for node in graph.node:
        node.input[:] = [result if name == taken.name else name for name in node.input]
    for place, node in enumerate(before.nodes):
        graph.node.insert(place, node)
    graph.initializer.extend(before.constants)
    taken.CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", *image_shape]))


def _flatten(graph: onnx.GraphProto) -> None:
    """Makes the first output, in place, `[batch, features]` if no more than one of its axes is longer than 1."""
    _, *sizes = _shape(graph.output[0]) or [0]
    if len(sizes) > 1 and sum(size != 1 for size in sizes) <= 1:
        graph.node.append(helper.make_node("Flatten", [graph.output[0].name], ["flat"], axis=1))
        flat = helper.make_tensor_value_info("flat", onnx.TensorProto.FLOAT, ["batch", int(np.prod(sizes))])
        graph.output[0].CopyFrom(flat)


def _open_batch(graph: onnx.GraphProto, taken: str) -> None:
    """Makes reshapes to a batch of 1, in place, keep the batch that they are given, as far as samples reach them."""
    constants, reached = {each.name: each for each in graph.initializer}, {taken}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
        if not reached & set(node.input):
            continue
        reached.update(node.output)
        if node.op_type == "Reshape" and node.input[1] in constants:
            shape = numpy_helper.to_array(constants[node.input[1]]).copy()
            if len(shape) and shape[0] == 1:
                shape[0] = 0  # the size of the input's first axis
                name = f"{node.output[0]}.shape"
                graph.initializer.append(numpy_helper.from_array(shape, name))
                node.input[1] = name


def has_classifier(path: Path) -> bool:
    """Returns whether features of this file have an order; False if the file is missing. Raises `BadInput`."""
    if not path.is_file():
        return False
    return classifier.find(_model(_read(path), what=f"model.features = {str(path)!r}").graph) is not None


def from_bytes(data: bytes, image_shape: Shape, *, what: str, projected: bool = True) -> FeatureExtractor:
    """Returns the graph, followed by unit norm and bias. Raises `BadInput`.

    :param what: its name in error texts.
    :param projected: whether a last linear layer is treated as a classifier.

    The file has one input, float32 `[batch, C, H, W]` of pixels in [0, 1], and its first output is `[batch, F]`; it
    must contain its own normalisation. Weights below a classifier, and all weights of a file that is too large for
    boards, are rounded to bytes: a board then needs less memory, but some ms more per image.
    """
    if len(data) > 4 * MAX_GRAPH_BYTES:
        raise BadInput(
            f"{what} has {len(data)} bytes: even with weights in bytes it is above the cap of {MAX_GRAPH_BYTES}"
        )
    model = _model(data, what=what)
    graph = model.graph
    inputs = open_inputs(graph)
    if len(inputs) != 1 or not graph.output:
        raise BadInput(f"{what} has {len(inputs)} inputs; it must take images alone")
    shape, found = _shape(inputs[0]), _shape(graph.output[0])
    if len(shape) != 4 or any(size not in (0, wanted) for size, wanted in zip(shape[1:], image_shape, strict=True)):
        raise BadInput(f"{what} takes images of {shape[1:]}, the task has {list(image_shape)}")
    if len(found) != 2 or found[1] < 1:
        raise BadInput(f"{what} gives {found}; it must give [batch, features]")
    last, ends = classifier.find(graph) if projected else None, Graph()
    if last is None:
        count, result = found[1] + 1, add_unit_with_bias(ends, graph.output[0].name)
    else:
        classifier.cut(graph, last.given)
        white = Whitening.of(last.projection(), np.zeros(last.weight.shape[1]))
        count, result = white.count, white.add(ends, last.given)
    if last is not None or len(data) > MAX_GRAPH_BYTES:
        _to_bytes(graph)
    made = ends.appended_to(model, inputs[0].name, result, image_shape, count)
    return FeatureExtractor(image_shape, made, count, count, has_order=last is not None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"model.features = {str(path)!r} cannot be read: {error}") from error


def _model(data: bytes, *, what: str) -> onnx.ModelProto:
    try:
        model = onnx.inliner.inline_local_functions(onnx.load_from_string(data))
        refused = [_named(each) for each in model.graph.node if _is_refused(each)]
        model = without_traces(model)
        drop_unused_operator_sets(model)
        if model.opset_import[0].version < OPSETS.start and not refused:
            model = onnx.version_converter.convert_version(model, OPSETS.start)
        model.ir_version = max(model.ir_version, IR_VERSIONS.start)
        made = onnx.compose.add_prefix(onnx.shape_inference.infer_shapes(model), "backbone.")
    except Exception as error:  # protobuf's and onnx's own classes
        raise BadInput(f"{what} is not an ONNX file: {error}") from error
    if refused:
        raise BadInput(f"{what}: boards do not run the operator {refused[0]}")
    return made


def _named(node: onnx.NodeProto) -> str:
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{operator} of the node {node.name or node.output[0]!r}"


def _is_refused(node: onnx.NodeProto) -> bool:
    return node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS


def open_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Returns the inputs that are no constants of the file."""
    constants = {constant.name for constant in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def drop_unused_operator_sets(model: onnx.ModelProto) -> None:
    """Removes, in place, the sets of which no node has an operator: exporters name all that they know."""
    used = {node.domain or "ai.onnx" for node in model.graph.node}
    kept = [each for each in model.opset_import if (each.domain or "ai.onnx") in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _to_bytes(graph: onnx.GraphProto) -> None:
    """Converts large float32 constants to int8 and a scale per entry of the first axis (output channel), in place."""
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
    """Returns the sizes of a value; 0 if a size is open."""
    return [size.dim_value for size in value.type.tensor_type.shape.dim]
