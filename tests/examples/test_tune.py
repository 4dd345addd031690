"""The examples of hyperparameter searches end trials by their rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"data.devices": 30, "data.limit": 300, "round.rounds": 3, "privacy.epsilon": 50}


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def test_optuna_ends_trials_that_are_behind(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    from tune_optuna import search

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = search(6, SMALL, workers=1)
    assert len(study.trials) == 6
    ends = {trial.state.name for trial in study.trials}
    assert "COMPLETE" in ends
    assert {trial.last_step for trial in study.trials if trial.state.name == "COMPLETE"} == {3}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # Ray starts
def test_ray_tune_runs_trials_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))  # of Ray's processes
    from tune_ray import search

    try:
        found = search(2, SMALL)
    finally:
        ray.shutdown()  # Tune leaves it, and tests of the engine begin their own in this process
    assert not found.errors
    # Which trial is behind depends on who is first.
    iterations = {result.metrics["training_iteration"] for result in found}
    assert 3 in iterations <= {1, 2, 3}
