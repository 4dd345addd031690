"""Training under the virtual clock: the fast engine's model if all is calm, the field's books if it is not.

What the work costs is written into the run folder beforehand, so that no test depends on this machine's speed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock.rounds import VirtualRounds, VirtualTime, fleet_clock, run_clocked_rounds
from hushfleet.simulator.engines.fast.device_file import store_of
from hushfleet.simulator.engines.fast.engine import open_engine, run_rounds, train_cohort
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin
from hushfleet.simulator.world.outcomes import ClockRound

ZERO, ORIN = "raspberry-pi-zero-2-w", "jetson-orin-nano"
COSTS = {
    "batch_s": 0.05, "sample_s": 0.0, "release_s": 0.01, "start_s": 0.1, "load_s": 0.01, "accept_s": 0.001,
    "close_s": 0.002,
}  # fmt: skip
SLOW_MIX = FleetMix.in_turn([ORIN, ORIN, ZERO, ORIN], 8)
SLOW = ("device-2", "device-6")

MakeSimulation = Callable[..., Simulation]


@pytest.fixture(scope="module")
def make(short_task: Callable[..., Task], tmp_path_factory: pytest.TempPathFactory) -> MakeSimulation:
    """A new simulation with known costs, of the short task with some sections changed."""

    def make(*, scenario: dict[str, Any] | None = None, **sections: Any) -> Simulation:
        eight = {"data": {"devices": 8, "limit": 640}, "round": {"min_updates": 8}}
        plain = short_task(
            **sections | {name: keys | sections.get(name, {}) for name, keys in eight.items()}
        ).to_plain()
        task = parse_task(plain | {"scenario": scenario or {}})
        simulation = begin(task, tmp_path_factory.mktemp("clocked") / "run", data_dir=None, mix=SLOW_MIX)
        simulation.folder.clock.write_text(json.dumps(COSTS))
        return simulation

    return make


def run(simulation: Simulation) -> float:
    """Runs it, or on from where it stopped; the virtual seconds."""
    time = VirtualTime()
    with Workers(1) as workers, EventLog(simulation.folder.events, clock=time) as events:
        run_clocked_rounds(simulation, workers, events, time, mix=SLOW_MIX)
    return time.now


def log(simulation: Simulation) -> list[dict[str, Any]]:
    return list(iterate_events(simulation.folder.events))


def models(simulation: Simulation) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in simulation.folder.aggregator.glob("*.safetensors")}


def charged(simulation: Simulation, device: str) -> list[int]:
    with store_of(simulation.folder.device(device), device) as store:
        return [entry.round for entry in store.ledger.entries()]


def test_a_calm_run_ends_in_the_fast_engines_model(make: MakeSimulation, audit: Any) -> None:
    clocked, fast = make(), make()
    seconds = run(clocked)
    with Workers(1) as workers, EventLog(fast.folder.events) as events:
        run_rounds(fast, workers, events)
    assert models(clocked) == models(fast)
    audit.check(clocked)
    events = log(clocked)
    closed = [event for event in events if event["event"] == "round_close"]
    assert [event["wall_s"] for event in closed] == [
        pytest.approx(outcome.wall_s) for outcome in fleet_clock(clocked, SLOW_MIX).rounds()
    ]
    assert events[-1] == {"at": pytest.approx(seconds, abs=1e-3), "event": "finished"}
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    counts = Counter(event["event"] for event in events)
    assert counts == {
        "run": 1, "presence": 8 + 3 * 8 * 2, "round_open": 3, "offer": 24, "update": 24, "round_close": 3, "finished": 1
    }  # fmt: skip
    slowest = max((event for event in events if event["event"] == "update"), key=lambda event: event["at"])
    assert slowest["device"] in SLOW


def test_only_who_commits_is_trained_and_charged(make: MakeSimulation) -> None:
    simulation = make(round={"rounds": 4, "quorum": 0.75, "min_updates": 1, "deadline_s": 300})
    for outcome in fleet_clock(simulation, SLOW_MIX).rounds():
        assert (outcome.late, outcome.given_up) == ((), SLOW), "they hear of the end before their last batch"
    quick_batches = {**COSTS, "batch_s": 0.001, "release_s": 0.05}
    simulation.folder.clock.write_text(json.dumps(quick_batches))
    outcomes = list(fleet_clock(simulation, SLOW_MIX).rounds())
    assert [set(outcome.late) | set(outcome.given_up) for outcome in outcomes] == [set(SLOW)] * 4
    assert any(outcome.late == SLOW for outcome in outcomes), "batches are soon over, and the rest takes longest"
    assert any(outcome.given_up == SLOW for outcome in outcomes), "in round 1 the task has to be fetched first"
    run(simulation)
    with AggregatorStore(simulation.folder.aggregator) as store:
        accepted = {outcome.round: sorted(u.device for u in store.updates(outcome.round)) for outcome in outcomes}
    for outcome in outcomes:
        assert accepted[outcome.round] == sorted(arrival.device for arrival in outcome.arrivals)
    for device in simulation.fleet.devices:
        committed = [
            outcome.round
            for outcome in outcomes
            if device.name in outcome.late or device.name in accepted[outcome.round]
        ]
        assert charged(simulation, device.name) == committed
    assert set(charged(simulation, SLOW[0])) - {r for r, names in accepted.items() if SLOW[0] in names}


def test_who_was_late_is_taken_again(make: MakeSimulation) -> None:
    """A device whose last update did not count holds another mask than the aggregator; it sends its own along."""
    simulation = make(round={"rounds": 3, "quorum": 1.0, "min_updates": 1, "deadline_s": 300})
    outcomes = list(fleet_clock(simulation, SLOW_MIX).rounds())
    first = outcomes[0]
    on_time = tuple(arrival for arrival in first.arrivals if arrival.device not in SLOW)
    play(simulation, [replace(first, arrivals=on_time, late=SLOW), *outcomes[1:]])
    updates = [event for event in log(simulation) if event["event"] == "update" and event["round"] == 2]
    assert {event["device"]: event["code"] for event in updates} == {
        device.name: "accepted" for device in simulation.fleet.devices
    }
    assert charged(simulation, SLOW[0]) == [1, 2, 3]
    sizes = {event["device"]: event["bytes"] for event in updates}
    assert min(sizes[name] for name in SLOW) > max(size for name, size in sizes.items() if name not in SLOW)


def play(simulation: Simulation, outcomes: list[ClockRound], *, stop_in: int = 0) -> None:
    """Leads the engine through these outcomes; stopped after a few updates of round `stop_in`."""
    time = VirtualTime()
    with (
        Workers(1) as workers,
        EventLog(simulation.folder.events, clock=time) as events,
        EventLog(simulation.folder.scenario, clock=time) as scenario,
        AggregatorStore(simulation.folder.aggregator, durable=False) as store,
    ):
        engine = open_engine(simulation, store, clock=time, monotonic=time)
        rounds = VirtualRounds(simulation, engine, time, events=events, scenario=scenario, group=3)
        rounds.begin()

        def train(plan: Any, devices: Any) -> Any:
            if plan.round == stop_in and engine.accepted >= 3:
                raise KeyboardInterrupt
            return train_cohort(simulation, workers, plan, devices)

        for outcome in outcomes:
            rounds.play(outcome, train)
        rounds.end()


@pytest.mark.parametrize("stop_in", [1, 2])
def test_an_interrupted_run_goes_on_to_the_same_end_and_the_same_log(
    make: MakeSimulation, stop_in: int, tmp_path: Path
) -> None:
    scenario = {"drop_out": [{"devices": ["device-1"], "at_round": 2, "for_s": 1.0}]}
    sections = {"round": {"rounds": 3, "min_updates": 1, "deadline_s": 300}}
    calm, broken = make(scenario=scenario, **sections), make(scenario=scenario, **sections)
    run(calm)
    with pytest.raises(KeyboardInterrupt):
        play(broken, list(fleet_clock(broken, SLOW_MIX).rounds()), stop_in=stop_in)
    cut = len(log(broken))
    assert 0 < cut < len(log(calm))
    run(broken)
    assert models(broken) == models(calm)
    assert log(broken) == log(calm)
    assert broken.folder.scenario.read_bytes() == calm.folder.scenario.read_bytes()


def test_a_scenario_is_logged_and_its_effects_are_events(make: MakeSimulation) -> None:
    scenario = {
        "drop_out": [{"devices": ["device-1"], "at_round": 2, "for_s": 3.0}],
        "outage": [{"devices": ["device-3"], "at_round": 1, "for_s": 2.0}],
        "crash": [{"process": "broker", "at_round": 3, "for_s": 1.0}],
        "out_of_memory": [{"devices": ["device-5"], "memory_mib": 10}],
    }
    simulation = make(scenario=scenario, round={"rounds": 3, "min_updates": 1, "deadline_s": 300})
    run(simulation)
    actions = [(each["action"], each["target"]) for each in iterate_events(simulation.folder.scenario)]
    assert actions == [
        ("cut", "device-3"), ("mend", "device-3"), ("kill", "device-1"), ("start", "device-1"), ("kill", "broker"),
        ("start", "broker"),
    ]  # fmt: skip
    events = log(simulation)
    assert [event["state"] for event in events if event["event"] == "link"] == ["down", "up"]
    declines = [(event["device"], event["code"]) for event in events if event["event"] == "decline"]
    assert declines == [("device-5", "memory")] * 3
    assert not simulation.folder.device("device-5").has_store, "it was never trained"
    gone = [event for event in events if event.get("device") == "device-1" and event["event"] == "presence"]
    lost_at, back_at = (
        next(e["at"] for e in gone if e["state"] == state and e["at"] >= at)
        for state, at in (("lost", 0.0), ("ready", next(e["at"] for e in gone if e["state"] == "lost")))
    )
    assert back_at - lost_at == pytest.approx(3.0, abs=1.0)


BUFFERED: dict[str, Any] = {
    "method": {"name": "dp-fedavg"},
    "privacy": {"accounting": "strict"},
    "round": {"mode": "buffered", "buffer_size": 3, "max_staleness": 1, "min_updates": 1, "rounds": 5},
}


def test_buffered_rounds_train_on_the_version_that_each_device_began_with(
    make: MakeSimulation, audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []
    monkeypatch.setattr(
        "hushfleet.simulator.engines.clock.rounds.close_engine",
        lambda simulation: left.extend(simulation.folder.updates.iterdir()),
    )
    simulation = make(scenario={"day": [{"devices": "all", "period_s": 40.0, "share": 0.6}]}, **BUFFERED)
    outcomes = list(fleet_clock(simulation, SLOW_MIX).rounds())
    made = [(arrival.device, arrival.round) for outcome in outcomes for arrival in outcome.arrivals]
    staleness = {outcome.round - arrival.round for outcome in outcomes for arrival in outcome.arrivals}
    assert staleness == {0, 1}
    run(simulation)
    assert left == [], "no update's values stay"
    with AggregatorStore(simulation.folder.aggregator) as store:
        summed = {row.round: {(each.device, each.round) for each in store.updates(row.round)} for row in store.rounds()}
    assert summed == {
        outcome.round: {(arrival.device, arrival.round) for arrival in outcome.arrivals} for outcome in outcomes
    }
    spent = made + [each for outcome in outcomes for each in outcome.stale]
    assert len(spent) > len(made), "some updates were too stale for any buffer, and are charged all the same"
    for device in simulation.fleet.devices:
        trained = sorted(round for name, round in spent if name == device.name)
        assert [entry.round for entry in audit.ledger(simulation, device.name)] == trained


def test_interrupted_buffered_rounds_go_on_to_the_same_end(
    make: MakeSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, broken = make(**BUFFERED), make(**BUFFERED)
    run(calm)
    heard, hear = [], VirtualRounds._hear

    def cut(self: VirtualRounds, *answer: Any) -> Any:
        heard.append(answer)
        if len(heard) in (5, 9):
            raise KeyboardInterrupt
        return hear(self, *answer)

    monkeypatch.setattr(VirtualRounds, "_hear", cut)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(broken)
    run(broken)
    assert models(broken) == models(calm)
    assert log(broken) == log(calm)


def test_the_fast_engine_has_no_time_for_buffered_rounds(make: MakeSimulation) -> None:
    simulation = make(**BUFFERED)
    with Workers(1) as workers, EventLog(simulation.folder.events) as events, pytest.raises(BadInput, match="--boards"):
        run_rounds(simulation, workers, events)


def test_another_fleet_than_the_folders_is_noticed(make: MakeSimulation) -> None:
    simulation = make(round={"rounds": 3, "min_updates": 1})
    outcomes = list(fleet_clock(simulation, SLOW_MIX).rounds())
    with pytest.raises(HushfleetError, match="belongs to another fleet or another task"):
        play(simulation, outcomes[1:])
    with pytest.raises(HushfleetError, match="boards for 3 devices, but 8"):
        fleet_clock(simulation, FleetMix.in_turn([ORIN], 3))
    assert RunFolder(simulation.folder.path).clock.exists()
