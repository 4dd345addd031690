"""Secure sums in the fast engine: who is drawn follows from the seed, and thousands of devices fit on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.record import record
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.run_folder import Simulation, begin

Cohorts = list[frozenset[str]]


def hush(short_task: Any, *, devices: int, seed: int = 7, **rules: int) -> Task:
    return short_task(
        seed=seed,
        model={"name": "linear"},
        method={"name": "hush"},
        privacy={"accounting": "secure", "noise_multiplier": 1.0, "honest_fraction": 0.9, "delta": 1e-5},
        data={"devices": devices, "partition": "iid", "limit": 2 * devices, "min_samples": 2, "test_fraction": 0.0},
        round={"rounds": 3, "min_updates": devices // 2, **rules},
    )


def cohorts(run: Simulation) -> Cohorts:
    """Of each round, who sent an update."""
    with AggregatorStore(run.folder.aggregator) as store:
        return [frozenset(update.device for update in store.updates(row.round)) for row in store.rounds()]


def test_who_is_drawn_follows_from_the_seed(short_task: Any, runs: Any, audit: Any, tmp_path: Path) -> None:
    task, other = (hush(short_task, devices=40, seed=seed, cohort_size=30) for seed in (7, 8))
    once, again, differently = (
        runs.fast(begin(each, tmp_path / name, data_dir=None))
        for name, each in (("once", task), ("again", task), ("other", other))
    )
    assert cohorts(once) == cohorts(again) != cohorts(differently)
    assert len(set(cohorts(once))) == 3, "another draw each round"
    assert audit.models(once) == audit.models(again)


def test_a_result_says_what_its_sums_rest_on(short_task: Any, runs: Any, tmp_path: Path) -> None:
    run = runs.fast(begin(hush(short_task, devices=40, rounds=1), tmp_path / "run", data_dir=None))
    with AggregatorStore(run.folder.aggregator) as store:
        result = record(store, run.prepared, engine="fast", seed=7)
    assert result.assumption == (
        "protected as long as at least 36 of 40 boards are honest, and the server keeps to the protocol: no operator "
        "has signed who they are; no sum of fewer than 20 is opened"
    )


@pytest.mark.slow
def test_a_device_takes_little_of_the_disk(short_task: Any, runs: Any, tmp_path: Path) -> None:
    """Ten thousand of them are simulated, and in one round all send."""
    run = runs.fast(begin(hush(short_task, devices=700, rounds=1), tmp_path / "run", data_dir=None))
    assert [len(cohort) for cohort in cohorts(run)] == [700]
    used = sum(file.stat().st_size for file in (run.folder.path / "devices").rglob("*") if file.is_file())
    assert used / 700 < 250_000, f"{used / 700:,.0f} bytes a device"
