"""Models after aggregation: tested all at once where they share layers, against one device after the other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.learning.evaluation import evaluate
from hushfleet.models.native.gradient import NativeGradient
from hushfleet.simulator.engines.fast import after_round, next_models
from hushfleet.simulator.engines.fast.after_round import AfterRound
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun, loaded_run
from hushfleet.simulator.engines.fast.runtimes import NATIVE
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin

pytestmark = pytest.mark.slow


def closed_run(folder: Path, method: str, partition: dict[str, object]) -> Simulation:
    """Two rounds of two of six devices: some have never trained."""
    task = {
        "name": "next",
        "model": {"name": "digits-cnn"},
        "method": {"name": method, "learning_rate": 0.1, "local_epochs": 2},
        "data": {"name": "digits", "devices": 6, **partition},
        "round": {"rounds": 2, "cohort_size": 2},
    }
    simulation = begin(parse_task(task, where="test"), folder, data_dir=None)
    with Workers(1) as workers, EventLog(folder / "events.jsonl") as events:
        run_rounds(simulation, workers, events, runtime=NATIVE)
    return simulation


def alone(run: LoadedRun, device: str) -> float:
    params = next_models.begin_of(AfterRound(run.folder.path, NATIVE, device, 2))
    return evaluate(run.inference, params, run.local_test(device)).accuracy


LIKE_OWN = {"partition": "pathological", "classes_per_device": 2, "test_fraction": 0}


@pytest.mark.parametrize(
    ("method", "partition", "shares"),
    [
        ("fedper", LIKE_OWN, True),
        ("fedavg", LIKE_OWN, True),  # all begin with the same model
        ("ditto", LIKE_OWN, False),
        ("fedper", {"test_fraction": 0.2}, False),  # each has images of its own
    ],
)
@pytest.mark.parametrize("at_once", [4, 25])
def test_all_at_once_is_one_after_the_other(
    method: str, partition: dict[str, object], shares: bool, at_once: int, tmp_path: Path, monkeypatch
) -> None:
    simulation = closed_run(tmp_path / "run", method, partition)
    calls, whole = [], NativeGradient.logits_of_models

    def counted(self: NativeGradient, models: list[np.ndarray], x: np.ndarray) -> np.ndarray:
        calls.append(len(models))
        return whole(self, models, x)

    monkeypatch.setattr(NativeGradient, "logits_of_models", counted)
    monkeypatch.setattr(after_round, "AT_ONCE", at_once)
    with Workers(1) as workers:
        found = next_models.next_models_accuracy(simulation, workers, 2, runtime=NATIVE)
    assert (max(calls) > 1) == shares
    run = loaded_run(simulation.folder.path.absolute(), NATIVE)
    assert found == math.fsum(alone(run, device.name) for device in simulation.fleet.devices) / 6
    assert 0.1 < found < 1
