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
from hushfleet.simulator.run_folder import RunFolder, begin, go_on, run_path, save_data

DIGITS = {
    "name": "t",
    "data": {"name": "digits", "devices": 2},
    "model": {"name": "digits-cnn"},
    "method": {"name": "fedavg"},
}

OWN = {"name": "arrays", "devices": 2}


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
    with pytest.raises(BadInput, match=r"a has other files: models, report\.html\. A run"):
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
    with pytest.raises(BadInput, match=r"other files: notes\.txt"):
        begin(task, tmp_path, data_dir=None)


def test_a_programs_data_never_take_the_place_of_a_users_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    x, y = np.zeros((6, 2)), np.arange(6) % 3
    mine, begun, again = Data(x + 1, y), Data(x, y), Data(x + 2, y)
    folder.path.mkdir()
    mine.save(folder.data)
    before = folder.data.read_bytes()
    task = parse_task({**DIGITS, "model": {"name": "linear"}, "data": OWN | {"path": str(folder.data)}})
    for refused in (lambda: save_data(begun, folder), lambda: begin(task, folder.path, data_dir=None)):
        with pytest.raises(BadInput, match=r"a has other files: data\.npz"):
            refused()
    assert [each.name for each in folder.path.iterdir()] == ["data.npz"]
    assert folder.data.read_bytes() == before
    folder.data.unlink()
    save_data(begun, folder)
    save_data(again, folder)  # the first start was killed
    assert np.load(folder.data)["train_x"][0, 0] == 2
    folder.data.write_bytes(before)  # in the place of ours
    with pytest.raises(BadInput, match=r"a has other files: data\.npz"):
        save_data(begun, folder)
    assert folder.data.read_bytes() == before


@pytest.mark.parametrize("last", ["write_text", "replace"])
def test_a_start_that_dies_while_it_writes_the_data_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    folder, data = RunFolder(tmp_path / "a"), Data(np.zeros((6, 2)), np.arange(6) % 3)
    save_data(data, folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, last, killed)
        with pytest.raises(KeyboardInterrupt):
            save_data(Data(np.ones((6, 2)), np.arange(6) % 3), folder)
    save_data(data, folder)
    assert not np.load(folder.data)["train_x"].any()


def killed(*_: object) -> None:
    raise KeyboardInterrupt


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
    with pytest.raises(BadInput, match="its training samples have changed"):
        go_on(run, data_dir=None)
    Data(x, y, x[:20], y[:20]).save(data)
    with pytest.raises(BadInput, match="its test samples have changed"):
        go_on(run, data_dir=None)
    (run / "digests.json").unlink()  # as of an earlier version
    go_on(run, data_dir=None)
