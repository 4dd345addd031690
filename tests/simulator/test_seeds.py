"""The same run with several seeds: whole runs in one folder, with their mean and spread."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hushfleet as hf
from hushfleet.aggregator.commands.main import build_app
from hushfleet.errors import BadInput

TASK: dict[str, Any] = {
    "name": "seeds",
    "seed": 4,
    "model": {"name": "linear", "features": "filters"},
    "method": {"name": "dp-fedavg"},
    "privacy": {"noise_multiplier": 1.0},
    "data": {"name": "digits", "devices": 3, "limit": 90},
    "round": {"rounds": 1},
}


def test_each_seed_is_a_run_and_a_row(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "a", "quiet": True, "workers": 1, "local_only": False}
    run = hf.simulate(TASK, seeds=2, **options)
    assert list(run.seeds.index) == [4, 5]
    other = hf.open_run(tmp_path / "a" / "seeds" / "5")
    assert other.result.seed == 5
    assert other.result.rounds[-1].accuracy_global == run.seeds.accuracy_global[5]
    assert other.report().exists()
    mean = run.seeds.accuracy_global.mean()
    assert f"{100 * mean:.1f}" in run.report().read_text()
    done = CliRunner().invoke(build_app(), ["compare", str(tmp_path / "a")], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "mean of 2 seeds" in done.output
    shutil.rmtree(tmp_path / "a" / "seeds" / "5" / "aggregator")
    again = hf.simulate(TASK, seeds=2, resume=True, **options)
    assert again.seeds.equals(run.seeds), "a seed that has ended is read"


def test_seeds_beyond_64_bits_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"seed = 9223372036854775807 with --seeds 2: .* take a lower seed"):
        hf.simulate({**TASK, "seed": 2**63 - 1}, seeds=2, quiet=True, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_no_run_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="--seeds = 0"):
        hf.simulate(TASK, seeds=0, quiet=True)
