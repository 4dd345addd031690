"""Playing a scenario: on a stage that writes down what it is told, and with a real fleet, which ends as if calm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.schema import from_plain
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin
from hushfleet.simulator.schedule import Outage, Schedule, make_schedule, schedule_of
from hushfleet.simulator.world.live import LiveFleet
from hushfleet.simulator.world.scenario import ScenarioPlayer

pytestmark = pytest.mark.slow

NAMES = [f"device-{number}" for number in range(8)]
Told = list[tuple[str, str]]


class Stage:
    """What a player needs of a fleet. A process that is told to stop ends when the test says so."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.told: Told = []
        self.expected_down = set(absent)
        self.running = {*NAMES, "broker", "aggregator"} - absent

    def is_running(self, name: str) -> bool:
        return name in self.running

    def kill(self, name: str) -> None:
        assert name in self.expected_down, "or it would be revived"
        self.told.append(("kill", name))
        self.running.discard(name)

    def stop(self, name: str) -> None:
        assert name in self.expected_down, "or it would be revived"
        self.told.append(("stop", name))

    def start_again(self, name: str) -> None:
        assert name not in self.running, "two processes would share a store"
        self.told.append(("start", name))
        self.running.add(name)

    def cut(self, name: str) -> None:
        self.told.append(("cut", name))

    def mend(self, name: str) -> None:
        self.told.append(("mend", name))


class Play:
    """A player and its stage, with a clock that the test turns."""

    def __init__(self, simulation: Simulation, schedule: Schedule) -> None:
        self.simulation = simulation
        self._now = 1000.0
        self.player = ScenarioPlayer(simulation, schedule, clock=lambda: self._now)
        self.stage = Stage(self.player.absent)

    def at(self, seconds: float) -> Told:
        """What the fleet is told so many seconds after the start."""
        self._now, before = 1000.0 + seconds, len(self.stage.told)
        self.player.tick(self.stage)  # type: ignore[arg-type]
        return self.stage.told[before:]

    def happened(self, kind: str, **fields: Any) -> None:
        """The aggregator writes it down."""
        with EventLog(self.simulation.folder.events) as log:
            log.write(kind, **fields)

    @property
    def written(self) -> list[dict[str, Any]]:
        return list(iterate_events(self.simulation.folder.scenario))

    @property
    def not_played(self) -> list[tuple[str, str]]:
        return [(event["target"], event["reason"]) for event in self.written if event["action"] == "not-played"]


@pytest.fixture
def play(calm: Simulation, tmp_path: Path) -> Callable[..., Play]:
    def play(
        scenario: dict[str, Any], *, nights: tuple[Outage, ...] = (), history: tuple[tuple[str, int], ...] = ()
    ) -> Play:
        simulation = replace(calm, folder=RunFolder(tmp_path / "run"))
        for kind, round in history:
            with EventLog(simulation.folder.events) as log:
                log.write(kind, round=round)
        schedule = make_schedule(from_plain(ScenarioSection, scenario), NAMES, seed=1)
        return Play(simulation, replace(schedule, windows=(*schedule.windows, *nights)))

    return play


def test_everything_is_done_when_its_time_comes_and_written_down(play: Callable[..., Play]) -> None:
    on = play(
        {
            "late": [{"devices": ["device-5"], "at_s": 2}],
            "drop_out": [{"devices": ["device-1"], "at_round": 1, "for_s": 4}],
            "crash": [
                {"process": "aggregator", "at_s": 3, "for_s": 1},
                {"process": "broker", "at_round": 2, "for_s": 0.5},
            ],
            "outage": [{"devices": ["device-0", "device-1"], "at_s": 6, "for_s": 2}],
        }
    )
    assert on.player.absent == {"device-5"}
    assert on.at(0) == []
    on.happened("round_open", round=1)
    assert on.at(1) == [("kill", "device-1")]
    assert on.stage.expected_down == {"device-1", "device-5"}
    assert on.at(2.5) == [("start", "device-5")]
    assert on.at(3) == [("kill", "aggregator")]
    assert on.at(4) == [("start", "aggregator")]
    on.happened("round_open", round=1)  # said again
    assert on.at(4.9) == []
    assert on.at(5) == [("start", "device-1")]
    assert on.stage.expected_down == set()
    assert on.at(7) == [("cut", "device-0"), ("cut", "device-1")]
    on.happened("round_open", round=2)
    assert on.at(7.5) == [("kill", "broker")]
    # all that fell due since the last look, in order
    assert on.at(30) == [("mend", "device-0"), ("mend", "device-1"), ("start", "broker")]
    assert [(event["action"], event["target"]) for event in on.written] == on.stage.told
    assert {event["event"] for event in on.written} == {"scenario"}
    assert all(event["at"] > 1.7e9 for event in on.written), "unix seconds, as in events.jsonl"


