"""The trained models as ONNX files: the global one and each device's own, checked by running them.

In the field a device's own model never leaves it; a simulation has all of them on one disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.config.spec import TaskSpec
from hushfleet.edge_client.board.local_data import inputs_of
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.models.export import bake
from hushfleet.progress import counted
from hushfleet.simulator.engines.fast.lean import store_of
from hushfleet.simulator.run_folder import MOST_SHOWN, RunFolder, Simulation

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


def spec_of(folder: RunFolder) -> TaskSpec:
    """The task of a simulation, as its devices have it. Raises `BadInput` for another folder."""
    if not folder.package.exists():
        raise BadInput(
            f"{folder.path} is no simulation's run folder. In the field a device's model never leaves it, and the "
            "aggregator's folder has the global one in global-ROUND.safetensors"
        )
    return TaskSpec.from_bytes(folder.package.read_bytes())


def trained_tensors(folder: RunFolder, which: str) -> dict[str, np.ndarray]:
    """The parameters by name, in the network's order: of the global model, or of what a device predicts with.

    :param which: "global", or a device's name.

    Raises `BadInput`.
    """
    spec = spec_of(folder)
    if which == "global":
        with AggregatorStore(folder.aggregator, durable=False) as store:
            params = Checkpoints(folder.aggregator, spec.model.layout).read(store.last_closed_round)
        return dict(spec.model.layout.unflatten(params))
    files = folder.device(which)
    if not files.has_store:
        there = sorted(path.name for path in files.path.parent.glob("*") if folder.device(path.name).has_store)
        raise BadInput(
            f"{which!r} has no model in {folder.path}: give 'global', or one of the {len(there)} devices that took "
            f"part, such as {', '.join(there[:3])}"
        )
    with store_of(files, which) as device:
        own = device.own_params(spec.task)
    if own is None:
        raise BadInput(f"{which!r} has trained nothing in {folder.path}")
    return dict(spec.model.layout.unflatten(np.asarray(own)))


def _write(simulation: Simulation, name: str, params: np.ndarray) -> Path:
    prepared, spec = simulation.prepared, simulation.prepared.spec
    path = simulation.folder.models / f"{name}.onnx"
    graph, made = spec.model.inference.digest, spec.model.features
    features = None if made is None else prepared.blobs[made.graph.digest]
    path.write_bytes(bake(prepared.blobs[graph], spec.model.layout, params, features=features))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    probe = simulation.fleet.common_test.take(slice(0, 32))
    expected = prepared.inference(params, inputs_of(probe, prepared.features).x)
    found = session.run(["logits"], {"x": probe.x})[0]
    error = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))
    if not error <= TOLERANCE:
        raise HushfleetError(f"{path} computes something else than the trained model: {error:.1e} relative")
    return path
