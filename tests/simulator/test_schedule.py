"""A scenario laid out in time: drawn by the seed, and played so that a target is up while nothing keeps it down.

The oracle asks at every moment which of the scenario's entries cover it; the playback only ever goes forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hushfleet
from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.errors import BadInput
from hushfleet.schema import from_plain
from hushfleet.simulator.schedule import Action, Outage, Playback, Schedule, make_schedule, schedule_of

NAMES = [f"device-{number}" for number in range(4)]
ALL = [*NAMES, "aggregator", "broker"]
END_S = 40.0
STEP_S = 0.25


def make(scenario: dict[str, Any], *, devices: list[str] = NAMES, seed: int = 1) -> Schedule:
    return make_schedule(from_plain(ScenarioSection, scenario), devices, seed=seed)


def ticks() -> Iterator[float]:
    for number in range(int(END_S / STEP_S) + 1):
        yield number * STEP_S


def play(schedule: Schedule, openings: dict[int, float], *, first_round: int = 1) -> Iterator[tuple[float, Any]]:
    """The playback and what it gives at every tick; `openings` is when which round opens."""
    playback = Playback(schedule, first_round=first_round)
    for now_s in ticks():
        for round, at_s in openings.items():
            if at_s == now_s:
                playback.round_opened(round, now_s)
        yield now_s, (playback, playback.due(now_s))


def actions_of(schedule: Schedule, openings: dict[int, float] | None = None, *, first_round: int = 1) -> list[Action]:
    played = play(schedule, openings or {}, first_round=first_round)
    return [action for _, (_, actions) in played for action in actions]


# by hand


def test_overlapping_windows_act_as_the_one_that_they_cover() -> None:
    schedule = make(
        {
            "drop_out": [
                {"devices": ["device-1"], "at_s": 5, "for_s": 4},
                {"devices": ["device-1"], "at_s": 7, "for_s": 1},  # within the first
                {"devices": ["device-1"], "at_s": 9, "for_s": 1},  # begins when the first ends
                {"devices": ["device-1"], "at_s": 12, "for_s": 2},
            ]
        }
    )
    assert actions_of(schedule) == [
        (5.0, "kill", "device-1"),
        (10.0, "start", "device-1"),
        (12.0, "kill", "device-1"),
        (14.0, "start", "device-1"),
    ]


def test_windows_of_a_round_count_from_its_opening_and_overlap_with_the_others() -> None:
    schedule = make(
        {
            "late": [{"devices": ["device-0"], "at_round": 2}, {"devices": ["device-3"], "at_s": 3}],
            "drop_out": [{"devices": ["device-0"], "at_s": 1, "for_s": 9}],
            "crash": [{"process": "broker", "at_round": 2, "for_s": 0.5}, {"process": "broker", "at_s": 8, "for_s": 1}],
            "outage": [{"devices": "all", "at_round": 3, "for_s": 2}],
        }
    )
    assert Playback(schedule).absent == {"device-0", "device-3"}
    assert actions_of(schedule, {1: 2.0, 2: 7.75, 3: 20.0}) == [
        (3.0, "start", "device-3"),
        # while device-0, late until 7.75, is not back from its drop-out
        (7.75, "kill", "broker"),
        (9.0, "start", "broker"),
        (10.0, "start", "device-0"),
        *[(20.0, "cut", name) for name in NAMES],
        *[(22.0, "mend", name) for name in NAMES],
    ]


def test_two_reasons_to_be_late_are_over_with_the_second() -> None:
    entry = {"devices": ["device-2"], "at_s": 6}
    for late in ([entry, entry], [entry, {**entry, "at_s": 2}], [entry, {"devices": "all", "at_round": 1}]):
        schedule = make({"late": late})
        assert (6.0, "start", "device-2") in actions_of(schedule, {1: 1.0})
        assert [action.target for action in actions_of(schedule, {1: 1.0})].count("device-2") == 1


def test_a_day_comes_again_and_again() -> None:
    (night,) = make({"day": [{"devices": ["device-1"], "period_s": 10, "share": 0.25}]}).windows
    assert (night.target, night.how, night.every_s) == ("device-1", "stop", 10.0)
    assert night.begins_s is not None
    assert night.ends_s - night.begins_s == pytest.approx(7.5)
    assert 0.0 < night.ends_s <= 10.0
    nights = (
        Outage("device-1", "stop", 0, 1.5, 9.0, every_s=10.0),
        Outage("device-2", "stop", 0, -1.5, 6.0, every_s=10.0),
    )
    schedule = Schedule(nights, {}, {})
    assert Playback(schedule).absent == {"device-2"}
    assert actions_of(schedule)[:6] == [
        (1.5, "stop", "device-1"),
        (6.0, "start", "device-2"),
        (8.5, "stop", "device-2"),
        (9.0, "start", "device-1"),
        (11.5, "stop", "device-1"),
        (16.0, "start", "device-2"),
    ]
    playback = Playback(schedule)
    assert playback.due(86400.0)[-1] == (86399.0, "start", "device-1")
    assert playback.next_s == 86401.5


def test_what_a_schedule_knows_of_disks_and_memories() -> None:
    schedule = make(
        {
            "slow_disk": [{"devices": "all", "write_mb_s": 2}, {"devices": ["device-1"], "write_mb_s": 0.5}],
            "out_of_memory": [{"devices": ["device-2"], "memory_mib": 40}, {"devices": ["device-2"], "memory_mib": 90}],
        }
    )
    assert schedule.write_mb_s == {"device-0": 2, "device-1": 0.5, "device-2": 2, "device-3": 2}
    assert schedule.memory_mib == {"device-2": 40}
    assert not schedule.is_calm
    assert make({}).is_calm
    assert Playback(make({})).next_s == math.inf


def test_a_round_is_opened_once() -> None:
    playback = Playback(make({"drop_out": [{"devices": ["device-1"], "at_round": 2, "for_s": 1}]}))
    playback.round_opened(1, 1.0)
    assert playback.next_s == math.inf
    playback.round_opened(2, 4.0)
    assert playback.next_s == 4.0
    assert playback.due(4.0) == [(4.0, "kill", "device-1")]
    playback.round_opened(2, 4.5)  # said again
    assert playback.due(6.0) == [(5.0, "start", "device-1")]
    playback.round_opened(2, 7.0)
    assert playback.due(60.0) == []


def test_a_resumed_run_leaves_out_what_belongs_to_rounds_that_are_over() -> None:
    schedule = make(
        {
            "late": [{"devices": ["device-0"], "at_round": 2}, {"devices": ["device-1"], "at_round": 5}],
            "crash": [{"process": "broker", "at_round": 2, "for_s": 1}, {"process": "broker", "at_s": 30, "for_s": 1}],
            "drop_out": [{"devices": ["device-3"], "at_round": 3, "for_s": 1}],
        }
    )
    resumed = Playback(schedule, first_round=3)
    assert resumed.absent == {"device-1"}
    assert [(window.target, window.at_round) for window in resumed.left_out] == [("device-0", 2), ("broker", 2)]
    assert actions_of(schedule, {3: 1.0, 4: 2.0, 5: 3.0}, first_round=3) == [
        (1.0, "kill", "device-3"),
        (2.0, "start", "device-3"),
        (3.0, "start", "device-1"),
        (30.0, "kill", "broker"),
        (31.0, "start", "broker"),
    ]


def test_what_did_not_happen_is_known() -> None:
    schedule = make(
        {
            "late": [{"devices": ["device-0"], "at_s": 20}, {"devices": ["device-1"], "at_s": 2}],
            "crash": [
                {"process": "broker", "at_round": 2, "for_s": 1},
                {"process": "aggregator", "at_s": 1, "for_s": 9},
            ],
        }
    )
    playback = Playback(schedule)
    assert len(playback.unplayed) == 4
    playback.due(5.0)
    assert sorted(window.target for window in playback.unplayed) == ["broker", "device-0"]
    playback.round_opened(2, 6.0)
    playback.due(20.0)
    assert playback.unplayed == ()


# any scenario, against the oracle

times = st.integers(0, 60).map(lambda number: number / 4)
lengths = st.integers(1, 40).map(lambda number: number / 4)
moments = st.one_of(
    times.map(lambda at_s: {"at_s": at_s}), st.integers(1, 5).map(lambda at_round: {"at_round": at_round})
)
who = st.one_of(
    st.just("all"),
    st.integers(1, len(NAMES)),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
)


def entries(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    entry = st.tuples(moments, st.fixed_dictionaries(fields)).map(lambda pair: {**pair[0], **pair[1]})
    return st.lists(entry, max_size=3)


scenarios = st.fixed_dictionaries(
    {
        "late": entries(devices=who),
        "drop_out": entries(devices=who, for_s=lengths),
        "outage": entries(devices=who, for_s=lengths),
        "crash": entries(process=st.sampled_from(["aggregator", "broker"]), for_s=lengths),
        "day": st.lists(
            st.fixed_dictionaries(
                {"devices": who, "period_s": st.integers(1, 15), "share": st.floats(0.05, 0.95, allow_nan=False)}
            ),
            max_size=2,
        ),
    }
)
# when rounds 1, 2, ... open; the last ones may never
all_openings = st.lists(times, max_size=5).map(lambda found: dict(enumerate(sorted(found), 1)))


def oracle(schedule: Schedule, openings: dict[int, float], target: str, now_s: float, *, cut: bool) -> bool:
    """Whether any reason covers this moment."""
    for window in schedule.windows:
        if window.target != target or (window.how == "cut") != cut:
            continue
        anchor_s = openings.get(window.at_round, math.inf) if window.at_round else 0.0
        begins_s = 0.0 if window.begins_s is None else anchor_s + window.begins_s
        cycles = range(int(END_S / window.every_s) + 2 if window.every_s else 1)
        if any(
            begins_s + cycle * window.every_s <= now_s < anchor_s + window.ends_s + cycle * window.every_s
            for cycle in cycles
        ):
            return True
    return False


@settings(max_examples=300)
@given(scenarios, all_openings, st.integers(0, 5))
@example({"late": [{"devices": "all", "at_s": 2.0}], "drop_out": [{"devices": 4, "at_s": 1.0, "for_s": 1.0}]}, {}, 0)
def test_a_target_is_down_exactly_while_something_keeps_it_down(
    scenario: dict[str, Any], openings: dict[int, float], seed: int
) -> None:
    schedule = make(scenario, seed=seed)
    up = dict.fromkeys(ALL, True)
    up |= dict.fromkeys(Playback(schedule).absent, False)
    linked = dict.fromkeys(ALL, True)
    before_s = -1.0
    for now_s, (_, actions) in play(schedule, openings):
        assert [action.at_s for action in actions] == sorted(action.at_s for action in actions)
        for at_s, kind, target in actions:
            assert before_s < at_s <= now_s
            state, after = (linked, kind == "mend") if kind in ("cut", "mend") else (up, kind == "start")
            assert state[target] is not after, f"{kind} of {target} at {at_s} changes nothing"
            state[target] = after
        for target in ALL:
            down, cut = (oracle(schedule, openings, target, now_s, cut=cut) for cut in (False, True))
            assert (down, cut) == (not up[target], not linked[target]), (target, now_s)
        before_s = now_s


@settings(max_examples=300)
@given(scenarios, all_openings, st.integers(0, 5))
def test_jumping_from_one_action_to_the_next_gives_the_same_actions(
    scenario: dict[str, Any], openings: dict[int, float], seed: int
) -> None:
    schedule = make(scenario, seed=seed)
    playback = Playback(schedule)
    actions: list[Action] = []
    left = sorted((at_s, round) for round, at_s in openings.items())
    while True:
        now_s = min(playback.next_s, left[0][0] if left else math.inf)
        if now_s > END_S:
            break
        while left and left[0][0] == now_s:
            playback.round_opened(left.pop(0)[1], now_s)
        actions += playback.due(now_s)
        assert playback.next_s > now_s
    assert actions == actions_of(schedule, openings)


# what is drawn


def nights_of(schedule: Schedule) -> list[Outage]:
    return [window for window in schedule.windows if window.every_s]


def test_the_seed_draws_who_and_nothing_else_does() -> None:
    fleet = [f"device-{number:02}" for number in range(40)]
    scenario = {
        "late": [{"devices": 5, "at_s": 1}, {"devices": 5, "at_s": 1}],
        "outage": [{"devices": 5, "at_s": 1, "for_s": 1}],
        "day": [{"devices": 5, "period_s": 60, "share": 0.5}],
        "slow_disk": [{"devices": 5, "write_mb_s": 1}],
    }
    drawn = make(scenario, devices=fleet, seed=3)
    assert drawn == make(scenario, devices=fleet, seed=3)
    assert drawn != make(scenario, devices=fleet, seed=4)
    assert len([window for window in drawn.windows if not window.every_s]) == 15
    assert len({night.ends_s for night in nights_of(drawn)}) == 5
    cut = {window.target for window in drawn.windows if window.how == "cut"}
    late = {window.target for window in drawn.windows if window.how == "stop" and not window.every_s}
    choices = [cut, late, {night.target for night in nights_of(drawn)}, set(drawn.write_mb_s)]
    assert [len(chosen) for chosen in choices if chosen is not late] == [5, 5, 5]
    assert 5 < len(late) <= 10, "two entries of a kind draw for themselves"
    assert len({frozenset(chosen) for chosen in choices}) == 4
    fewer = make({**scenario, "late": scenario["late"][:1], "slow_disk": []}, devices=fleet, seed=3)
    assert nights_of(fewer) == nights_of(drawn)
    assert {window.target for window in fewer.windows if window.how == "cut"} == cut


def test_every_device_is_drawn_by_some_seed_and_phases_fill_the_day() -> None:
    schedules = [make({"day": [{"devices": 1, "period_s": 8, "share": 0.5}]}, seed=seed) for seed in range(60)]
    nights = [night for schedule in schedules for night in nights_of(schedule)]
    assert {night.target for night in nights} == set(NAMES)
    assert {int(8 - night.ends_s) for night in nights} == set(range(8))


def test_the_schedule_does_not_depend_on_the_order_of_names_in_the_file() -> None:
    def late(names: list[str]) -> Schedule:
        return make({"late": [{"devices": names, "at_s": 1}]})

    assert late(["device-2", "device-0"]) == late(["device-0", "device-2"])


# what a fleet does not have


@pytest.mark.parametrize(
    ("kind", "devices", "said"),
    [
        (
            "late",
            ["device-1", "device-11"],
            r"scenario.late\[0\].devices: .*no device 'device-11'; did you mean .*device-1",
        ),
        ("outage", ["devcie-2"], r"scenario.outage\[0\].devices: there is no device 'devcie-2'; did you mean device-2"),
        ("drop_out", ["pump"], r"scenario.drop_out\[0\].devices: .*'pump'; they are device-0 to device-3"),
        ("drop_out", 5, r"scenario.drop_out\[0\].devices = 5: the fleet has 4 devices"),
    ],
)
def test_unknown_devices_are_named(kind: str, devices: Any, said: str) -> None:
    entry = {"devices": devices, "at_s": 1} | ({} if kind == "late" else {"for_s": 1})
    with pytest.raises(BadInput, match=said):
        make({kind: [entry]})


def whole(scenario: dict[str, Any], **round: Any) -> Task:
    return parse_task(
        {
            "name": "try",
            "model": {"name": "digits-cnn"},
            "method": {"name": "fedavg"},
            "data": {"name": "digits", "devices": 4},
            "round": {"rounds": 5, **round},
            "scenario": scenario,
        }
    )


@pytest.mark.parametrize("kind", ["late", "drop_out", "crash", "outage"])
def test_a_round_that_the_run_does_not_have_is_refused(kind: str) -> None:
    entry: dict[str, Any] = {"process": "broker"} if kind == "crash" else {"devices": 1}
    entry |= {} if kind == "late" else {"for_s": 1}

    def task(at_round: int) -> Task:
        return whole({kind: [{**entry, "at_s": 1}, {**entry, "at_round": at_round}]}, min_devices=1)

    with pytest.raises(BadInput, match=rf"scenario.{kind}\[1\].at_round = 6: the run has 5 rounds"):
        schedule_of(task(6), NAMES)
    assert len(schedule_of(task(5), NAMES).windows) == 2


def test_a_run_that_could_never_begin_is_refused() -> None:
    def late(when: dict[str, Any]) -> dict[str, Any]:
        return {"late": [{"devices": 2, **when}]}

    with pytest.raises(BadInput, match=r"2 of 4 devices wait .* round 1 opens with 4 .*round.min_devices = 2"):
        schedule_of(whole(late({"at_round": 2})), NAMES)
    with pytest.raises(BadInput, match="round 1 opens with 3 devices"):
        schedule_of(whole(late({"at_round": 2}), cohort_size=3), NAMES)
    drawn = whole(late({"at_round": 2}), cohort_size=2)
    section = replace(drawn.privacy, accounting="secure", epsilon=2.0, noise_multiplier=None)
    drawn = replace(drawn, privacy=section, method=replace(drawn.method, name="dp-fedavg"))
    with pytest.raises(BadInput, match="round 1 opens with 4 devices"):  # of whom two are drawn
        schedule_of(drawn, NAMES)
    whole_sum = replace(drawn, round=replace(drawn.round, cohort_size=0, min_devices=2, min_updates=3))
    with pytest.raises(BadInput, match="wait for round 1 to close, and it closes with 3 updates only"):
        schedule_of(whole_sum, NAMES)
    for task in (
        whole(late({"at_s": 5})),
        whole(late({"at_round": 2}), min_devices=2, cohort_size=4),
        whole(late({"at_round": 2}), cohort_size=2),
    ):
        assert schedule_of(task, NAMES) == make_schedule(task.scenario, NAMES, seed=task.seed)


def test_the_example_shows_every_kind_of_event_and_its_rounds_can_open() -> None:
    task = load_task(Path(hushfleet.__file__).parent.parent / "tasks" / "digits-rough-weather.toml")
    assert all(vars(task.scenario).values())
    fleet = [f"device-{number}" for number in range(task.data.devices)]
    schedule = schedule_of(task, fleet)
    starved = set(schedule.memory_mib)
    assert starved
    # what else happens, happens to devices that could take part
    assert starved.isdisjoint({window.target for window in schedule.windows} | set(schedule.write_mb_s))
    grace_s = task.round.deadline_s / 4
    lengths = [drop_out.for_s for drop_out in task.scenario.drop_out]
    assert min(lengths) < grace_s < max(lengths), "one on either side of the grace, as its comments say"
    most_down = max(
        len({window.target for window in schedule.windows if window.how == "kill" and window.at_round == round})
        for round in range(1, task.round.rounds + 1)
    )
    assert len(fleet) - most_down - len(nights_of(schedule)) >= task.round.min_devices
