"""Eight devices on four kinds of boards, through a broker outage and two crashes: the model of the calm run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.world.live import LiveFleet
from hushfleet.simulator.world.scenario import ScenarioPlayer

pytestmark = pytest.mark.slow

DEVICES = 8
BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-4-4gb", "raspberry-pi-5-8gb", "jetson-orin-nano")
STORM = {
    "drop_out": [{"devices": ["device-5"], "at_round": 1, "for_s": 2}],
    "crash": [
        {"process": "broker", "at_round": 2, "for_s": 3},
        {"process": "aggregator", "at_round": 3, "for_s": 1},
    ],
}


def test_eight_boards_through_an_outage_and_two_crashes(
    short_task: Any, runs: Any, audit: Any, play_scenario: Any, tmp_path: Path
) -> None:
    calm_task = short_task(
        data={"devices": DEVICES, "limit": 480, "min_samples": 10},
        round={"rounds": 4, "min_updates": DEVICES},
        method={"local_epochs": 5},
    )
    stormy_task = parse_task({**calm_task.to_plain(), "scenario": STORM})
    calm = runs.fast(begin(calm_task, tmp_path / "calm", data_dir=None))
    live = begin(stormy_task, tmp_path / "live", data_dir=None, mix=FleetMix.in_turn(BOARDS, DEVICES))
    player = ScenarioPlayer(live, schedule_of(live.task, [device.name for device in live.fleet.devices]))
    fleet = LiveFleet(live, emulate=True)
    with fleet.running():
        play_scenario(fleet, player)

    assert audit.models(live) == audit.models(calm), "to the last bit"
    audit.check(live)
    told = [(event["action"], event["target"]) for event in iterate_events(live.folder.scenario)]
    happened = {(how, name) for name in ("device-5", "broker", "aggregator") for how in ("kill", "start")}
    assert set(told) == happened
    assert len(told) == len(happened)
    assert len(audit.events(live, "run")) == 2, "the aggregator was started twice"
    for row in audit.events(live, "round_close"):
        assert row["participants"] == DEVICES
