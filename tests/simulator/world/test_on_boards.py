"""A simulation in a world ends in the fast engine's model, bit by bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config import secure_aggregation
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.simulator.boards import FleetMix, parse_mix
from hushfleet.simulator.engines.fast.engine import ALL_SPENT, run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world import on_boards
from hushfleet.simulator.world.on_boards import run_on_boards
from hushfleet.simulator.world.times import Costs

COSTS = Costs(batch_s=0.05, sample_s=0.0, release_s=0.01, start_s=0.1, load_s=0.01, accept_s=0.001, close_s=0.002)
MIX = FleetMix.in_turn(["jetson-orin-nano", "raspberry-pi-zero-2-w"], 4)


def made(
    short_task: Callable[..., Task],
    folder: Path,
    scenario: dict[str, Any] | None = None,
    *,
    method: dict[str, Any] | None = None,
    privacy: dict[str, Any] | None = None,
    **rules: Any,
) -> Simulation:
    sections = {"method": method, "privacy": privacy}
    plain = short_task(
        data={"devices": 4, "limit": 320},
        round={"rounds": 2, "min_updates": 4, **rules},
        **{name: section for name, section in sections.items() if section},
    ).to_plain()
    simulation = begin(parse_task(plain | {"scenario": scenario or {}}), folder / "run", data_dir=None, mix=MIX)
    simulation.folder.clock.write_text(json.dumps(vars(COSTS)))
    return simulation


def models(simulation: Simulation) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in simulation.folder.aggregator.glob("*.safetensors")}


SCENARIO = {
    "crash": [
        {"process": "aggregator", "at_round": 1, "for_s": 1.0},
        {"process": "broker", "at_round": 2, "for_s": 0.5},
    ],
    "drop_out": [{"devices": ["device-1"], "at_round": 2, "for_s": 2.0}],
    "outage": [{"devices": ["device-2"], "at_round": 1, "for_s": 1.5}, {"devices": 1, "at_s": 9e4, "for_s": 1}],
    "late": [{"devices": ["device-3"], "at_s": 1.0}],
}
BAD_MIX = parse_mix(
    """
    [[board]]
    profile = "jetson-orin-nano"
    share = 0.5
    network = { up_mbit_s = 4, down_mbit_s = 4, latency_ms = 50, jitter_ms = 90, stall_every_s = 0.5, stall_s = 0.4 }
    [[board]]
    profile = "raspberry-pi-zero-2-w"
    share = 0.5
    """,
    devices=4,
)


class Interrupted(BaseException):
    """As Ctrl-C is."""


class Breaking:
    """Workers that break after some jobs."""

    count = 1

    def __init__(self, jobs: int) -> None:
        self._left = jobs

    def map(self, function: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        self._left -= 1
        if self._left < 0:
            raise Interrupted
        return map(function, items)


@pytest.fixture(scope="module")
def expected(short_task: Callable[..., Task], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The fast engine's models."""
    fast = made(short_task, tmp_path_factory.mktemp("fast"))
    with Workers(1) as workers, EventLog(fast.folder.events) as events:
        run_rounds(fast, workers, events)
    return models(fast)


