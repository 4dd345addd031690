"""Secure aggregation between real processes: masks, answers and kills at every phase, and the fast engine's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.live import LiveFleet
from support.tools import BROKERS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def summed(runs: Any, short_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """By the fast engine, which leaves the masks out."""
    task = short_task(
        method={"name": "dp-fedavg"}, privacy={"accounting": "secure", "delta": 1e-5}, round={"rounds": 2}
    )
    return runs.fast(begin(task, tmp_path_factory.mktemp("fast") / "run", data_dir=None))


@pytest.fixture
def live(summed: Simulation, tmp_path: Path) -> Simulation:
    return begin(summed.task, tmp_path / "run", data_dir=None)


@pytest.mark.parametrize("broker", BROKERS)
def test_live_ends_in_the_model_of_fast(
    broker: str, live: Simulation, summed: Simulation, audit: Any, tap: Any, finish: Any
) -> None:
    fleet = LiveFleet(live, broker_kind=broker)
    with fleet.running():
        assert fleet.broker is not None
        tap.attach(fleet.broker.url)
        finish(fleet)
    assert audit.models(live) == audit.models(summed), "to the last bit"
    audit.check(live)
    audit.check_tap(live, tap)
    assert {answer.round for answer in tap.answers} == {1, 2}
    others = {transfer.digest for transfer in tap.transfers}
    assert len(others) == 10


def test_kills_in_every_phase_change_no_bit(
    live: Simulation, summed: Simulation, audit: Any, finish: Any, wait: Any
) -> None:
    fleet = LiveFleet(live, restarts=4)

    def happened(kind: str, number: int) -> bool:
        return any(event["round"] == number for event in audit.events(live, kind))

    def logs() -> str:
        return audit.logs(live)

    with fleet.running():
        for kind, number, victims in (
            ("update", 1, ["aggregator", "device-1"]),
            ("unmask", 1, ["aggregator", "device-2", "device-4"]),
            ("unmask", 2, ["broker", "device-0"]),
            ("answer", 2, ["aggregator"]),
        ):
            wait(lambda kind=kind, number=number: happened(kind, number), f"{kind} in round {number}", logs=logs)
            for name in victims:
                fleet.kill(name)
            fleet.check()
        finish(fleet)
    assert audit.models(live) == audit.models(summed), "to the last bit"
    audit.check(live)


def test_a_live_fleet_answers_its_evaluation_as_the_fast_one(
    runs: Any, short_task: Any, audit: Any, tap: Any, finish: Any, tmp_path: Path
) -> None:
    """One round of training and one that asks; kills are those of every other sum."""
    task = short_task(
        model={"name": "linear", "features": "filters"},
        method={"name": "dp-fedavg"},
        privacy={"accounting": "secure", "delta": 1e-5},
        round={"rounds": 1},
        evaluation={},
    )
    fast = runs.fast(begin(task, tmp_path / "fast", data_dir=None))
    live = begin(task, tmp_path / "live", data_dir=None)
    fleet = LiveFleet(live)
    with fleet.running():
        assert fleet.broker is not None
        tap.attach(fleet.broker.url)
        finish(fleet)
    assert audit.models(live) == audit.models(fast), "to the last bit"
    audit.check(live)
    audit.check_tap(live, tap)
    found = [assemble(each, engine="fast").evaluations for each in (live, fast)]
    assert found[0] == found[1]
    assert [(row.round, row.devices) for row in found[0]] == [(2, 5)]
