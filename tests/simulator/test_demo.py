"""The demo's folder: its own runs stay usable, files of others are refused before anything is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.simulator.demo import HALVES, _check_folder


def test_files_of_others_are_refused_before_any_half_is_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _check_folder(out, HALVES, resume=False)
    (out / "secure").mkdir(parents=True)
    _check_folder(out, HALVES, resume=False)
    for name, words in (
        (
            "notes.txt",
            r"out has other files: notes\.txt\. A run needs a folder of its own; choose",
        ),
        ("report.html", r"out has other files: report\.html"),
        ("secure/result.json", r"secure has other files: result\.json"),
        ("paper", r"--out .*paper: .*paper is a file"),
    ):
        (out / name).write_text("mine")
        for resume in (False, True):
            with pytest.raises(BadInput, match=words):
                _check_folder(out, HALVES, resume=resume)
        (out / name).unlink()
    (out / ".hidden").touch()
    _check_folder(out, HALVES, resume=False)


def test_its_own_runs_stay_usable(tmp_path: Path) -> None:
    for name in ("secure", "paper"):
        for file in ("task.json", "result.json", "report.html"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).touch()
        _check_folder(tmp_path, HALVES, resume=True)
        with pytest.raises(BadInput, match=f"{name} holds a run already"):
            _check_folder(tmp_path, [name], resume=False)
    (tmp_path / "report.html").touch()  # of both
    _check_folder(tmp_path, HALVES, resume=True)


def test_the_command_asks_before_it_runs(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hushfleet.aggregator.commands.main import build_app

    (tmp_path / "notes.txt").touch()
    outcome = CliRunner().invoke(build_app(), ["demo", "--short", "--out", str(tmp_path)])
    assert isinstance(outcome.exception, BadInput)
    assert "notes.txt" in str(outcome.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