def test_a_run_in_rough_weather_ends_in_the_fast_engines_model(
    short_task: Callable[..., Task], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    rough = made(short_task, tmp_path, SCENARIO)
    with Workers(1) as workers:
        seconds = run_on_boards(rough, workers, mix=BAD_MIX)
    assert models(rough) == expected
    assert charged(rough) == [[1, 2]] * 4
    *played, unplayed = iterate_events(rough.folder.scenario)
    ends = {"aggregator": "kill", "broker": "kill", "device-1": "kill", "device-2": "cut"}
    starts = {name: "mend" if how == "cut" else "start" for name, how in {**ends, "device-3": "late"}.items()}
    told = Counter((event["action"], event["target"]) for event in played)
    assert told == Counter((how, name) for each in (ends, starts) for name, how in each.items())
    assert (unplayed["action"], unplayed["at_s"], unplayed["reason"]) == ("not-played", 9e4, "the run was over before")
    closed = [event["at"] for event in iterate_events(rough.folder.events) if event["event"] == "round_close"]
    assert closed[-1] - 0.01 <= seconds < closed[-1] + 1, "times in the log are rounded"


def test_an_interrupted_run_goes_on_to_the_same_model(
    short_task: Callable[..., Task], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    run = made(short_task, tmp_path, SCENARIO)
    for jobs in (2, 4):  # in the first round, and in the second
        with pytest.raises(Interrupted):
            run_on_boards(run, Breaking(jobs), mix=MIX)  # type: ignore[arg-type]
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    assert models(run) == expected
    assert charged(run) == [[1, 2]] * 4
    times = [event["at"] for event in iterate_events(run.folder.events)]
    assert times == sorted(times)
    told = [event["target"] for event in iterate_events(run.folder.scenario) if event.get("at_round") == 1]
    assert sorted(told) == ["aggregator", "device-2"], "not played when the run goes on in the second round"


def charged(simulation: Simulation) -> list[list[int]]:
    """The rounds in the ledger of each device."""
    found = []
    for device in simulation.fleet.devices:
        with DeviceStore(simulation.folder.device(device.name).store, device=device.name, inspect=True) as store:
            found.append([entry.round for entry in store.ledger.entries()])
    return found


def test_a_calm_run_has_the_books_of_the_field(short_task: Callable[..., Task], tmp_path: Path, audit: Any) -> None:
    run = made(short_task, tmp_path)
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    audit.check(run)
    events = list(iterate_events(run.folder.events))
    counts = Counter(event["event"] for event in events)
    assert [counts[kind] for kind in ("run", "round_open", "update", "round_close", "finished")] == [1, 2, 8, 2, 1]
    last = max((event for event in events if event["event"] == "update"), key=lambda event: event["at"])
    assert run.mix[int(last["device"][-1])].profile == "raspberry-pi-zero-2-w"


def test_links_declines_and_a_slow_board_are_events(short_task: Callable[..., Task], tmp_path: Path) -> None:
    scenario = {
        "outage": [{"devices": ["device-0"], "at_round": 1, "for_s": 2.0}],
        "crash": [{"process": "broker", "at_round": 2, "for_s": 1.0}],
        "out_of_memory": [{"devices": ["device-2"], "memory_mib": 10}],
    }
    run = made(short_task, tmp_path, scenario, min_updates=1)
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    actions = [(each["action"], each["target"]) for each in iterate_events(run.folder.scenario)]
    assert actions == [("cut", "device-0"), ("mend", "device-0"), ("kill", "broker"), ("start", "broker")]
    events = list(iterate_events(run.folder.events))
    assert [event["state"] for event in events if event["event"] == "link"] == ["down", "up"]
    declines = [(event["device"], event["code"]) for event in events if event["event"] == "decline"]
    assert declines == [("device-2", "memory")] * 2
    assert charged(run)[2] == []


def test_who_was_late_is_taken_again(short_task: Callable[..., Task], tmp_path: Path) -> None:
    """A board commits as its round closes; in the next one it sends its public state along, and is accepted."""
    run = made(short_task, tmp_path, min_updates=1, deadline_s=10.2, rounds=3)
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    with AggregatorStore(run.folder.aggregator) as store:
        taken = {round: sorted(each.device for each in store.updates(round)) for round in (1, 2, 3)}
    assert all({"device-0", "device-2"} <= set(devices) for devices in taken.values())
    for device, rounds in zip(run.fleet.devices, charged(run), strict=True):
        assert set(rounds) >= {round for round, devices in taken.items() if device.name in devices}


def test_buffered_rounds_take_updates_of_earlier_versions(
    short_task: Callable[..., Task], tmp_path: Path, audit: Any
) -> None:
    buffered = {"mode": "buffered", "buffer_size": 3, "max_staleness": 1, "min_updates": 1, "rounds": 5}
    run = made(short_task, tmp_path, method={"name": "dp-fedavg"}, privacy={"accounting": "strict"}, **buffered)
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    with AggregatorStore(run.folder.aggregator) as store:
        summed = [(row.round, each.round) for row in store.rounds() for each in store.updates(row.round)]
    assert len(summed) == 15
    assert {newest - round for newest, round in summed} == {0, 1}


@pytest.mark.parametrize("padded", [False, True])
def test_secure_aggregation_open_to_the_fast_engines_models(
    padded: bool, short_task: Callable[..., Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_aggregation, "is_slow", lambda size: padded)
    secure = {"method": {"name": "dp-fedavg"}, "privacy": {"accounting": "secure", "delta": 1e-5}}
    (tmp_path / "fast").mkdir()
    (tmp_path / "boards").mkdir()
    fast, run = made(short_task, tmp_path / "fast", **secure), made(short_task, tmp_path / "boards", **secure)
    with Workers(1) as workers:
        with EventLog(fast.folder.events) as events:
            run_rounds(fast, workers, events)
        run.folder.clock.write_text(json.dumps({**vars(COSTS), "pair_s": 0.5}))
        run_on_boards(run, workers, mix=MIX)
    secure_spec, size = run.prepared.spec.privacy.secure, run.prepared.spec.model.layout.size
    assert secure_spec is not None
    assert (secure_spec.length(size) > size) == padded
    assert models(run) == models(fast)
    at = {(each["event"], each["round"]): each["at"] for each in iterate_events(run.folder.events) if "round" in each}
    # a member works for each of four devices, on a quarter of the reference's speed or less
    assert all(at["answer", number] - at["unmask", number] > 4 * 0.5 / 0.25 for number in (1, 2))


def test_boards_for_another_fleet_are_refused(short_task: Callable[..., Task], tmp_path: Path) -> None:
    with Workers(1) as workers, pytest.raises(BadInput, match="boards for 3 devices, but 4"):
        run_on_boards(made(short_task, tmp_path), workers, mix=FleetMix.in_turn(["jetson-orin-nano"], 3))


def test_who_never_comes_is_not_waited_for_for_ever(
    short_task: Callable[..., Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_boards, "LONGEST_ROUND_S", 3600.0)
    away = {"drop_out": [{"devices": ["device-0"], "at_s": 0.05, "for_s": 86400.0}]}
    run = made(short_task, tmp_path, away)
    with Workers(1) as workers, pytest.raises(HushfleetError, match="round 1 never opens: 3 devices"):
        run_on_boards(run, workers, mix=MIX)


def test_a_run_ends_when_budgets_are_spent(short_task: Callable[..., Task], tmp_path: Path) -> None:
    run = made(short_task, tmp_path, privacy={"accounting": "strict", "noise_multiplier": 1.0}, rounds=5)
    privacy = run.prepared.spec.privacy
    limit = 1.01 * epsilon([Step(1.0, 1.0, 2)], delta=privacy.delta, accountant=privacy.accountant)
    devices = [replace(each, epsilon_limit=limit) for each in run.fleet.devices]
    run = replace(run, fleet=replace(run.fleet, devices=devices))
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    *_, last = iterate_events(run.folder.events)
    assert (last["event"], last["reason"]) == ("finished", ALL_SPENT)
    assert charged(run) == [[1, 2]] * 4
