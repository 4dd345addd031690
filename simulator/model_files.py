"""Writes the trained models as ONNX files, the global one and each device's own, and checks them by running them.

In the field a device's personalized model never leaves it; a simulation has all of them on one disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import inputs_of
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.learning.personalized_head import inputs_of_own, own_logits
from hushfleet.models import get_model
from hushfleet.models.export import bake
from hushfleet.models.model import Model
from hushfleet.models.onnx_nodes import to_model
from hushfleet.params import ParamLayout
from hushfleet.progress import counted
from hushfleet.simulator.engines.fast.device import NotKept, store_of
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.run_folder import MOST_SHOWN, RunFolder, Simulation
from hushfleet.wire.format.spec import TaskSpec

TOLERANCE = 1e-4


def write_models(simulation: Simulation) -> list[Path]:
    """Writes `models/*.onnx`: the global model, then the models of the first devices that took part.

    Raises `HushfleetError` if a file does not compute the same as the model.
    """
    simulation.folder.models.mkdir(exist_ok=True)
    vectors = counted(_vectors(simulation), "writing the models", total=1 + len(simulation.took_part[:MOST_SHOWN]))
    return [_write(simulation, name, params) for name, params in vectors]


def _vectors(simulation: Simulation) -> Iterator[tuple[str, np.ndarray]]:
    spec, folder = simulation.prepared.spec, simulation.folder
    checkpoints = Checkpoints(folder.aggregator, spec.model.layout, durable=False)
    with AggregatorStore(folder.aggregator, durable=False) as store:
        yield "global", checkpoints.read(store.last_closed_round)
    for device in simulation.took_part[:MOST_SHOWN]:
        with store_of(folder, device) as device_store:
            own = device_store.own_params(spec.task)
        if own is not None:
            yield device, own


def spec_of(folder: RunFolder) -> TaskSpec:
    """Returns the task of a simulation, as its devices have it. Raises `BadInput` for another folder."""
    if not folder.package.exists():
        raise BadInput(
            f"{folder.path} is not the run folder of a simulation. In the field a device's model never leaves it, "
            "and the aggregator's folder has the global one in global-ROUND.safetensors"
        )
    return TaskSpec.from_bytes(folder.package.read_bytes())


def trained_tensors(folder: RunFolder, which: str, *, closed: int | None = None) -> dict[str, np.ndarray]:
    """Returns the parameters by name, in the network's order: of the global model, or of a device's prediction model.

    :param which: "global", or a device's name.
    :param closed: the last closed round, of a run whose process has locked its store; None: read from the store.

    Raises `BadInput` if there is no such model.
    """
    spec = spec_of(folder)
    if which == "global":
        if closed is None:
            with AggregatorStore(folder.aggregator, durable=False) as store:
                closed = store.last_closed_round
        params = Checkpoints(folder.aggregator, spec.model.layout).read(closed)
        return dict(spec.model.layout.unflatten(params))
    if closed is not None:
        raise BadInput(f"the run in {folder.path} has not ended; until then it has the model 'global' alone")
    devices = json.loads(folder.task.read_text())["data"]["devices"]
    there = [name for name in device_names(devices) if folder.has_store(name)]
    if which not in there:
        raise BadInput(
            f"{which!r} has no model in {folder.path}: give 'global', or one of the {len(there)} devices that took "
            f"part, such as {', '.join(there[:3])}"
        )
    with store_of(folder, which) as device:
        own, state = device.own_params(spec.task), device.load_state(spec.task)
    if own is None and state is not None and isinstance(state.own, NotKept):
        raise BadInput(
            f"the model of {which!r} is not kept in {folder.path}: a simulation keeps those of the first devices; "
            "run it with --engine live"
        )
    if own is None:
        raise BadInput(f"{which!r} was in no round of {folder.path}, so it has no model of its own")
    layout, made = spec.model.layout, spec.model.features
    if made is not None and len(own) != layout.size:  # a personalized head, which takes all features
        layout = _linear(len(spec.model.class_names), made.count).layout
    return dict(layout.unflatten(np.asarray(own)))


def _write(simulation: Simulation, name: str, params: np.ndarray) -> Path:
    prepared, model = simulation.prepared, simulation.prepared.spec.model
    path = simulation.folder.models / f"{name}.onnx"
    made, layout, graph, logits_of = model.features, model.layout, prepared.blobs[model.inference.digest], None
    features = None if made is None else prepared.blobs[made.graph.digest]
    probe = simulation.fleet.common_test.take(slice(0, 32))
    inputs = inputs_of(probe, prepared.features)
    if made is not None and len(params) != layout.size:  # a personalized head, which takes all features
        graph, layout = _personalized_head(len(model.class_names), made.count)
        inputs, logits_of = inputs_of_own(inputs), own_logits
    path.write_bytes(bake(graph, layout, params, features=features))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = (logits_of or prepared.inference)(params, inputs.x)
    found = session.run(["logits"], {"x": probe.x})[0]
    error = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))
    if not error <= TOLERANCE:
        raise HushfleetError(f"{path} computes something else than the trained model: {error:.1e} relative")
    return path


@cache
def _personalized_head(classes: int, count: int) -> tuple[bytes, ParamLayout]:
    """Returns the graph `(param.*, x) -> logits` of a linear model of `count` features, and its layout.

    It is written by hand, because PyTorch's exporter takes seconds.
    """
    layout = _linear(classes, count).layout
    shapes = zip(layout.names, layout.shapes, strict=True)
    values: dict[str, tuple[str | int, ...]] = {f"param.{name}": shape for name, shape in shapes}
    values["x"] = ("batch", count, 1, 1)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items()]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", classes))
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Gemm", ["flat", "param.head.weight", "param.prior"], ["logits"], transB=1),
    ]
    return to_model(helper.make_graph(nodes, "head", inputs, [logits])).SerializeToString(), layout


def _linear(classes: int, count: int) -> Model:
    return get_model("linear", classes=classes, input_shape=(count, 1, 1))
