"""The virtual clock against timelines by hand (`support.virtual_clock`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hushfleet.errors import HushfleetError
from hushfleet.simulator.world.times import DeviceTimes
from hushfleet.wire.format.messages import Ack, Ask, Birth, Known, Want
from support.virtual_clock import (
    ARRIVES,
    BORN,
    FREE,
    PLAIN,
    SIZES,
    WIRE,
    arrivals,
    clock,
    rounded,
    run,
)


def test_a_round_of_one_device() -> None:
    fleet = clock([PLAIN], rounds=2)
    first, second = run(fleet)
    assert rounded(first.opened_s, first.closed_s) == rounded(BORN, BORN + ARRIVES)
    assert arrivals(first) == {"a": round(BORN + ARRIVES, 6)}
    # the acknowledgement and the next plan leave together, and the model is a new one
    assert rounded(second.opened_s, second.closed_s) == rounded(BORN + ARRIVES, BORN + 2 * ARRIVES)
    spent = fleet.fleet[0].spent
    assert rounded(spent.compute_s, spent.on_s) == rounded(2 * 6.5, second.closed_s)
    assert (spent.chosen, spent.used, spent.charged, spent.unused) == (2, 2, {1: 2}, {})


def test_everything_that_takes_time_takes_it() -> None:
    slow = replace(
        PLAIN,
        start_s=10.0,
        load_s=4.0,
        fetch_s=3.0,
        model_store_s=0.25,
        up_s_per_byte=2.0 / WIRE,
        write_s_per_byte=1.0 / SIZES.update(0, with_public=False).stored,
    )
    (only,) = run(clock([slow], costs=replace(FREE, accept_s=0.5, close_s=0.125)))
    # its process starts, it is heard of, and fetches the task while the plan waits
    assert round(only.opened_s, 6) == 10.7
    ready = 10.6 + 3 + 4
    trains = ready + 0.1 + 0.05 + 0.1 + 1.0 + 0.25
    arrives = trains + 6 + 0.5 + 1 + 0.1 + 2
    assert arrivals(only) == {"a": round(arrives + 0.5, 6)}
    assert round(only.closed_s, 6) == round(arrives + 0.5 + 0.125, 6)


def test_differences_come_instead_of_the_model() -> None:
    sizes = replace(SIZES, difference_bytes=900)  # four are cheaper than 4,000 bytes
    assert sizes.offered == 4
    one = sizes.blob_wire_bytes(900, down=True)
    times = replace(PLAIN, down_s_per_byte=0.1 / one, model_s=2.0)
    plan_s = sizes.plan_wire_bytes(1) * times.down_s_per_byte
    fleet = clock([times], rounds=2, sizes=sizes)
    first, second = run(fleet)
    assert round(first.wall_s, 6) == round(plan_s + ARRIVES + 1.0, 6), "a newcomer fetches the whole model"
    assert round(second.wall_s, 6) == round(plan_s + ARRIVES - 1.0 + 0.1, 6)
    whole = clock([times], rounds=2)
    run(whole)
    saved = whole.fleet[0].spent.down_bytes - fleet.fleet[0].spent.down_bytes
    model, plans = sizes.blob_wire_bytes(4000, down=True), 4  # opened twice, and at the link's start and at the end
    assert saved == model - one - plans * (sizes.plan_wire_bytes(0) - SIZES.plan_wire_bytes(0))


def test_who_skipped_rounds_fetches_what_it_missed_or_the_model() -> None:
    sizes = replace(SIZES, difference_bytes=900)
    one = sizes.blob_wire_bytes(900, down=True)
    times = replace(PLAIN, down_s_per_byte=0.1 / one, model_s=2.0, write_s_per_byte=1e-5)
    stored_s = sizes.update(0, with_public=False).stored * 1e-5
    last: dict[str, int] = {}
    fetched = set()
    for outcome in run(clock([times] * 4, rounds=30, cohort_size=1, sizes=sizes)):
        (device,) = outcome.cohort
        behind = outcome.round - last[device] if device in last else 99
        last[device] = outcome.round
        fetched.add(behind)
        # each after the first is asked for: two latencies, and the time in which wants are gathered
        fetch_s = behind * 0.1 + (behind - 1) * 0.25 + (behind * 900 + 4000) * 1e-5 if behind <= 4 else 2.0
        plan_s = sizes.plan_wire_bytes(1) * times.down_s_per_byte
        assert round(outcome.wall_s, 6) == round(plan_s + ARRIVES - 1.0 + fetch_s + stored_s, 6)
    assert {1, 2, 3, 4, 99} < fetched, "one was away for longer than differences are offered"


def test_updates_are_checked_one_after_the_other() -> None:
    (only,) = run(clock([PLAIN] * 3, costs=replace(FREE, accept_s=0.5)))
    at = BORN + ARRIVES
    assert arrivals(only) == {"a": round(at + 0.5, 6), "b": round(at + 1.0, 6), "c": round(at + 1.5, 6)}


def test_wants_of_one_moment_share_a_broadcast_and_later_ones_begin_another() -> None:
    far = replace(PLAIN, latency_s=0.12)  # its want comes 0.04 s after the others', in time for the first pass
    late = replace(PLAIN, latency_s=0.2)  # 0.2 s after them
    (only,) = run(clock([PLAIN, far, late]))
    opened = only.opened_s
    assert round(opened, 6) == 1.4, "the slowest of the three is heard of last"
    expected = {"a": ARRIVES, "b": 0.1 + 0.1 + 0.05 + 0.12 + 1 + 6.5 + 0.12, "c": 0.4 + 0.05 + 0.2 + 1 + 6.5 + 0.2}
    assert arrivals(only) == {name: round(opened + at, 6) for name, at in expected.items()}
    fleet = clock([PLAIN, far, late])
    run(fleet)
    model = SIZES.blob_wire_bytes(SIZES.model_bytes, down=True)
    with_second_pass = [device.spent.down_bytes > 2 * model for device in fleet.fleet]
    assert with_second_pass == [True, True, False], "the second pass comes to those who still receive the first"


@pytest.mark.parametrize(
    ("slow", "fate"),
    [
        # the other one arrives at 7.95, and the plan that says so is with the slow one 0.1 later
        (replace(PLAIN, step_s=3.0), "given_up"),  # third batch from 1.35 + 6 = 7.35: it is in the middle of it...
        (replace(PLAIN, step_s=3.4), "given_up"),  # ...here only at 8.15: looks at the link before that
        (replace(PLAIN, up_s_per_byte=1.0), "late"),
    ],
)
def test_who_is_too_slow_gives_up_or_is_late(slow: DeviceTimes, fate: str) -> None:
    fleet = clock([PLAIN, slow], quorum=0.5)
    (only,) = run(fleet)
    expected = "late" if slow.step_s == 3.0 else fate
    assert (only.late, only.given_up) == ((("b",), ()) if expected == "late" else ((), ("b",)))
    spent = fleet.fleet[1].spent
    if expected == "late":
        assert (spent.late, spent.charged, spent.unused) == (1, {2: 1}, {2: 1})
    else:
        assert (spent.given_up, spent.charged) == (1, {})
        assert round(spent.compute_s, 6) == 6.8, "two batches were for nothing"


def test_a_late_device_begins_the_next_round_after_its_commit_and_sends_its_mask() -> None:
    slow = replace(PLAIN, step_s=3.0)  # last batch from 7.35, committed at 10.85, while round 1 closes at 7.95
    fleet = clock([PLAIN, slow], quorum=0.5, rounds=2, logging=True)
    first, second = run(fleet)
    assert first.late == ("b",)
    (ready,) = [
        event.at_s
        for outcome in (first, second)
        for event in outcome.events
        if event.event == "presence" and event.fields["device"] == "b" and event.fields["state"] == "ready"
        if event.at_s > BORN + 1
    ]
    assert round(ready, 6) == round(BORN + 10.85 + 0.1, 6)
    # while the other one is away in the second round, it is used, and sends along what the aggregator lacks
    away = {"drop_out": [{"devices": ["a"], "at_round": 2, "for_s": 500.0}]}
    first, second = run(clock([PLAIN, slow], quorum=0.5, rounds=2, scenario=away))
    assert (first.late, list(arrivals(second))) == (("b",), ["b"])
    assert [each.update_bytes for each in (*first.arrivals, *second.arrivals)] == [
        SIZES.update(0, with_public=False).blob,
        SIZES.update(1, with_public=True).blob,
    ]
    assert SIZES.update(1, with_public=True).blob > SIZES.update(1, with_public=False).blob


def test_the_deadline_closes_a_round_without_the_slow() -> None:
    slow = replace(PLAIN, step_s=10.0)
    fleet = clock([PLAIN, slow], deadline_s=20)
    (only,) = run(fleet)
    assert (round(only.closed_s, 6), tuple(arrivals(only)), only.given_up) == (round(BORN + 20, 6), ("a",), ("b",))
    # hears of it at 20.1 in the second batch (from 11.35 to 21.35), and gives up before the third
    assert round(fleet.fleet[1].spent.compute_s, 6) == 20


def test_a_round_with_too_few_updates_is_put_off_and_its_trainers_begin_anew() -> None:
    # trains from 10.35 on, and looks at the link at 15.35 and 20.35: then its own deadline, at 20.1, has passed
    slow = replace(PLAIN, model_s=10.0, step_s=5.0)
    fleet = clock([slow], deadline_s=20, logging=True)
    (only,) = run(fleet)
    assert only.extensions == 1
    # it holds the model now: 15.5 s, and 0.1 to the aggregator
    assert arrivals(only) == {"a": round(BORN + 20.35 + 15.5 + 0.1, 6)}
    kinds = [event.event for event in only.events if event.event in ("round_extended", "decline", "offer", "update")]
    assert kinds == ["round_extended", "decline", "offer", "update"]
    assert rounded(fleet.fleet[0].spent.compute_s) == rounded(10 + 15.5)
    # who needs more than the time that is added does not make it, and is not waited for: it has declined
    slower = replace(slow, step_s=9.0)
    (only,) = run(clock([slower], deadline_s=20))
    assert (round(only.closed_s, 6), only.used, only.declined) == (round(BORN + 40, 6), False, ("a",))


def test_who_has_begun_anew_has_a_deadline_as_well() -> None:
    """It begins anew at 111.35 and at 331.35, and each time gives up before its last batch, after its own deadline."""
    slow, slower = replace(PLAIN, step_s=110.0), replace(PLAIN, step_s=400.0)
    fleet = clock([PLAIN, slow, slower], deadline_s=100, min_updates=3)
    (only,) = run(fleet)
    assert list(arrivals(only)) == ["a"]
    assert fleet.fleet[1].spent.charged == {}


def test_a_deadline_that_has_passed_counts_even_if_the_round_ends_a_moment_later() -> None:
    # the deadline is put off at 20; a's update is there at 20.3, and b would hear of the end at 20.4, after its last
    # batch has begun; but at 20.35 it sees that its own deadline, 20.1, is over
    quick = replace(PLAIN, release_s=12.85)
    slow = replace(PLAIN, model_s=10.0, step_s=5.0)
    (only,) = run(clock([quick, slow], deadline_s=20, quorum=0.5))
    assert (only.extensions, list(arrivals(only)), only.given_up) == (1, ["a"], ("b",))


def test_a_task_that_does_not_fit_is_declined() -> None:
    small = replace(PLAIN, enough_memory=False)
    fleet = clock([PLAIN, small], logging=True)
    (only,) = run(fleet)
    assert (only.declined, tuple(arrivals(only))) == (("b",), ("a",))
    assert [event.fields["code"] for event in only.events if event.event == "decline"] == ["memory"]


def test_every_byte_is_on_the_bill() -> None:
    fleet = clock([PLAIN], rounds=2)
    run(fleet)
    spent = fleet.fleet[0].spent
    second = SIZES.update(1, with_public=False).wire
    # born once, and asks what is known of it; package and graph asked for; in each round the model asked for, and two
    # births around the training
    packet = SIZES.packet
    assert spent.up_bytes == pytest.approx(packet[Birth] * 5 + packet[Ask] + packet[Want] * 4 + WIRE + second)
    blobs = sum(SIZES.blob_wire_bytes(size, down=True) for size in (100, 200, 4000, 4000))
    # that no round is open when it comes, two plans that name it, and that all is over
    plans = 2 * SIZES.plan_wire_bytes(0) + 2 * SIZES.plan_wire_bytes(1)
    assert spent.down_bytes == pytest.approx(blobs + plans + SIZES.packet[Known] + 2 * SIZES.packet[Ack])


def test_who_never_comes_is_told_with_what_to_do() -> None:
    with pytest.raises(HushfleetError, match=r"round 1 never opens: 1 devices are present, and 2 are needed"):
        run(clock([PLAIN, PLAIN], scenario={"late": [{"devices": ["b"], "at_round": 3}]}))
    hopeless = replace(PLAIN, step_s=1e6)  # it never comes to look at the link, so it does not even decline
    with pytest.raises(HushfleetError, match=r"round 1 never closes: .* 0 updates of 1 devices"):
        run(clock([hopeless], deadline_s=20))
