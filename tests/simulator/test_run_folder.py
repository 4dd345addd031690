"""Where a run goes that nobody has named a folder for, and what it goes on with."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.data.arrays import Data
from hushfleet.errors import BadInput
from hushfleet.simulator.run_folder import begin, go_on, run_path

DIGITS = {
    "name": "t",
    "data": {"name": "digits", "devices": 2},
    "model": {"name": "digits-cnn"},
    "method": {"name": "fedavg"},
}


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    first = run_path(None, "mine")
    assert not Path("runs").exists(), "nothing is begun yet"
    first.mkdir(parents=True)
    assert run_path(None, "mine") == Path(f"{first}-2")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert run_path(None, "mine") == Path("runs/mine-20260101-000000-1")


def test_a_folder_that_was_asked_for_is_taken_as_it_is(tmp_path: Path) -> None:
    assert run_path(tmp_path / "a", "mine") == tmp_path / "a"
    assert not (tmp_path / "a").exists()


def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    task, out = parse_task(DIGITS), tmp_path / "a"
    (out / "models").mkdir(parents=True)
    for name in ("models/mine.onnx", "report.html", ".hidden"):
        (out / name).write_text("mine")
    with pytest.raises(BadInput, match=r"a is no run's folder and not empty: it has models, report.html\. A run takes"):
        begin(task, out, data_dir=None)
    assert sorted(each.name for each in out.rglob("*")) == [".hidden", "mine.onnx", "models", "report.html"]


def test_a_start_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    task = parse_task(DIGITS)
    simulation = begin(task, tmp_path, data_dir=None)
    simulation.folder.task.rename(tmp_path / "task.json.part")  # killed before it had its name
    begin(task, tmp_path, data_dir=None)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadInput, match="holds a run already"):
        begin(task, tmp_path, data_dir=None)
    simulation.folder.task.unlink()
    with pytest.raises(BadInput, match=r"it has notes\.txt"):
        begin(task, tmp_path, data_dir=None)


def test_a_run_goes_on_with_the_data_that_it_was_begun_with(tmp_path: Path) -> None:
    data, run = tmp_path / "data.npz", tmp_path / "run"
    x, y = np.random.default_rng(0).random((60, 4)), np.arange(60) % 3
    Data(x, y, x[:30], y[:30]).save(data)
    plain = {
        "name": "t",
        "model": {"name": "linear"},
        "method": {"name": "fedavg"},
        "data": {"name": "arrays", "path": str(data), "devices": 3, "mean": [0.0] * 4, "std": [1.0] * 4},
    }
    begin(parse_task(plain), run, data_dir=None)
    assert go_on(run, data_dir=None).folder.path == run
    Data(x, (y + 1) % 3, x[:30], y[:30]).save(data)
    with pytest.raises(BadInput, match="its training images have changed"):
        go_on(run, data_dir=None)
    Data(x, y, x[:20], y[:20]).save(data)
    with pytest.raises(BadInput, match="its test images have changed"):
        go_on(run, data_dir=None)
    (run / "digests.json").unlink()  # as of an earlier version
    go_on(run, data_dir=None)
