"""Secure aggregation in the fast engine: who is drawn follows from the seed, and thousands of devices fit on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.record import record
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.methods.hush_rule import falling
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.simulator.engines.fast.device import store_of
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


def test_ledgers_and_aggregator_charge_the_noise_that_each_plan_names(
    short_task: Any, runs: Any, tmp_path: Path
) -> None:
    task = hush(short_task, devices=8, rounds=4)
    run = runs.fast(begin(task, tmp_path / "run", data_dir=None))
    told = [falling(4)[place][1] for place in range(4)]
    with AggregatorStore(run.folder.aggregator) as store:
        charged = [{charge.noise_multiplier for charge in store.charges(row.round)} for row in store.rounds()]
        result = record(store, run.prepared, engine="fast", seed=7)
    assert charged == [{multiplier} for multiplier in told]
    with store_of(run.folder, run.fleet.devices[0].name, inspect=False) as device:
        entries = device.ledger.entries()
        spent = device.ledger.epsilon_server(delta=1e-5)
    assert [entry.charge.noise_multiplier for entry in entries] == told
    equal = epsilon([Step(1.0, 1.0, 4)], delta=1e-5)
    assert equal * (1 - 1e-9) < spent <= equal
    assert {row.epsilon_server for row in result.privacy} == {spent}


@pytest.mark.slow
def test_a_device_takes_little_of_the_disk(short_task: Any, runs: Any, tmp_path: Path) -> None:
    """Ten thousand of them are simulated, and in one round all send."""
    run = runs.fast(begin(hush(short_task, devices=700, rounds=1), tmp_path / "run", data_dir=None))
    assert [len(cohort) for cohort in cohorts(run)] == [700]
    used = sum(512 * file.stat().st_blocks for file in (run.folder.path / "devices").rglob("*") if file.is_file())
    assert used / 700 < 250_000, f"{used / 700:,.0f} bytes a device"
