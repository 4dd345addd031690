"""Sound in simulations: the engines agree, each device has its own clips, and a run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.data.sound import write_clip
from hushfleet.edge_client.board.config import load_config
from hushfleet.edge_client.board.notes import Note
from hushfleet.edge_client.board.sample_files import load_arrays
from hushfleet.edge_client.worker.loaded_task import LoadedTask
from hushfleet.simulator.run_folder import begin, go_on
from hushfleet.simulator.world.live import LiveFleet
from support.sound import save_clip

RECORD = {"unit": "record", "noise_multiplier": 1.0, "clip_norm": 1.0}


def folder(path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(36):
        frames = int(rng.integers(60, 330))
        tone = np.sin(np.arange(frames) * (0.2 + 0.5 * (number // 3 % 2))) * 8000 + rng.normal(0, 500, frames)
        place = path / f"board-{number % 3}" / ("high", "low")[number // 3 % 2]
        write_clip(place / f"{number}.wav", tone.astype(np.int16), 1000)
    return path


def task(path: Path, **privacy: Any) -> Task:
    data = {"name": "sound", "path": str(path), "sample_rate": 1000, "segment_s": 0.1, "partition": "given"}
    return parse_task(
        {
            "name": "sound",
            "model": {"name": "linear"},
            "method": {"name": "dp-fedavg", "batch_size": 4},
            "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 0.01, **privacy},
            "data": {**data, "devices": 3, "min_samples": 2},
            "round": {"rounds": 2},
        }
    )


@pytest.mark.parametrize("privacy", [{}, RECORD])
def test_a_device_of_a_simulation_has_its_clips(tmp_path: Path, privacy: dict[str, Any]) -> None:
    simulation = begin(task(folder(tmp_path / "clips"), **privacy), tmp_path / "run", data_dir=None)
    model = simulation.prepared.spec.model
    for device in simulation.fleet.devices:
        read = load_arrays(simulation.folder.device(device.name).train, model)
        expected = device.train.samples
        assert read.images.dtype == np.int16
        assert (read.images == expected.images).all()
        assert (read.x == expected.x).all()
        assert read.clips is not None
        assert expected.clips is not None
        assert read.clips.tolist() == expected.clips.tolist()
        assert (len(read.records[0]) == len(read)) == bool(privacy)
    mine = tmp_path / "mine.npz"
    np.savez(mine, x=expected.images, y=np.array(model.class_names)[expected.labels])
    assert load_arrays(mine, model).images.dtype == np.float32, "one sample may change the type of a user's array"


@pytest.mark.parametrize("privacy", [{}, RECORD])
def test_a_board_trains_on_one_segment_of_a_clip_that_is_a_record(tmp_path: Path, privacy: dict[str, Any]) -> None:
    simulation = begin(task(folder(tmp_path / "clips"), **privacy), tmp_path / "run", data_dir=None)
    prepared, clips = simulation.prepared, tmp_path / "clips" / "board-0"
    (tmp_path / "device.toml").write_text(
        '[device]\nid = "board-0"\nstate_dir = "state"\n[broker]\nurl = "mqtt://localhost"\n'
        f'[data]\nkind = "sound"\npath = "{clips}"\n[limits]\nepsilon_server = inf\n'
    )
    graphs = [prepared.blobs[each.digest] for each in prepared.spec.model.graphs]
    store: Any = SimpleNamespace(arrived=None, task=None)
    loaded = LoadedTask(
        prepared.spec, graphs, digest=b"", config=load_config(tmp_path / "device.toml"), store=store, note=Note(None)
    )
    files = list(clips.rglob("*.wav"))
    for file in files:
        os.utime(file, (1e9, 1e9))  # nobody is still writing it
    count = len(loaded.data.samples())
    assert (count == len(files)) if privacy else (count > len(files))


def test_every_network_gets_float32(tmp_path: Path) -> None:
    """A compiled kernel takes bytes or float32, and no int16."""
    save_clip(tmp_path / "a" / "1.wav", 1)
    simulation = begin(task(folder(tmp_path / "clips")), tmp_path / "run", data_dir=None)
    samples = simulation.fleet.devices[0].train.samples
    assert samples.kept.dtype == np.float32
    x = samples.kept * samples.scale[:, None, None] - samples.shift[:, None, None]
    assert (x == samples.x).all()


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{}, RECORD])
def test_engines_agree_and_a_run_goes_on(
    tmp_path: Path, runs: Any, finish: Any, audit: Any, privacy: dict[str, Any]
) -> None:
    asked = task(folder(tmp_path / "clips"), **privacy)
    fast = runs.fast(begin(asked, tmp_path / "fast", data_dir=None))
    live = begin(asked, tmp_path / "live", data_dir=None)
    fleet = LiveFleet(live, hosts={"host": [device.name for device in live.fleet.devices[1:]]})
    with fleet.running():
        finish(fleet)
    assert audit.models(live) == audit.models(fast)
    assert go_on(tmp_path / "fast", data_dir=None).prepared.spec == fast.prepared.spec