def test_a_device_that_is_still_stopping_is_started_once_it_has_ended(play: Callable[..., Play]) -> None:
    on = play({}, nights=(Outage("device-2", "stop", 0, 5.0, 10.0, every_s=10.0),))
    assert on.at(0) == []
    assert on.at(5) == [("stop", "device-2")]
    assert on.at(11) == []
    assert on.stage.expected_down == {"device-2"}
    on.stage.running.discard("device-2")
    assert on.at(12) == [("start", "device-2")]
    assert on.stage.expected_down == set()
    assert on.at(14.9) == []
    assert on.at(15) == [("stop", "device-2")]


def test_a_power_cut_ends_a_device_that_is_still_stopping(play: Callable[..., Play]) -> None:
    drop_out = {"devices": ["device-2"], "at_s": 12, "for_s": 6}
    on = play({"drop_out": [drop_out]}, nights=(Outage("device-2", "stop", 0, 5.0, 10.0, every_s=10.0),))
    assert on.at(0) == []
    assert on.at(5) == [("stop", "device-2")]
    assert on.at(11) == []  # the sun is up, but it has not ended yet
    assert on.at(12) == [("kill", "device-2")]
    assert on.at(19) == []  # the drop-out is over, in the night
    assert on.at(20) == [("start", "device-2")]


def test_after_the_end_servers_and_networks_come_back_and_devices_rest(play: Callable[..., Play]) -> None:
    on = play(
        {
            "late": [{"devices": ["device-5"], "at_s": 9}, {"devices": ["device-6"], "at_s": 0.5}],
            "drop_out": [
                {"devices": ["device-1"], "at_s": 1, "for_s": 5},
                {"devices": ["device-2"], "at_s": 5, "for_s": 1},
                {"devices": ["device-3"], "at_round": 3, "for_s": 1},
            ],
            "crash": [
                {"process": "aggregator", "at_s": 1, "for_s": 5},
                {"process": "broker", "at_s": 1, "for_s": 50},
                {"process": "aggregator", "at_s": 7, "for_s": 1},
            ],
            "outage": [{"devices": ["device-4"], "at_s": 1, "for_s": 60}],
        },
        nights=(Outage("device-7", "stop", 0, 5.0, 10.0, every_s=10.0),),
    )
    on.at(0)
    assert len(on.at(1)) == 5
    on.happened("finished")
    assert on.at(2) == [("mend", "device-4"), ("start", "broker"), ("start", "aggregator")]
    assert on.at(99) == []
    assert on.stage.expected_down == {"device-1", "device-5"}
    on.player.end(on.stage)  # type: ignore[arg-type]
    assert on.at(100) == []
    reason = "the run was over before"
    assert on.not_played == [
        ("device-5", reason),
        ("device-2", reason),
        ("aggregator", reason),
        ("device-3", reason),
    ]
    assert [(event["at_s"], event.get("at_round")) for event in on.written if event["action"] == "not-played"] == [
        (9.0, None),
        (5.0, None),
        (7.0, None),
        (0.0, 3),
    ]


STORY = {
    "late": [{"devices": ["device-0"], "at_round": 2}, {"devices": ["device-1"], "at_round": 4}],
    "drop_out": [
        {"devices": ["device-2"], "at_round": 3, "for_s": 1},
        {"devices": ["device-3"], "at_s": 2, "for_s": 1},
    ],
    "crash": [{"process": "broker", "at_round": 2, "for_s": 1}],
}


