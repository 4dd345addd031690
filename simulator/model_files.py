"""The trained models as ONNX files: the global one and each device's own, checked by running them.

In the field a device's own model never leaves it; a simulation has all of them on one disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.board.local_data import inputs_of
from hushfleet.errors import HushfleetError
from hushfleet.model.own_head import inputs_of_own, own_logits
from hushfleet.model.params import ParamLayout
from hushfleet.models import get_model
from hushfleet.models.export import bake
from hushfleet.progress import counted
from hushfleet.simulator.engines.fast.lean import store_of
from hushfleet.simulator.run_folder import MOST_SHOWN, Simulation

TOLERANCE = 1e-4


def write_models(simulation: Simulation) -> list[Path]:
    """Writes `models/*.onnx`: the global model, then those of the first devices that took part.

    Raises `HushfleetError` if a file computes anything else than the model.
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
        with store_of(folder.device(device), device) as device_store:
            own = device_store.own_params(spec.task)
        if own is not None:
            yield device, own


def _write(simulation: Simulation, name: str, params: np.ndarray) -> Path:
    prepared, model = simulation.prepared, simulation.prepared.spec.model
    path = simulation.folder.models / f"{name}.onnx"
    made, layout, graph, logits_of = model.features, model.layout, prepared.blobs[model.inference.digest], None
    features = None if made is None else prepared.blobs[made.graph.digest]
    probe = simulation.fleet.common_test.take(slice(0, 32))
    inputs = inputs_of(probe, prepared.features)
    if made is not None and len(params) != layout.size:  # an own head, which takes all features
        graph, layout = _own_head(len(model.class_names), made.count)
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
def _own_head(classes: int, count: int) -> tuple[bytes, ParamLayout]:
    """The graph `(param.*, x) -> logits` of a linear model of so many features, and its layout."""
    from hushfleet.models.tracing import export_inference  # takes seconds to import

    model = get_model("linear", classes=classes, input_shape=(count, 1, 1))
    return export_inference(model), model.layout
