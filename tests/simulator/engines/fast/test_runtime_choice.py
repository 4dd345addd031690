"""The runtime of a run: measured where it is worth it, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hushfleet.simulator.engines.fast.runtime_choice import Trial, choose_runtime
from hushfleet.simulator.engines.fast.runtimes import RUNTIMES, unavailable
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin


def test_a_short_run_takes_the_devices_own_graphs(calm: Any) -> None:
    with Workers(1) as workers:
        trial = choose_runtime(calm, workers)
    assert trial.runtime == "onnx"
    assert list(trial.samples_per_s) == ["onnx"]
    assert trial.shown() == "gradients by onnx, the devices' own graphs"


def test_a_long_run_takes_the_quickest_of_all_and_keeps_it(short_task: Any, tmp_path: Path) -> None:
    task = short_task(round={"rounds": 100_000}, data={"limit": None})
    simulation = begin(task, tmp_path / "run", data_dir=None)
    with Workers(1) as workers:
        trial = choose_runtime(simulation, workers)
        at_hand = {name for name in RUNTIMES if unavailable(name, "digits-cnn") is None}
        assert set(trial.samples_per_s) == at_hand >= {"onnx", "torch", "vmap"}
        assert min(trial.samples_per_s.values()) > 0
        assert trial.samples_per_s[trial.runtime] == max(trial.samples_per_s.values())
        assert set(trial.missing) == set(RUNTIMES) - at_hand
        assert trial.runtime in trial.shown()
        # A resumed run must not change its arithmetic, whatever the machine does now.
        kept = json.loads(simulation.folder.trial.read_text()) | {"runtime": "torch"}
        simulation.folder.trial.write_text(json.dumps(kept))
        assert choose_runtime(simulation, workers) == Trial("torch", trial.samples_per_s, trial.missing)


def test_what_is_missing_is_said() -> None:
    trial = Trial("onnx", {"onnx": 1234.5, "torch": 1000.0}, {"native": "there is no C compiler"})
    assert trial.shown() == (
        "gradients by onnx; samples a second on one core: onnx 1,234, torch 1,000; no native: there is no C compiler"
    )


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_runtime_knows_whether_it_can(name: str) -> None:
    assert unavailable(name, "digits-cnn") is None or isinstance(unavailable(name, "digits-cnn"), str)