def test_what_was_down_when_a_run_was_interrupted_is_written_down_as_back(play: Callable[..., Play]) -> None:
    late = {"late": [{"devices": ["device-6"], "at_s": 5}]}
    before = play(late, history=(("run", 0),))
    with EventLog(before.simulation.folder.scenario) as log:
        for action, target in [
            ("cut", "device-0"),
            ("kill", "device-1"),
            ("stop", "device-2"),
            ("start", "device-2"),
            ("kill", "broker"),
            ("start", "device-6"),
            ("kill", "device-6"),
        ]:
            log.write("scenario", action=action, target=target)
    told = len(before.written)
    on = play(late)
    assert on.at(0) == [], "the fleet was started as a whole"
    back = [(event["action"], event["target"]) for event in on.written[told:]]
    assert back == [("mend", "device-0"), ("start", "device-1"), ("start", "broker")]
    assert on.at(1) == []
    assert on.at(5) == [("start", "device-6")], "it is late again"
    assert len(on.written) == told + 4


@pytest.mark.parametrize("round_is_open", [True, False])
def test_a_resumed_run_plays_its_own_rounds_and_counts_seconds_anew(
    round_is_open: bool, play: Callable[..., Play]
) -> None:
    history = [("run", 0), ("round_open", 1), ("round_close", 1), ("round_open", 2), ("round_close", 2)]
    on = play(STORY, history=(*history, *([("round_open", 3)] if round_is_open else [])))
    assert on.player.absent == {"device-1"}
    dropped = on.at(0)
    reason = "the run was resumed in round 3"
    assert on.not_played == [("device-0", reason), ("broker", reason)]
    if not round_is_open:
        assert dropped == []
        on.happened("round_open", round=3)
        dropped = on.at(0)
    assert dropped == [("kill", "device-2")]
    assert on.at(1.5) == [("start", "device-2")]
    assert on.at(2) == [("kill", "device-3")]
    on.happened("round_close", round=3)
    on.happened("round_open", round=4)
    assert on.at(3) == [("start", "device-3"), ("start", "device-1")]


def test_a_stormy_live_run_ends_in_the_calm_runs_model(
    short_task: Callable[..., Task], runs: Any, audit: Any, play_scenario: Any, tmp_path: Path
) -> None:
    # Enough training for the network to be cut while it lasts.
    calm_task = short_task(data={"devices": 3, "limit": 240}, round={"min_updates": 3}, method={"local_epochs": 40})
    storm = {
        "late": [{"devices": ["device-2"], "at_s": 1}],
        "drop_out": [{"devices": ["device-0"], "at_round": 1, "for_s": 1}],
        "outage": [{"devices": ["device-1"], "at_round": 1, "for_s": 1.5}],
        # not in the last round, which might be over before anybody has heard of it
        "crash": [{"process": "aggregator", "at_round": 2, "for_s": 0.5}],
    }
    stormy_task = parse_task({**calm_task.to_plain(), "scenario": storm})
    calm = runs.fast(begin(calm_task, tmp_path / "calm", data_dir=None))
    live = begin(stormy_task, tmp_path / "live", data_dir=None)

    schedule = schedule_of(live.task, [device.name for device in live.fleet.devices])
    player = ScenarioPlayer(live, schedule)
    fleet = LiveFleet(live, absent=player.absent, proxied=schedule.needs_proxy)
    with fleet.running():
        play_scenario(fleet, player)

    assert audit.models(live) == audit.models(calm), "to the last bit"
    audit.check(live)
    scenes = list(iterate_events(live.folder.scenario))
    told = [(event["action"], event["target"]) for event in scenes]
    assert sorted(told) == [
        ("cut", "device-1"),
        ("kill", "aggregator"),
        ("kill", "device-0"),
        ("mend", "device-1"),
        ("start", "aggregator"),
        ("start", "device-0"),
        ("start", "device-2"),
    ]
    at = {(event["action"], event["target"]): event["at"] for event in scenes}
    opened = {event["round"]: event["at"] for event in audit.events(live, "round_open")}
    came = {event["device"]: event["at"] for event in reversed(audit.events(live, "presence"))}
    assert at["start", "device-2"] < came["device-2"] <= opened[1] <= at["kill", "device-0"]
    assert opened[2] <= at["kill", "aggregator"]
    accepted = {(event["device"], event["round"]): event["at"] for event in audit.events(live, "update")}
    assert accepted["device-1", 1] >= at["mend", "device-1"]
    assert accepted["device-0", 1] >= at["start", "device-0"]
    # what was said to be done was done
    assert len(audit.events(live, "run")) == 2, "the aggregator was started twice"
    sessions = {name: live.folder.device(name).log.read_text().count(", session ") for name in NAMES[:3]}
    assert sessions == {"device-0": 2, "device-1": 1, "device-2": 1}
