"""A network on log-mel spectra of sound: engines agree, and a model file takes sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.live import LiveFleet


@pytest.fixture(scope="module", params=["dp-fedavg", "fedper"])
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Two tones in noise, for three devices."""
    rng, y = np.random.default_rng(0), np.arange(60) % 2
    tones = np.sin(2 * np.pi * np.outer(1000 + 1000 * y, np.arange(1840)) / 16000)
    x = (0.1 * tones + 0.05 * rng.standard_normal(tones.shape)).astype(np.float32)[:, None, None]
    path = tmp_path_factory.mktemp("data") / "tones.npz"
    np.savez(path, train_x=x[:48], train_y=y[:48], test_x=x[48:], test_y=y[48:])
    return parse_task(
        {
            "name": "tones",
            "model": {"name": "cnn", "features": "sound:log-mel"},
            "method": {"name": request.param, "learning_rate": 0.3, "batch_size": 8, "local_epochs": 4},
            "privacy": {"clip_norm": 5.0, "noise_multiplier": 0.001},
            "data": {"name": "arrays", "path": str(path), "class_names": ["low", "high"], "devices": 3},
            "round": {"rounds": 2, "min_devices": 3, "min_updates": 3},
        }
    )


def test_a_model_file_takes_sound(fast: Simulation) -> None:
    """And gives what the network gives for the spectra."""
    [path, *_] = write_models(fast)
    sound = fast.fleet.common_test
    found = onnxruntime.InferenceSession(path).run(["logits"], {"x": sound.x})[0]
    spectra = fast.prepared.features.of(sound).x
    assert spectra.shape == (12, 1, 40, 10)
    assert found.shape == (12, 2)
    assert np.ptp(found) > 0


@pytest.mark.slow
def test_live_ends_in_the_model_of_fast(task: Task, fast: Simulation, tmp_path: Path, audit: Any, finish: Any) -> None:
    live = begin(task, tmp_path / "run", data_dir=None)
    fleet = LiveFleet(live)
    with fleet.running():
        finish(fleet)
    assert audit.models(live) == audit.models(fast), "to the last bit"
    audit.check(live)
