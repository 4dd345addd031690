"""The local-only baseline: each device's own network, trained as long as in the run, without anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.simulator.engines.fast.examples import choose_examples
from hushfleet.simulator.engines.fast.local_only import DeviceLocalOnly, train_local_only
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin


@pytest.fixture(scope="module")
def alone(calm: Simulation) -> list[DeviceLocalOnly]:
    with Workers(1) as workers:
        return list(train_local_only(calm, workers))


def by_hand(simulation: Simulation, index: int, *, learning_rate: float, epochs: int) -> np.ndarray:
    """SGD over shuffled batches of 32, written out."""
    spec, device = simulation.prepared.spec, simulation.fleet.devices[index]
    gradient = GradientGraph(simulation.prepared.blobs[spec.model.gradient.digest], spec.model.layout)
    params, x, y = simulation.prepared.initial.copy(), device.train.samples.x, device.train.samples.y
    for round in range(1, spec.rounds + 1):
        rng = SeededRandomness(simulation.seed, index).order(round)
        for _ in range(epochs):
            order = rng.permutation(len(y))
            for start in range(0, len(y), 32):
                chosen = order[start : start + 32]
                _, slope = gradient(params, x[chosen], y[chosen])
                params = params - learning_rate * slope
    return params


@pytest.mark.parametrize("name", ["fedglp-adp", "pfedsd"])
def test_it_is_plain_training_from_the_first_model(short_task: Any, tmp_path: Path, name: str) -> None:
    """Of the cross-entropy, also where the task's graph distils."""
    task = short_task(
        data={"devices": 2, "limit": 600},
        method={"name": name, "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 32, "local_epochs": 6},
        round={"rounds": 2, "min_updates": 2},
    )
    simulation = begin(task, tmp_path / "run", data_dir=None)
    spec = simulation.prepared.spec
    graph = simulation.prepared.blobs[spec.model.gradient.digest]
    assert GradientGraph(graph, spec.model.layout).distills == (name == "pfedsd")
    inference = InferenceGraph(simulation.prepared.blobs[spec.model.inference.digest], spec.model.layout)
    with Workers(1) as workers:
        found = list(train_local_only(simulation, workers))
    for index, device in enumerate(simulation.fleet.devices):
        params = by_hand(simulation, index, learning_rate=0.1, epochs=6)
        expected = []
        for samples in (simulation.fleet.common_test, device.local_test.samples):
            right = inference(params, samples.x).argmax(axis=1) == samples.labels
            expected.append(float(right.mean()))
        test = simulation.fleet.common_test
        shown = test.take(choose_examples(test, seed=simulation.seed))
        said = tuple(inference(params, shown.x).argmax(axis=1))
        assert found[index] == (device.name, *map(pytest.approx, expected), "", said)
    assert max(one.accuracy_common for one in found) > 0.15, "better than guessing"


def test_one_row_for_each_device_in_the_fleets_order(alone: list[DeviceLocalOnly], calm: Simulation) -> None:
    assert [one.device for one in alone] == [device.name for device in calm.fleet.devices]
    assert all(0.0 <= value <= 1.0 for one in alone for value in one[1:3])
    assert len({one.accuracy_common for one in alone}) > 1


def test_workers_change_nothing_and_do_without_torch(alone: list[DeviceLocalOnly], calm: Simulation) -> None:
    with Workers(2) as workers:
        assert list(train_local_only(calm, workers)) == alone
        assert not any(workers.map(eval, ["'torch' in __import__('sys').modules"] * 8))


def test_it_spends_no_privacy_and_touches_no_store(calm: Simulation, runs: Any, tmp_path: Path) -> None:
    simulation = runs.copy(tmp_path / "run")
    before = sorted(str(path) for path in simulation.folder.path.rglob("*"))
    with Workers(1) as workers:
        assert len(list(train_local_only(simulation, workers))) == len(simulation.fleet.devices)
    assert sorted(str(path) for path in simulation.folder.path.rglob("*")) == before
