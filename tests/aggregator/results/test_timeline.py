"""Events to timeline: cases by hand, the log of a made-up fleet against slow obvious code, and hostile logs."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.fleet_state import RunState
from hushfleet.aggregator.results.fleet_timeline import ACTIVITIES, OUTCOMES, FleetTimeline
from hushfleet.aggregator.results.result import Result
from hushfleet.aggregator.results.timeline import make_timeline, read_timeline
from support.report_samples import sample
from support.timeline_samples import fleet_log

HERE = Path(__file__)
Event = dict[str, Any]


def run(at: float) -> Event:
    return {"at": at, "event": "run"}


def is_(at: float, device: str, state: str) -> Event:
    return {"at": at, "event": "presence", "device": device, "state": state, "board": "b"}


def opens(at: float, number: int, *cohort: str) -> Event:
    return {"at": at, "event": "round_open", "round": number, "cohort": list(cohort)}


def says(at: float, event: str, number: int, device: str, code: str = "accepted") -> Event:
    return {"at": at, "event": event, "round": number, "device": device, "code": code}


def closes(at: float, number: int) -> Event:
    return {"at": at, "event": "round_close", "round": number}


def timeline_of(*events: Event, **more: Any) -> FleetTimeline:
    timeline = make_timeline(events, **more)
    assert timeline is not None
    return timeline


def spans_of(timeline: FleetTimeline, device: str) -> list[tuple[float, float, str]]:
    return timeline.spans[timeline.devices.index(device)]


def test_a_round_of_two_devices() -> None:
    timeline = timeline_of(
        run(100.0),
        is_(101.0, "a", "ready"),
        is_(102.0, "b", "ready"),
        opens(103.0, 1, "a", "b"),
        is_(104.0, "a", "training"),
        is_(105.5, "b", "training"),
        is_(106.0, "a", "ready"),
        says(106.1, "offer", 1, "a"),
        says(107.0, "update", 1, "a"),
        is_(108.0, "b", "ready"),
        says(109.0, "update", 1, "b"),
        closes(109.5, 1),
        {"at": 110.0, "event": "finished"},
        is_(111.0, "a", "sleeping"),
    )
    assert timeline.timed
    assert (timeline.devices, timeline.end_s) == (["a", "b"], 10.0)
    assert spans_of(timeline, "a") == [
        (0.0, 1.0, "absent"), (1.0, 3.0, "ready"), (3.0, 4.0, "fetching"), (4.0, 6.0, "training"),
        (6.0, 7.0, "sending"), (7.0, 10.0, "accepted"),
    ]  # fmt: skip
    assert spans_of(timeline, "b") == [
        (0.0, 2.0, "absent"), (2.0, 3.0, "ready"), (3.0, 5.5, "fetching"), (5.5, 8.0, "training"),
        (8.0, 9.0, "sending"), (9.0, 10.0, "accepted"),
    ]  # fmt: skip
    assert timeline.outcomes == ["a", "a"]
    assert timeline.seconds[0] == {"fetching": 1.0, "training": 2.0, "sending": 1.0, "accepted": 3.0}
    (row,) = timeline.rounds
    assert (row.round, row.opened_s, row.closed_s) == (1, 3.0, 9.5)
    assert (row.median_s, row.slowest_tenth_s) == (5.0, 6.0)
    assert row.device_seconds == {"fetching": 3.5, "training": 4.5, "sending": 2.0, "accepted": 4.0}


def test_every_outcome_of_a_round() -> None:
    names = ("accepted", "late", "declined", "refused", "lost", "trained", "full")
    timeline = timeline_of(
        run(0.0),
        *(is_(1.0, name, "ready") for name in (*names, "unasked", "asleep")),
        is_(1.5, "asleep", "sleeping"),
        opens(2.0, 1, *names),
        *(is_(3.0, name, "training") for name in ("late", "lost", "trained")),
        says(3.5, "decline", 1, "declined", "busy"),
        says(3.6, "update", 1, "refused", "malformed"),
        says(3.7, "update", 1, "full", "store-full"),
        says(4.0, "update", 1, "accepted"),
        is_(4.5, "lost", "lost"),
        is_(4.6, "trained", "ready"),
        closes(5.0, 1),
        is_(5.5, "late", "ready"),
        is_(5.6, "lost", "ready"),
        opens(6.0, 2, "unasked"),
        closes(7.0, 2),
    )
    letters = dict(zip(timeline.devices, timeline.outcomes, strict=True))
    assert letters == {
        "accepted": "a.", "late": "l.", "declined": "d.", "refused": "r.", "lost": "x.", "trained": "l.", "full": "l.",
        "unasked": ".l", "asleep": "--",
    }  # fmt: skip
    assert spans_of(timeline, "late")[2:] == [
        (2.0, 3.0, "fetching"), (3.0, 5.0, "training"), (5.0, 6.0, "late"), (6.0, 7.0, "ready"),
    ]  # fmt: skip
    assert spans_of(timeline, "lost")[3:] == [(3.0, 4.5, "training"), (4.5, 5.6, "lost"), (5.6, 7.0, "ready")]
    assert spans_of(timeline, "declined")[2:4] == [(2.0, 3.5, "fetching"), (3.5, 6.0, "declined")]
    # accepted after 2 s; three late ones count with the round's 3 s, whoever was lost or said no does not
    assert (timeline.rounds[0].median_s, timeline.rounds[0].slowest_tenth_s) == (3.0, 3.0)


def test_nobody_is_late_for_a_buffered_round() -> None:
    timeline = timeline_of(
        run(0.0),
        *(is_(0.5, name, "ready") for name in ("quick", "slow", "gone")),
        {"at": 1.0, "event": "round_open", "round": 1, "cohort_size": 3, "buffer_size": 1},
        *(is_(2.0, name, "training") for name in ("quick", "slow", "gone")),
        is_(2.5, "gone", "lost"),
        says(3.0, "update", 1, "quick"),
        closes(3.0, 1),
        {"at": 4.0, "event": "round_open", "round": 2, "cohort_size": 3, "buffer_size": 1},
        says(6.0, "update", 2, "slow"),  # of version 1
        closes(6.0, 2),
    )
    assert dict(zip(timeline.devices, timeline.outcomes, strict=True)) == {"quick": "a.", "slow": ".a", "gone": "--"}
    assert [(row.median_s, row.slowest_tenth_s) for row in timeline.rounds] == [(2.0, 2.0), (2.0, 2.0)]
    assert spans_of(timeline, "slow")[-1] == (2.0, 6.0, "training")


def test_progress_in_a_buffered_round_is_the_share_of_its_buffer() -> None:
    state = RunState()
    for event in (
        *(is_(0.5, name, "ready") for name in ("a", "b", "c")),
        {"at": 1.0, "event": "round_open", "round": 1, "cohort_size": 3, "buffer_size": 2},
        says(3.0, "update", 1, "a"),
    ):
        state.apply(event)
    assert state.progress == 0.5


def test_a_power_cut_in_training_begins_anew_and_one_in_sending_does_not() -> None:
    timeline = timeline_of(
        run(0.0),
        is_(0.0, "early", "ready"),
        is_(0.0, "later", "ready"),
        opens(1.0, 1, "early", "later"),
        *(is_(2.0, name, "training") for name in ("early", "later")),
        is_(3.0, "early", "lost"),
        is_(3.0, "later", "ready"),
        says(3.5, "offer", 1, "later"),
        is_(4.0, "later", "lost"),
        *(is_(5.0, name, "ready") for name in ("early", "later")),
        closes(6.0, 1),
    )
    assert [state for *_, state in spans_of(timeline, "early")] == [
        "ready", "fetching", "training", "lost", "fetching",
    ]  # fmt: skip
    assert [state for *_, state in spans_of(timeline, "later")] == [
        "ready", "fetching", "training", "sending", "lost", "sending",
    ]  # fmt: skip


def test_an_aggregator_that_was_killed_goes_on_with_the_round_and_the_store_knows_better_than_its_log() -> None:
    timeline = timeline_of(
        run(0.0),
        *(is_(1.0, name, "ready") for name in "abc"),
        opens(2.0, 1, *"abc"),
        is_(3.0, "b", "training"),
        says(4.0, "update", 1, "a"),
        run(9.0),
        opens(9.0, 1, *"abc"),  # the fast engine writes it again
        *(is_(9.5, name, "ready") for name in "abc"),
        says(9.6, "offer", 1, "a"),  # and a device that has not heard its answer offers again
        closes(10.0, 1),
        accepted={1: {"a", "b"}},
        declined={1: ["c"]},
    )
    assert timeline.outcomes == ["a", "a", "d"]
    assert [row.opened_s for row in timeline.rounds] == [2.0]
    assert spans_of(timeline, "a")[-1] == (4.0, 10.0, "accepted")
    assert [(mark.start_s, mark.what, mark.target) for mark in timeline.marks] == [(9.0, "start", "aggregator")]


def test_a_closing_that_was_never_logged_is_the_next_opening() -> None:
    timeline = timeline_of(
        run(0.0), opens(1.0, 1, "a"), says(2.0, "update", 1, "a"), opens(3.0, 2, "a"), closes(4.0, 2)
    )
    assert [(row.opened_s, row.closed_s) for row in timeline.rounds] == [(1.0, 3.0), (3.0, 4.0)]
    assert timeline.outcomes == ["al"]


def test_a_night_between_two_starts_is_left_out() -> None:
    events = [run(0.0), is_(1.0, "a", "ready"), opens(2.0, 1, "a"), says(3.0, "update", 1, "a"), closes(4.0, 1)]
    night = 9 * 3600.0
    events += [run(night), is_(night + 1, "a", "ready"), opens(night + 2, 2, "a"), closes(night + 3, 2)]
    timeline = timeline_of(*events, scenario=[{"at": night + 2.5, "action": "kill", "target": "a"}])
    assert [(row.opened_s, row.closed_s) for row in timeline.rounds] == [(2.0, 4.0), (6.0, 7.0)]
    (start, kill) = timeline.marks
    assert (start.start_s, start.what) == (4.0, "start, after 32396 s that are left out")
    assert (kill.start_s, kill.end_s, kill.what, kill.target) == (6.5, 7.0, "kill", "a")


def test_a_clock_that_begins_anew_or_goes_back_goes_on() -> None:
    timeline = timeline_of(
        run(0.0), opens(5.0, 1, "a"), closes(8.0, 1), run(0.0), opens(1.0, 2, "a"), closes(0.5, 2), opens(2.0, 3, "a"),
        closes(3.0, 3),
    )  # fmt: skip
    assert [(row.opened_s, row.closed_s) for row in timeline.rounds] == [(5.0, 8.0), (9.0, 9.0), (10.0, 11.0)]


def test_a_clock_that_is_set_back_leaves_later_times_as_they_are() -> None:
    timeline = timeline_of(
        run(5000.0), opens(5001.0, 1, "a"), is_(5003.0, "a", "training"), is_(1403.0, "a", "ready"),
        says(1405.0, "update", 1, "a"), closes(1406.0, 1), opens(1407.0, 2, "a"), says(1417.0, "update", 2, "a"),
        closes(1418.0, 2),
    )  # fmt: skip
    assert [(row.opened_s, row.closed_s, row.median_s) for row in timeline.rounds] == [
        (1.0, 6.0, 4.0),
        (7.0, 18.0, 10.0),
    ]


def test_what_was_done_to_the_fleet() -> None:
    def act(at: float, action: str, target: str) -> Event:
        return {"at": at, "event": "scenario", "action": action, "target": target}

    timeline = timeline_of(
        run(1000.0),
        opens(1001.0, 1, "a", "b"),
        {"at": 1010.1, "event": "link", "state": "down"},
        {"at": 1014.0, "event": "link", "state": "up"},
        {"at": 1100.0, "event": "link", "state": "down"},
        {"at": 1101.0, "event": "link", "state": "up"},
        closes(1200.0, 1),
        scenario=[
            act(1005.0, "start", "late-one"),
            act(1006.0, "kill", "a"),
            act(1006.5, "cut", "b"),
            act(1007.0, "mend", "b"),
            act(1009.0, "start", "a"),
            act(1010.0, "kill", "broker"),
            act(1012.0, "start", "broker"),
            act(1020.0, "stop", "b"),
            act(1021.0, "not-played", "b"),
        ],
    )
    assert [(mark.start_s, mark.end_s, mark.what, mark.target) for mark in timeline.marks] == [
        (5.0, 5.0, "start", "late-one"),
        (6.0, 9.0, "kill", "a"),
        (6.5, 7.0, "cut", "b"),
        (10.0, 12.0, "kill", "broker"),  # the log noticed the same, later
        (20.0, 200.0, "stop", "b"),
        (100.0, 101.0, "out of reach", "broker"),
    ]


def test_the_fast_engine_without_boards_has_outcomes_and_no_times() -> None:
    timeline = timeline_of(
        run(0.0),
        *(is_(0.0, name, "ready") for name in "ab"),
        opens(1.0, 1, "a"),
        says(2.0, "update", 1, "a"),
        closes(3.0, 1),
        devices=["a", "b", "never"],
    )
    assert not timeline.timed
    assert (timeline.devices, timeline.outcomes) == (["a", "b", "never"], ["a", ".", "-"])
    assert (timeline.spans, timeline.seconds, timeline.rounds[0].device_seconds) == ([], [], {})
    assert timeline.rounds[0].median_s is None


def test_without_a_closed_round_there_is_no_timeline(tmp_path: Path) -> None:
    assert make_timeline([]) is None
    assert make_timeline([run(0.0), opens(1.0, 1, "a")]) is None
    assert read_timeline(tmp_path / "events.jsonl") is None


def test_too_many_spans_are_let_go_and_the_rest_stays() -> None:
    events, scenario = fleet_log(8, 6)
    whole, bounded = (timeline_of(*events, scenario=scenario, most_spans=most) for most in (10_000, 100))
    count = sum(len(spans) for spans in whole.spans)
    assert count > 100
    assert (bounded.spans, bounded.spans_left_out) == ([], count)
    kept = {"spans": [], "spans_left_out": 0}
    assert bounded.model_copy(update=kept) == whole.model_copy(update=kept)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.0, 0.2]))
def test_a_made_up_fleet_against_obvious_code(seed: int, devices: int, rounds: int, away: float) -> None:
    events, scenario = fleet_log(devices, rounds, seed=seed, away=away, declines=0.1, outage_round=2)
    timeline = timeline_of(*events, scenario=scenario)
    if timeline.timed:
        check_sums(timeline)
    began = events[0]["at"]
    for index, device in enumerate(timeline.devices):
        for place, row in enumerate(timeline.rounds):
            assert timeline.outcomes[index][place] == slow_outcome(events, device, row.round), (device, row.round)
        for start, end, state in timeline.spans[index] if timeline.spans else ():
            if end - start > 0.01:
                told = slow_presence(events, device, began + (start + end) / 2)
                assert (state if state in ("absent", "lost", "sleeping") else "there") == told


def check_sums(timeline: FleetTimeline, *, may_end_open: bool = False) -> None:
    """What must hold of every timeline.

    :param may_end_open: a round may be open at the end: then the one before ends where that opened, not with the run.
    """
    first = timeline.rounds[0].opened_s
    for spans, seconds in zip(timeline.spans, timeline.seconds, strict=True):
        if timeline.end_s:
            assert (spans[0][0], spans[-1][1]) == (0.0, timeline.end_s)
        assert all(one[1] == other[0] for one, other in pairwise(spans))
        assert all(start < end for start, end, _ in spans)
        for state in ACTIVITIES:
            total = sum(max(0.0, end - max(start, first)) for start, end, own in spans if own == state)
            assert seconds.get(state, 0.0) == pytest.approx(total, abs=0.002 * (1 + len(spans)))
    for row, after in zip(timeline.rounds, [*timeline.rounds[1:], None], strict=True):
        end = timeline.end_s if after is None else after.opened_s
        whole = (end - row.opened_s) * len(timeline.devices)
        counted = sum(row.device_seconds.values())
        assert counted <= whole + 0.05
        if after is not None or not may_end_open:
            assert counted == pytest.approx(whole, abs=0.05)


def slow_outcome(events: list[Event], device: str, number: int) -> str:
    mine = [e for e in events if e.get("round") == number and e.get("device") == device]
    (opened,) = [e for e in events if e["event"] == "round_open" and e["round"] == number]
    (closed,) = [e for e in events if e["event"] == "round_close" and e["round"] == number]
    there = slow_presence(events, device, closed["at"]) == "there"
    if any(e["event"] == "update" and e["code"] == "accepted" for e in mine):
        return "a"
    if any(e["event"] == "update" for e in mine):
        return "r"
    if any(e["event"] == "decline" for e in mine):
        return "d"
    if device not in opened["cohort"]:
        return "." if there else "-"
    return "l" if there else "x"


def slow_presence(events: list[Event], device: str, at: float) -> str:
    told = "absent"
    for event in events:
        if event["at"] > at:
            break
        if event["event"] == "presence" and event["device"] == device:
            told = event["state"]
        elif event["event"] in ("offer", "update", "decline") and event["device"] == device:
            told = "ready"
    return "there" if told in ("ready", "training") else told


junk = st.sampled_from([None, 1, -1, 2.5, "a", "b", "ready", "lost", "training", ["a"], [1], {}, True, 1e12])
kinds = st.sampled_from(
    ["run", "presence", "round_open", "round_close", "offer", "update", "decline", "link", "finished", "new"]
)
wild = st.fixed_dictionaries(
    {"event": kinds},
    optional=dict.fromkeys(("at", "round", "device", "state", "cohort", "code", "action", "target"), junk),
)
names_, numbers = st.sampled_from(["a", "b", "c"]), st.integers(1, 3)
plausible = st.one_of(
    st.builds(is_, st.floats(0, 50), names_, st.sampled_from(["ready", "training", "lost", "sleeping"])),
    st.builds(lambda at, n, who: opens(at, n, *who), st.floats(0, 50), numbers, st.lists(names_, unique=True)),
    st.builds(closes, st.floats(0, 50), numbers),
    st.builds(
        says, st.floats(0, 50), st.sampled_from(["offer", "update", "decline"]), numbers, names_,
        st.sampled_from(["accepted", "malformed", "late", "duplicate", "store-full"]),
    ),
    st.builds(run, st.floats(0, 50)),
    wild,
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(plausible, max_size=40), st.lists(wild, max_size=5))
@example([opens(1.0, -1, "a"), closes(2.0, -1)], [])
def test_no_log_is_too_wild(events: list[Event], scenario: list[Event]) -> None:
    events = [run(0.0), *events, opens(60.0, 9, "a", "b"), is_(61.0, "a", "training"), closes(62.0, 9), closes(63.0, 9)]
    timeline = make_timeline(events, scenario=scenario)
    if timeline is not None and timeline.timed:
        check_sums(timeline, may_end_open=True)


def test_a_log_that_is_read_from_a_file_is_the_same(tmp_path: Path) -> None:
    events, scenario = fleet_log(5, 3, away=0.3)
    paths = tmp_path / "events.jsonl", tmp_path / "scenario.jsonl"
    for path, lines in zip(paths, (events, scenario), strict=True):
        moments = iter(event["at"] for event in lines)
        with EventLog(path, clock=lambda moments=moments: next(moments)) as log:
            for event in lines:
                log.write(event["event"], **{name: v for name, v in event.items() if name not in ("at", "event")})
    rounded = [[{**event, "at": round(event["at"], 3)} for event in lines] for lines in (events, scenario)]
    told = read_timeline(paths[0], scenario=paths[1])
    assert told == make_timeline(rounded[0], scenario=rounded[1])
    assert told is not None
    assert any(mark.what == "kill" for mark in told.marks)


def test_it_is_a_part_of_the_result_that_old_files_do_not_have(tmp_path: Path) -> None:
    events, scenario = fleet_log(8, 6, away=0.1)
    result = sample(8, 6)
    timeline = timeline_of(*events, scenario=scenario)
    result = result.model_copy(update={"details": result.details.model_copy(update={"fleet_timeline": timeline})})
    path = tmp_path / "result.json"
    result.save(path)
    assert Result.load(path) == result
    text = path.read_text()
    data = json.loads(text)
    assert data == json.loads(json.dumps(result.model_dump(mode="json", by_alias=True)))
    assert f'"outcomes": {json.dumps(timeline.outcomes)}' in text, "lists of values stay on one line"
    del data["details"]["fleet_timeline"]
    path.write_text(json.dumps(data))
    assert Result.load(path).details.fleet_timeline is None


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("outcomes", ["aa"], "outcomes has 1 entries for 2 devices"),
        ("outcomes", ["aa", "a"], "the outcomes of b are 'a'"),
        ("outcomes", ["aa", "aq"], "the outcomes of b are 'aq'"),
        ("spans", [[]], "spans has 1 entries"),
        ("seconds", [{"dancing": 1.0}, {}], "dancing"),
    ],
)
def test_what_does_not_fit_together_is_refused(key: str, value: Any, told: str) -> None:
    whole = timeline_of(run(0.0), opens(1.0, 1, "a", "b"), closes(2.0, 1), opens(2.0, 2, "a", "b"), closes(3.0, 2))
    with pytest.raises(ValidationError, match=told):
        FleetTimeline.model_validate({**whole.model_dump(), key: value})


def test_states_and_outcomes_are_documented() -> None:
    page = (HERE.parents[3] / "docs" / "result.md").read_text()
    events, scenario = fleet_log(3, 2)
    data = timeline_of(*events, scenario=scenario).model_dump()
    marks = {"start_s", "end_s", "what", "target"}
    wanted = {*ACTIVITIES, *OUTCOMES, *data, *data["rounds"][0], *marks}
    assert [name for name in sorted(wanted) if f"`{name}`" not in page] == []
    assert Counter(state[0] for state in OUTCOMES.values())["a"] == 1
