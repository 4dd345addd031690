"""SCAFFOLD, whose server tells devices a vector, and FedDyn in the engines, against the papers' loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hushfleet as hf
from hushfleet.aggregator.rounds.server_half import server_state_from_bytes
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.run_folder import RunFolder, begin
from hushfleet.simulator.world.live import LiveFleet

DEVICES, ROUNDS, STEPS, RATE, SERVER_RATE, CLASSES = 4, 4, 3, 2.0, 0.8, 10

TASK: dict[str, Any] = {
    "name": "loop",
    "model": {"name": "linear", "features": "filters"},
    "method": {
        "name": "scaffold",
        "optimizer": "sgd",
        "learning_rate": RATE,
        "server_learning_rate": SERVER_RATE,
        "local_steps": STEPS,
        "batch_size": 1024,  # more than a device has: each step is on all of its samples
    },
    "privacy": {"noise_multiplier": 0, "clip_norm": float("inf")},
    "data": {"name": "digits", "devices": DEVICES, "limit": 300, "partition": "dirichlet-class", "alpha": 0.5},
    "round": {"rounds": ROUNDS, "cohort_size": 2, "min_updates": 2},
}
EXACT = {"wire.codec": "float32", "wire.downlink": "full"}


def simulate(out: Path, changes: dict[str, Any], **options: Any) -> RunFolder:
    options = {"local_only": False, "quiet": True, "runtime": "onnx", "workers": 1} | options
    return RunFolder(hf.simulate(TASK, changes, out=out, **options).folder)


def published(folder: RunFolder, round: int) -> np.ndarray:
    layout = LoadedRun(folder.path, "onnx").spec.model.layout
    return Checkpoints(folder.aggregator, layout, vectors=("control",)).read(round)


@pytest.mark.parametrize("changes", [EXACT, EXACT | {"wire.downlink": "difference"}])
def test_the_engine_computes_the_papers_loop(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = simulate(tmp_path / "a", changes)
    run = LoadedRun(folder.path, "onnx")
    names, size = [f"device-{index}" for index in range(DEVICES)], run.spec.model.layout.size
    x = {name: run.train(name).x.reshape(len(run.train(name)), -1).astype(float) for name in names}
    y = {name: np.eye(CLASSES)[run.train(name).y] for name in names}
    own, control, model = {name: np.zeros(size) for name in names}, np.zeros(size), np.zeros(size)
    with AggregatorStore(folder.aggregator, durable=False) as store:
        cohorts = [sorted(charge.device for charge in store.charges(round)) for round in range(1, ROUNDS + 1)]
        state = server_state_from_bytes(store.get("server_state") or b"")
    for cohort in cohorts:
        sent = {}
        for name in cohort:
            at = model.copy()
            for _ in range(STEPS):
                at -= RATE * (slope(at, x[name], y[name]) - own[name] + control)
            sent[name] = at - model
        moved = {name: -control - change / (STEPS * RATE) for name, change in sent.items()}
        own |= {name: own[name] + change for name, change in moved.items()}
        model += SERVER_RATE * np.mean(list(sent.values()), axis=0)
        control += len(sent) / DEVICES * np.mean(list(moved.values()), axis=0)
    assert len(set(map(tuple, cohorts))) > 1, "or partial participation is not tested"
    found = published(folder, ROUNDS)
    rounding = 1e-5 if changes == EXACT else 0.1  # of the whole vector's length
    kept = {name: own_control(folder, run.spec.task, name) for name in names}
    pairs = [(model, found[:size]), (control, found[size:]), *((own[name], kept[name]) for name in names)]
    for expected, there in pairs:
        assert np.linalg.norm(there - expected) <= rounding * np.linalg.norm(expected)
    assert np.linalg.norm(control) > 0.1
    np.testing.assert_array_equal(state["control"], found[size:], "the server goes on from what devices have")


def own_control(folder: RunFolder, task: str, name: str) -> Any:
    with store_of(folder, name) as device:
        kept = device.load_state(task)
    return 0.0 if kept is None else kept.private["control"]


def slope(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of softmax regression at the flat vector."""
    weight, bias = at[:-CLASSES].reshape(CLASSES, -1), at[-CLASSES:]
    logits = x @ weight.T + bias
    error = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - y
    return np.concatenate([(error.T @ x).ravel(), error.sum(0)]) / len(x)


@pytest.mark.slow
def test_vectors_travel_as_the_model_does(tmp_path: Path, finish: Any) -> None:
    """Through a broker, as differences, with clipping and noise: the live engine ends in the fast one's bits."""
    changes = {"privacy.clip_norm": 0.5, "privacy.noise_multiplier": 0.1, "round.rounds": 3}
    fast = simulate(tmp_path / "fast", changes)
    live = begin(hf.task(TASK, changes), tmp_path / "live", data_dir=None)
    fleet = LiveFleet(live, hosts={"host": [device.name for device in live.fleet.devices[1:]]})
    with fleet.running():
        finish(fleet)
    assert published(live.folder, 3).any()
    np.testing.assert_array_equal(published(live.folder, 3), published(fast, 3))


def test_feddyn_needs_no_vector(tmp_path: Path) -> None:
    """Acar et al.: "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1."""
    method = {key: value for key, value in TASK["method"].items() if key != "server_learning_rate"}
    task = {**TASK, "method": method | {"name": "feddyn", "alpha": 0.3}}
    options = {"local_only": False, "quiet": True, "runtime": "onnx"}
    folder = RunFolder(hf.simulate(task, EXACT, out=tmp_path / "a", **options).folder)
    run = LoadedRun(folder.path, "onnx")
    names, size, alpha = [f"device-{index}" for index in range(DEVICES)], run.spec.model.layout.size, 0.3
    x = {name: run.train(name).x.reshape(len(run.train(name)), -1).astype(float) for name in names}
    y = {name: np.eye(CLASSES)[run.train(name).y] for name in names}
    own, h, model = {name: np.zeros(size) for name in names}, np.zeros(size), np.zeros(size)
    with AggregatorStore(folder.aggregator, durable=False) as store:
        cohorts = [sorted(charge.device for charge in store.charges(round)) for round in range(1, ROUNDS + 1)]
    for cohort in cohorts:
        ends = {}
        for name in cohort:
            at = model.copy()
            for _ in range(STEPS):
                at -= RATE * (slope(at, x[name], y[name]) - own[name] + alpha * (at - model))
            ends[name] = at
        own |= {name: own[name] - alpha * (end - model) for name, end in ends.items()}
        h -= alpha / DEVICES * sum(end - model for end in ends.values())
        model = np.mean(list(ends.values()), axis=0) - h / alpha
    found = Checkpoints(folder.aggregator, run.spec.model.layout).read(ROUNDS)
    assert np.linalg.norm(found - model) <= 1e-5 * np.linalg.norm(model)
