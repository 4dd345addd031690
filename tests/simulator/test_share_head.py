"""A head on a fixed network, each record protected by secure aggregation: engines agree, and a model file takes
images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file

from hushfleet.aggregator.config.task import Task
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.live import LiveFleet


@pytest.fixture(scope="module")
def task(short_task: Any) -> Task:
    return short_task(
        model={"name": "digits-cnn", "share": "head"},
        method={"name": "hush", "learning_rate": 4.0, "batch_size": 50, "momentum_server": 0.9},
        privacy={
            "unit": "record",
            "accounting": "secure",
            "clip_norm": 0.5,
            "noise_multiplier": 1.5,
            "sample_rate": 1.0,
        },
        data={"limit": 400},
        round={"rounds": 2},
    )


def last_model(simulation: Simulation) -> np.ndarray:
    tensors = load_file(simulation.folder.aggregator / "global-2.safetensors")
    return np.concatenate([tensors[name].ravel() for name in simulation.prepared.spec.model.layout.names])


def test_every_device_is_charged_for_its_records_by_the_sum(fast: Simulation, audit: Any) -> None:
    honest = fast.prepared.spec.privacy.secure.honest_devices
    for device in fast.fleet.devices:
        charges = [entry.charge for entry in audit.ledger(fast, device.name)]
        assert [(each.unit, each.noise_multiplier, each.noise_split, each.steps) for each in charges] == [
            ("record", 1.5, honest, 1)
        ] * 2


def test_arrays_train_alike(task: Task, fast: Simulation, runs: Any, tmp_path: Path) -> None:
    arrays = runs.fast(begin(task, tmp_path / "run", data_dir=None), runtime="vmap")
    one, other = (last_model(each) for each in (fast, arrays))
    far = np.abs(one - other) > 0.01 * np.abs(one).max()
    assert far.mean() <= 0.01, "but for values that rounding has moved over a step of the wire"


def test_a_model_file_takes_images(fast: Simulation) -> None:
    [path, *_] = write_models(fast)
    images = fast.fleet.common_test.take(slice(0, 5)).x
    assert onnxruntime.InferenceSession(path).run(["logits"], {"x": images})[0].shape == (5, 10)


@pytest.mark.slow
def test_live_ends_in_the_model_of_fast(task: Task, fast: Simulation, tmp_path: Path, audit: Any, finish: Any) -> None:
    live = begin(task, tmp_path / "run", data_dir=None)
    fleet = LiveFleet(live)
    with fleet.running():
        finish(fleet)
    assert audit.models(live) == audit.models(fast), "to the last bit"
    audit.check(live)
