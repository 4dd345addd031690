"""Exports a network's gradient and inference as ONNX graphs with an open batch size, and checks them before use.

The graphs' inputs are one tensor per parameter (`param.<name>`), `x`, `y`, the dropout masks (`dropout.<i>`) and, if
the objective distils, `teacher` and `distill`; their outputs are `loss` and `grad.<name>`, or `logits`. Every export is
compared with PyTorch before it is returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet import losses
from hushfleet.errors import GraphRefused
from hushfleet.learning import graph_session as session
from hushfleet.models.model import Model
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import ParamLayout
from hushfleet.progress import doing
from hushfleet.user_files import read_cached, user_cache_dir, write_cached

if TYPE_CHECKING:
    import onnx

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
_CODE = ("tracing", "two_traces", "decompositions", "checks", "losses", "model", "torch_gradient", "own_loss")


@dataclass(frozen=True)
class Graphs:
    """The graphs that are sent with a task, as ONNX files; the weights are inputs, not part of them."""

    gradient: bytes
    inference: bytes


def export_graphs(model: Model, *, objective: Objective = CROSS_ENTROPY, cache_dir: Path | None = None) -> Graphs:
    """Returns the graphs of `model`, from the cache if the same versions exported exactly this model before.

    If these versions cannot export it, graphs that others have exported are taken, after the same check: they may have
    been carried here with the cache.

    :param objective: the objective of the gradient.
    :param cache_dir: default `$XDG_CACHE_HOME/hushfleet/graphs`, or `~/.cache/hushfleet/graphs`.
    :raises GraphRefused: a graph differs from PyTorch by more than 1e-4 of a tensor's largest entry.
    """
    folder, of_network = cache_dir or user_cache_dir() / "graphs", _network_key(model, objective)[:32]
    key = f"{of_network}.{content_key(model, objective)[:16]}"
    if (found := _cached(folder, key)) is not None:
        return found
    with doing(f"exporting and checking the graphs of {model.name}, once"):
        try:
            graphs = _exported(model, objective)
        except GraphRefused:
            others = sorted({path.name.rsplit(".", 2)[0] for path in folder.glob(f"{of_network}.*.onnx")})
            carried = [found for each in others if (found := _cached(folder, each)) is not None]
            if not carried:
                raise
            graphs = carried[0]
            _check(model, graphs, objective)
    with contextlib.suppress(OSError):  # if nothing can be written, later exports take longer
        for name, path in _paths(folder, key).items():
            write_cached(path, getattr(graphs, name))
    return graphs


def _exported(model: Model, objective: Objective) -> Graphs:
    """Exports and checks. Raises `GraphRefused`."""
    from hushfleet.models import tracing  # its import takes seconds, and is needed once per network

    try:
        graphs = Graphs(tracing.export_gradient(model, objective), tracing.export_inference(model))
    except Exception as error:  # a user's own network may raise anything
        from hushfleet.models.module_checks import format_error

        reason = format_error(error.__cause__ or error)
        raise GraphRefused(
            f"model.name = {model.name!r}: PyTorch cannot write its gradient "
            f"{f'with model.loss = {objective.own!r} ' * bool(objective.own)}as an ONNX graph: {reason}"
        ) from error
    _check(model, graphs, objective)
    return graphs


def _check(model: Model, graphs: Graphs, objective: Objective) -> None:
    from hushfleet.models import checks

    try:
        checks.check_against_torch(model, gradient=graphs.gradient, inference=graphs.inference, objective=objective)
    except GraphRefused as error:
        shape = " x ".join(map(str, model.input_shape))
        raise GraphRefused(f"model.name = {model.name!r} on samples of {shape}: {error}") from error


def _paths(folder: Path, key: str) -> dict[str, Path]:
    return {name: folder / f"{key}.{name}.onnx" for name in ("gradient", "inference")}


def _cached(folder: Path, key: str) -> Graphs | None:
    gradient, inference = (read_cached(path) for path in _paths(folder, key).values())
    return None if gradient is None or inference is None else Graphs(gradient, inference)


def content_key(network: Model, objective: Objective = CROSS_ENTROPY) -> str:
    """Returns a hex digest of everything that determines the exported graphs, so that nobody has to clear the cache.

    It covers the network's description, the source of the code that exports, and the versions of the packages.
    """
    parts = [f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES]
    return _digest(_network_key(network, objective), *parts)


def _network_key(network: Model, objective: Objective) -> str:
    """Returns a hex digest of the network's description and of the source of the code that exports it."""
    code: Any = inspect.getmodule(network.function)
    parts = [Path(__file__).with_name(f"{name}.py").read_text("utf-8") for name in _CODE]
    parts += map(inspect.getsource, (session, losses, code))
    parts += [network.layout.digest, repr(objective)]
    parts.append(repr((network.name, network.input_shape, network.classes, network.dropout, network.vocabulary)))
    parts.append(repr(getattr(network.function, "layers", None)))  # a function's source is in its module
    if objective.own:
        from hushfleet.models.own_loss import checked_digest  # with PyTorch

        parts.append(checked_digest(objective, network.classes))
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def bake(inference_graph: bytes, layout: ParamLayout, params: np.ndarray, *, features: bytes | None = None) -> bytes:
    """Returns a stand-alone ONNX file, images `x -> logits`, with the weights of `params [d]` inside.

    :param features: the graph that converts images to the network's input, if there is one.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(inference_graph)
    tensors = layout.unflatten(np.ascontiguousarray(params, np.float32))
    kept = [value for value in proto.graph.input if not value.name.startswith("param.")]
    names = {value.name for value in proto.graph.input} - {value.name for value in kept}
    if names != {f"param.{name}" for name in tensors}:
        raise ValueError(f"the graph's parameters {sorted(names)} are not the layout's, {sorted(tensors)}")
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    for name, tensor in tensors.items():
        proto.graph.initializer.append(numpy_helper.from_array(tensor, f"param.{name}"))
    if features is not None:
        proto = _behind(onnx.load_from_string(features), proto)
    onnx.checker.check_model(proto)
    return proto.SerializeToString(deterministic=True)


def _behind(features: onnx.ModelProto, network: onnx.ModelProto) -> onnx.ModelProto:
    """Joins both graphs; the network takes its number of first features as images, of one pixel or more."""
    import onnx
    from onnx import numpy_helper

    if features.opset_import[0].version != network.opset_import[0].version:
        features = onnx.version_converter.convert_version(features, network.opset_import[0].version)
    shape = [-1, *(size.dim_value for size in network.graph.input[0].type.tensor_type.shape.dim[1:])]
    bounds = [("features.first", 0), ("features.end", math.prod(shape[1:])), ("features.axis", 1)]
    features = onnx.compose.add_prefix(features, "features.", rename_inputs=False)
    [name] = (value.name for value in features.graph.output)
    features.graph.initializer.append(numpy_helper.from_array(np.array(shape), "features.shape"))
    features.graph.initializer.extend(numpy_helper.from_array(np.array([value]), key) for key, value in bounds)
    nodes = [
        onnx.helper.make_node("Slice", [name, *(key for key, _ in bounds)], ["features.given"]),
        onnx.helper.make_node("Reshape", ["features.given", "features.shape"], ["features.pixels"]),
    ]
    features.graph.node.extend(nodes)
    network = onnx.compose.add_prefix(network, "network.")
    for node in network.graph.node:
        node.input[:] = ["features.pixels" if name == "network.x" else name for name in node.input]
    outputs = network.graph.output
    del features.graph.output[:], features.graph.value_info[:]
    features.graph.node.extend(network.graph.node)
    features.graph.initializer.extend(network.graph.initializer)
    features.graph.node.append(onnx.helper.make_node("Identity", [outputs[0].name], ["logits"]))
    outputs[0].name = "logits"
    features.graph.output.extend(outputs)
    return features
