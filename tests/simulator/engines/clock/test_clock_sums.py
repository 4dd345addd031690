"""Secure sums under the virtual clock: the fast engine's models, in two phases, and large fleets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock.rounds import VirtualTime, run_clocked_rounds
from hushfleet.simulator.engines.clock.sums import SummedClock
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin

pytestmark = pytest.mark.slow


def test_a_clocked_run_has_the_models_of_a_fast_one(runs: Any, short_task: Any, audit: Any, tmp_path: Path) -> None:
    task = short_task(
        method={"name": "dp-fedavg"}, privacy={"accounting": "secure", "delta": 1e-5}, round={"rounds": 2}
    )
    fast = runs.fast(begin(task, tmp_path / "fast", data_dir=None))
    mix = FleetMix.in_turn(("raspberry-pi-zero-2-w",), task.data.devices)
    clocked, time = begin(task, tmp_path / "clocked", data_dir=None, mix=mix), VirtualTime()
    with Workers(1) as workers, EventLog(clocked.folder.events, clock=time) as events:
        run_clocked_rounds(clocked, workers, events, time, mix=mix)
    assert audit.models(clocked) == audit.models(fast)
    at = {(e["event"], e["round"]): e["at"] for e in iterate_events(clocked.folder.events) if "round" in e}
    for number in (1, 2):
        moments = [at[kind, number] for kind in ("round_open", "unmask", "answer", "round_close")]
        assert moments == sorted(moments)
        assert moments[0] < moments[1] < moments[2]


def test_a_sum_that_its_committee_does_not_open_is_in_no_model(
    short_task: Any, audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the members never answers in the first round, and with it all are needed."""
    task = short_task(
        method={"name": "dp-fedavg"}, privacy={"accounting": "secure", "delta": 1e-5}, round={"rounds": 2}
    )
    opens = SummedClock._is_used
    monkeypatch.setattr(SummedClock, "_is_used", lambda self, current: current.number > 1 and opens(self, current))
    mix = FleetMix.in_turn(("raspberry-pi-zero-2-w",), task.data.devices)
    clocked, time = begin(task, tmp_path / "clocked", data_dir=None, mix=mix), VirtualTime()
    with Workers(1) as workers, EventLog(clocked.folder.events, clock=time) as events:
        run_clocked_rounds(clocked, workers, events, time, mix=mix)
    closed = audit.events(clocked, "round_close")
    assert [each["participants"] for each in closed] == [0, task.data.devices]
