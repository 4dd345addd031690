"""`benchmarks/pfl_cell.py` and `benchmarks/pfllib.py`, as far as they go without the other frameworks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import pfl_cell, pfllib
from benchmarks.frameworks.ours import task_of


def test_a_folder_without_pfllib_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pfllib.main(["--pfllib", str(tmp_path), "--data-dir", str(tmp_path), "--peers-python", "none-such"])
    assert "there is no PFLlib, which has system/flcore" in capsys.readouterr().err


def test_our_clients_together_make_the_servers_noise() -> None:
    cell, privacy = pfl_cell.CELL, task_of(pfl_cell.CELL).privacy
    assert privacy.clip_norm == 0.4
    assert privacy.noise_multiplier * np.sqrt(cell.cohort) == pytest.approx(pfl_cell.NOISE)


def test_each_client_of_a_cohort_has_an_order(tmp_path: Path) -> None:
    tiny = replace(pfl_cell.EXACT, clients=20, cohort=3, samples=10)
    job, _ = pfl_cell.make_job(tiny, None, 2, tmp_path)
    assert job.array("cohorts").shape == (2, 3)
    assert (np.sort(job.array("orders")) == np.arange(10)).all()
    weights = np.abs(job.array("initial")[: 32 * 25])
    assert 0.95 < weights.max() / np.sqrt(6 / (25 + 32 * 25)) <= 1, "Glorot's range of conv1"
