"""Events to the outcomes of rounds: cases by hand, a made-up fleet against slow obvious code, hostile logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.results.fleet_state import RunState
from hushfleet.aggregator.results.outcomes import OUTCOMES, Outcomes, Rounds
from hushfleet.aggregator.storage.board import ACTIVITIES
from support.event_samples import fleet_log

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


def outcomes_of(*events: Event, accepted: Rounds | None = None, declined: Rounds | None = None) -> Outcomes:
    return Outcomes(events, accepted=accepted or {}, declined=declined or {})


def states_of(device: str, *events: Event) -> list[str]:
    """The states of a device after the events, without repetitions."""
    state, seen = RunState(), []
    for event in events:
        state.apply(event)
        now = state.devices[device].state if device in state.devices else "absent"
        seen += [now] if seen[-1:] != [now] else []
    return seen


def test_the_states_of_two_devices_in_a_round() -> None:
    events = (
        run(100.0), is_(101.0, "a", "ready"), is_(102.0, "b", "ready"), opens(103.0, 1, "a", "b"),
        is_(104.0, "a", "training"), is_(105.5, "b", "training"), is_(106.0, "a", "ready"),
        says(106.1, "offer", 1, "a"),
        says(107.0, "update", 1, "a"), is_(108.0, "b", "ready"), says(109.0, "update", 1, "b"), closes(109.5, 1),
        {"at": 110.0, "event": "finished"}, is_(111.0, "a", "sleeping"),
    )  # fmt: skip
    course = ["absent", "ready", "fetching", "training", "sending", "accepted"]
    assert states_of("a", *events) == [*course, "sleeping"]
    assert states_of("b", *events) == course
    assert outcomes_of(*events).of_round == {1: Counter(accepted=2)}


def test_every_outcome_of_a_round() -> None:
    names = ("accepted", "late", "declined", "refused", "lost", "trained", "full")
    found = outcomes_of(
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
    assert found.of_round == {1: Counter(accepted=1, late=3, declined=1, refused=1, lost=1), 2: Counter(late=1)}
    assert +found.in_vain == Counter(late=1, trained=1, full=1, refused=1, lost=1, unasked=1)


def test_nobody_is_late_for_a_buffered_round() -> None:
    found = outcomes_of(
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
    assert found.of_round == {1: Counter(accepted=1), 2: Counter(accepted=1)}
    assert not +found.in_vain


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
    events = (
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
    )
    assert states_of("early", *events)[1:] == ["ready", "fetching", "training", "lost", "fetching"]
    assert states_of("later", *events)[1:] == ["ready", "fetching", "training", "sending", "lost", "sending"]


def test_an_aggregator_that_was_killed_goes_on_with_the_round_and_the_store_knows_better_than_its_log() -> None:
    found = outcomes_of(
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
    assert found.of_round == {1: Counter(accepted=2, declined=1)}


def test_a_closing_that_was_never_logged_is_the_next_opening() -> None:
    found = outcomes_of(run(0.0), opens(1.0, 1, "a"), says(2.0, "update", 1, "a"), opens(3.0, 2, "a"), closes(4.0, 2))
    assert found.of_round == {1: Counter(accepted=1), 2: Counter(late=1)}


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.0, 0.2]))
def test_a_made_up_fleet_against_obvious_code(seed: int, devices: int, rounds: int, away: float) -> None:
    events = fleet_log(devices, rounds, seed=seed, away=away, declines=0.1, outage_round=2)
    names = {event["device"] for event in events if "device" in event}
    found = outcomes_of(*events)
    assert sorted(found.of_round) == list(range(1, rounds + 1))
    for number, counts in found.of_round.items():
        told = Counter(slow_outcome(events, device, number) for device in names)
        assert +counts == Counter({outcome: count for outcome, count in told.items() if outcome})


def slow_outcome(events: list[Event], device: str, number: int) -> str | None:
    mine = [e for e in events if e.get("round") == number and e.get("device") == device]
    (opened,) = [e for e in events if e["event"] == "round_open" and e["round"] == number]
    (closed,) = [e for e in events if e["event"] == "round_close" and e["round"] == number]
    if any(e["event"] == "update" and e["code"] == "accepted" for e in mine):
        return "accepted"
    if any(e["event"] == "update" for e in mine):
        return "refused"
    if any(e["event"] == "decline" for e in mine):
        return "declined"
    if device not in opened["cohort"]:
        return None
    return "late" if is_there(events, device, closed["at"]) else "lost"


def is_there(events: list[Event], device: str, at: float) -> bool:
    told = "absent"
    for event in events:
        if event["at"] > at:
            break
        if event["event"] == "presence" and event["device"] == device:
            told = event["state"]
        elif event["event"] in ("offer", "update", "decline") and event["device"] == device:
            told = "ready"
    return told in ("ready", "training")


junk = st.sampled_from([None, 1, -1, 2.5, "a", "b", "ready", "lost", "training", ["a"], [1], {}, True, 1e12])
kinds = st.sampled_from(
    ["run", "presence", "round_open", "round_close", "offer", "update", "decline", "link", "finished", "new"]
)
wild = st.fixed_dictionaries(
    {"event": kinds}, optional=dict.fromkeys(("at", "round", "device", "state", "cohort", "code"), junk)
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
@given(st.lists(plausible, max_size=40))
@example([opens(1.0, -1, "a"), closes(2.0, -1)])
def test_no_log_is_too_wild(events: list[Event]) -> None:
    last = opens(60.0, 9, "a", "b"), is_(61.0, "a", "training"), closes(62.0, 9), closes(63.0, 9)
    counts = outcomes_of(run(0.0), *events, *last).of_round[9]
    assert (counts["late"] >= 1, counts.total()) == (True, 2)


def test_states_and_outcomes_are_documented() -> None:
    page = (HERE.parents[3] / "docs" / "result.md").read_text()
    assert [name for name in (*ACTIVITIES, *OUTCOMES) if f"`{name}`" not in page] == []
