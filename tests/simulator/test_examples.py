"""The examples run as their pages say, with few rounds; and engines agree on own networks and own data."""

from __future__ import annotations

import base64
import importlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from hushfleet.aggregator.config.task import load_task
from hushfleet.simulator.run_folder import Simulation, begin, go_on
from hushfleet.simulator.world.live import LiveFleet

EXAMPLES = Path(__file__).parents[2] / "examples"
PROJECTS = ("activity", "machines", "own-cnn", "strange-partition", "thermostats")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for name in PROJECTS:
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("*.npz", "runs", "__pycache__"))
    return folder


@pytest.mark.parametrize("name", PROJECTS)
def test_runs_from_its_script(projects: Path, name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run.py", "round.rounds=1"]
    done = subprocess.run(command, cwd=projects / name, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert name == "thermostats" or Path(projects / name / done.stdout.split()[-1]).exists()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        *((name, "round.rounds=many", "round.rounds = 'many'") for name in (*PROJECTS, "photographs", "words")),
        *((name, "--rounds", "KEY=VALUE") for name in ("activity", "thermostats")),
        ("words", "data.devices=30", "has the clips of 2 boards, not 30; take data.devices=2, or delete it"),
    ],
)
def test_what_is_refused_is_a_sentence(tmp_path: Path, name: str, change: str, said: str) -> None:
    project = tmp_path / name
    shutil.copytree(EXAMPLES / name, project, ignore=shutil.ignore_patterns("*.npz", "runs", "__pycache__", name))
    for board in ("board-000", "board-001"):
        (project / name / "train" / board).mkdir(parents=True)
    done = subprocess.run([sys.executable, "run.py", change], cwd=project, capture_output=True, text=True, timeout=300)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


@pytest.mark.parametrize("name", [name for name in PROJECTS if name != "own-cnn"])
def test_the_data_follow_the_number_of_devices(projects: Path, name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run.py", "round.rounds=1", "data.devices=8", "privacy.epsilon=50"]
    done = subprocess.run(command, cwd=projects / name, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_engines_agree_and_a_run_goes_on(projects: Path, runs: Any, finish: Any, tmp_path: Path) -> None:
    """Own series, an own network and an own partition, in the live engine and the fast one, which is opened again."""
    subprocess.run([sys.executable, "make_data.py"], cwd=projects / "activity", check=True)
    task = load_task(projects / "activity" / "task.toml", ("round.rounds=2", "method.local_epochs=1"))
    fast = runs.fast(begin(task, tmp_path / "fast", data_dir=None))
    live = begin(task, tmp_path / "live", data_dir=None)
    fleet = LiveFleet(live, hosts={"host": [device.name for device in live.fleet.devices[1:]]})
    with fleet.running():
        finish(fleet)
    assert _global(fast) == _global(live)
    assert go_on(tmp_path / "fast", data_dir=None).prepared.spec == fast.prepared.spec
    assert b"/" not in fast.prepared.spec.model.name.encode()  # devices are not told where a file lies


def _global(simulation: Simulation) -> bytes:
    return (simulation.folder.aggregator / "global-2.safetensors").read_bytes()


def test_photographs_are_drawn_with_what_models_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "photographs"))
    draw = importlib.import_module("run").draw
    png = base64.b64encode(picture()).decode()
    said = [SimpleNamespace(png=png, label=0, said_alone=1, said_own=own) for own in (0, 1)]
    details = SimpleNamespace(class_names=["cat", "dog"], examples=said)
    devices = pd.DataFrame({"accuracy_alone": [0.3, 0.4], "accuracy_own": [0.6, 0.5]})
    draw(SimpleNamespace(result=SimpleNamespace(details=details), devices=devices), tmp_path / "drawn.png")
    assert Image.open(tmp_path / "drawn.png").width > 400
    assert load_task(EXAMPLES / "photographs" / "task.toml").model.directions == 104


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "green").save(file, "PNG")
    return file.getvalue()
