"""The virtual clock against timelines by hand, and against a slow simulation that looks at every round from outside.

Devices here are made of plain seconds. `Sizes` is real, but links are infinitely fast unless a test says otherwise, so
bytes cost no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.config.sections import RoundSection
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.clock.device import Device
from hushfleet.simulator.engines.clock.device_time import Costs, DeviceTimes
from hushfleet.simulator.engines.clock.engine import FleetClock
from hushfleet.simulator.engines.clock.events import ClosedRound
from hushfleet.simulator.engines.clock.links import LinkOptions
from hushfleet.simulator.engines.clock.sizes import Sizes
from hushfleet.simulator.schedule import make_schedule
from hushfleet.wire.format.messages import Ack, Ask, Birth, Known, Want

SIZES = Sizes(
    parameters=1000,
    chunk_bytes=1024,
    task_blobs=(100, 200),
    shared=(1000,),
    bits_per_value=8.0,
    header_bytes=400,
    name_bytes=1,
)
WIRE = SIZES.update(0, with_public=False).wire
FREE = Costs(batch_s=0, sample_s=0, release_s=0, start_s=0, load_s=0, accept_s=0, close_s=0)
PLAIN = DeviceTimes(
    latency_s=0.1,
    down_s_per_byte=0.0,
    up_s_per_byte=0.0,
    start_s=0.0,
    load_s=0.0,
    fetch_s=0.0,
    model_s=1.0,
    model_store_s=0.0,
    steps=3,
    step_s=2.0,
    release_s=0.5,
    write_s_per_byte=0.0,
    enough_memory=True,
    idle_w=1.0,
    active_w=2.0,
)
# Switched on at 0, a device of PLAIN is heard of after three round trips and one way: 0.7 s. With the round open at t:
#   t + 0.1 plan, + 0.1 want, + 0.05 gathered, + 0.1 and 1.0 model: trains from t + 1.35, third batch from t + 5.35,
#   until t + 7.35, committed at t + 7.85, at the aggregator at t + 7.95.
BORN, TRAINS, LAST, COMMITS, ARRIVES = 0.7, 1.35, 5.35, 7.85, 7.95
KILLED = LinkOptions(lost_noticed_s=0.0, first_backoff_s=0.5, server_start_s=3.0)


def clock(
    times: Sequence[DeviceTimes],
    *,
    costs: Costs = FREE,
    scenario: dict[str, Any] | None = None,
    options: LinkOptions = KILLED,
    logging: bool = False,
    sizes: Sizes = SIZES,
    **rules: Any,
) -> FleetClock:
    devices = [Device("abcdefghijklmnopqrstuvwxyz"[index], each) for index, each in enumerate(times)]
    schedule = make_schedule(ScenarioSection(**(scenario or {})), [device.name for device in devices], seed=1)
    section = RoundSection(**{"rounds": 1, "deadline_s": 100, **rules})
    return FleetClock(
        section, devices, costs=costs, sizes=sizes, schedule=schedule, seed=1, options=options, logging=logging
    )


def run(fleet: FleetClock) -> list[ClosedRound]:
    return list(fleet.rounds())


def arrivals(outcome: ClosedRound) -> dict[str, float]:
    return {arrival.device: round(arrival.at_s, 6) for arrival in outcome.arrivals}


def rounded(*values: float) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values)


# by hand


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


# what a scenario does


def test_a_power_cut_before_the_commit_spends_nothing_and_the_device_begins_again() -> None:
    # killed 5 s into round 1, in the second batch; back after 2 s and heard of 0.7 s later; it holds the model
    scenario = {"drop_out": [{"devices": ["b"], "at_round": 1, "for_s": 2.0}]}
    fleet = clock([PLAIN, replace(PLAIN, start_s=1.0)], scenario=scenario, deadline_s=100)
    (only,) = run(fleet)
    opened = 1.7
    assert round(only.opened_s, 6) == opened
    # it is cut off as the round opens, so it never had the model: from its link (7 latencies less one) on
    back = opened + 2 + 1.0 + 0.6
    assert arrivals(only)["b"] == round(back + 0.1 + 0.05 + 0.1 + 1 + 6.5 + 0.1, 6)
    assert fleet.fleet[1].spent.charged == {2: 1}


def test_a_power_cut_while_training_loses_the_work_and_after_the_commit_loses_nothing() -> None:
    during = {"drop_out": [{"devices": ["a"], "at_s": BORN + 3.35, "for_s": 2.0}]}
    fleet = clock([PLAIN], scenario=during)
    (only,) = run(fleet)
    linked = BORN + 3.35 + 2 + 0.6
    assert arrivals(only) == {"a": round(linked + 6.5 + 0.1, 6)}, "the model is in its store"
    assert round(fleet.fleet[0].spent.compute_s, 6) == 2 + 6.5
    sending = replace(PLAIN, up_s_per_byte=4.0 / WIRE)  # sends from 7.85 to 11.85
    after = {"drop_out": [{"devices": ["a"], "at_s": BORN + 9.85, "for_s": 2.0}]}
    fleet = clock([sending], scenario=after)
    (only,) = run(fleet)
    linked = BORN + 9.85 + 2 + 0.6
    assert arrivals(only) == {"a": round(linked + 4 + 0.1, 6)}, "the same bytes again, from the first on"
    spent = fleet.fleet[0].spent
    assert (round(spent.compute_s, 6), spent.charged) == (6.5, {1: 1})
    assert spent.up_bytes > 1.5 * WIRE


PROMPT = replace(KILLED, first_backoff_s=1e-4, longest_backoff_s=1e-4)
"""Whose link is tried again at once, so that moments can be told."""


def test_a_cut_network_stops_what_travels_and_not_the_work() -> None:
    sending = replace(PLAIN, up_s_per_byte=4.0 / WIRE)  # commits 7.85 after the opening, and sends until 11.85
    quiet = clock([sending])
    calm = run(quiet)[0].arrivals[0].at_s

    def delayed(begins: float, ends: float) -> tuple[float, float]:
        """By how many seconds, and how many bytes, for a network that is away from then to then."""
        cut = {"outage": [{"devices": "all", "at_s": BORN + begins, "for_s": ends - begins}]}
        fleet = clock([sending], scenario=cut, deadline_s=400, options=PROMPT)
        bytes_more = fleet.fleet[0].spent
        later = run(fleet)[0].arrivals[0].at_s - calm
        again = SIZES.packet[Birth] + SIZES.packet[Ask]  # what each new link begins with
        return round(later, 2), round(bytes_more.up_bytes - quiet.fleet[0].spent.up_bytes - again, 2)

    # a link that is up again since `ends` takes three round trips: 0.6 s
    assert delayed(2.0, 4.0) == (0, 0), "it trains through it"
    assert delayed(2.0, 9.0) == (pytest.approx(9.6 - 7.85), 0), "what is ready waits for the link"
    # half of the update had gone; it offers it again, is told what is missing, and sends on: 0.2 s
    assert delayed(9.85, 13.0) == (pytest.approx(13.6 + 0.2 - 9.85), 0)
    # of the model, which comes from 0.35 to 1.35, half had come; it asks for the rest: 0.25 s
    assert delayed(0.85, 3.0) == (pytest.approx(3.6 + 0.25 - 0.85), 0)
    # before the broadcast: all is asked for
    assert delayed(0.15, 3.0) == (pytest.approx(3.6 + 0.25 - 0.35), 0)


def test_waits_for_a_new_link_grow_up_to_a_longest() -> None:
    cut = {"outage": [{"devices": "all", "at_s": 2.0, "for_s": 3000.0}]}
    options = LinkOptions(lost_noticed_s=0.0, first_backoff_s=1.0, longest_backoff_s=120.0)
    fleet = clock([PLAIN] * 20, scenario=cut, options=options, deadline_s=10_000, min_updates=20, logging=True)
    (only,) = run(fleet)
    back = [event.at_s - 3002 for event in only.events if event.event == "presence" and event.at_s > 3000]
    assert len([each for each in back if each > 20]) > 10
    assert max(back) <= 120.8


def test_a_device_without_a_network_goes_on_until_its_own_deadline() -> None:
    slow = replace(PLAIN, step_s=9.0)  # third batch from 19.35
    cut = {"outage": [{"devices": ["b"], "at_s": BORN + 3, "for_s": 1000.0}]}
    for deadline_s, batches, fate in ((30, 3, "late"), (15, 2, "given_up")):
        fleet = clock([PLAIN, slow], scenario=cut, deadline_s=deadline_s, min_updates=1)
        (only,) = run(fleet)
        assert getattr(only, fate) == ("b",)
        # lost for good a quarter of the deadline after it was cut off, or when the other one has sent, if that is later
        assert round(only.closed_s - BORN, 4) == round(max(3 + deadline_s / 4, ARRIVES), 4)
        assert round(fleet.fleet[1].spent.compute_s, 6) == 9 * batches + (0.5 if fate == "late" else 0)


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


def test_a_dead_aggregator_takes_nothing_and_a_dead_broker_cuts_everybody() -> None:
    down = {"crash": [{"process": "aggregator", "at_s": BORN + 7.0, "for_s": 2.0}]}
    fleet = clock([PLAIN], scenario=down, logging=True)
    (only,) = run(fleet)
    # back at 9 + 3 to start: the device offers, is told that all is missing, and sends: 0.3 s
    assert arrivals(only) == {"a": round(BORN + 12 + 0.3, 6)}
    assert [event.event for event in only.events].count("run") == 1
    cut = {"crash": [{"process": "broker", "at_s": BORN + 7.0, "for_s": 2.0}]}
    fleet = clock([PLAIN], scenario=cut, logging=True)
    (only,) = run(fleet)
    links = [(event.fields["state"], event.at_s) for event in only.events if event.event == "link"]
    assert [state for state, _ in links] == ["down", "up"]
    assert links[0][1] == pytest.approx(BORN + 7)
    assert BORN + 9 <= links[1][1] <= BORN + 9 + 8
    assert arrivals(only)["a"] >= links[1][1]
    assert fleet.fleet[0].spent.charged == {1: 1}


def test_days_and_nights_are_followed_and_energy_is_counted_by_day_only() -> None:
    night = {"day": [{"devices": "all", "period_s": 100.0, "share": 0.5}]}
    fleet = clock([PLAIN], scenario=night, rounds=12, deadline_s=400, logging=True)
    outcomes = run(fleet)
    states = {event.fields["state"] for each in outcomes for event in each.events if event.event == "presence"}
    assert states == {"ready", "training", "sleeping"}
    spent, end = fleet.fleet[0].spent, outcomes[-1].closed_s
    assert len(outcomes) == 12
    assert end > 2 * 12 * 7.95 - 100, "half of the time it sleeps"
    assert 0.4 < spent.on_s / end < 0.8
    assert spent.charged == {1: 12}


def test_who_never_comes_is_told_with_what_to_do() -> None:
    with pytest.raises(HushfleetError, match=r"round 1 never opens: 1 devices are present, and 2 are needed"):
        run(clock([PLAIN, PLAIN], scenario={"late": [{"devices": ["b"], "at_round": 3}]}))
    hopeless = replace(PLAIN, step_s=1e6)  # it never comes to look at the link, so it does not even decline
    with pytest.raises(HushfleetError, match=r"round 1 never closes: .* 0 updates of 1 devices"):
        run(clock([hopeless], deadline_s=20))


# against obvious code, and what must hold anyway

seconds = st.integers(0, 40).map(lambda tenths: tenths / 8)
device = st.builds(
    replace,
    st.just(PLAIN),
    latency_s=st.integers(1, 8).map(lambda each: each / 16),
    model_s=seconds,
    steps=st.integers(1, 4),
    step_s=st.integers(1, 40).map(lambda each: each / 8),
    release_s=seconds,
    up_s_per_byte=st.integers(0, 32).map(lambda each: each / 8 / WIRE),
)
fleets = st.lists(device, min_size=1, max_size=6)


def first_round_by_scanning(times: Sequence[DeviceTimes], rules: RoundSection, accept_s: float) -> tuple[Any, ...]:
    """Round 1 of a calm fleet, looked at from outside: (closed_s, who was used, who was late, who gave up)."""
    names = "abcdefghijklmnopqrstuvwxyz"
    opened = max(7 * each.latency_s for each in times)
    wants = sorted((opened + 2 * each.latency_s, index) for index, each in enumerate(times))
    train_at, pass_at = {}, -1.0
    for want, index in wants:
        if want > pass_at:
            pass_at = want + 0.05
        train_at[index] = pass_at + times[index].latency_s + times[index].model_s
    rows = []
    for index, each in enumerate(times):
        last = train_at[index] + (each.steps - 1) * each.step_s
        commit = last + each.step_s + each.release_s
        rows.append((commit + each.latency_s + WIRE * each.up_s_per_byte, index, last))
    wanted = max(-int(-(rules.quorum * len(times)) // 1), min(rules.min_updates, len(times)))
    free, accepted = 0.0, []
    for arrives, index, _ in sorted(rows):
        free = max(free, arrives) + accept_s
        accepted.append((free, index))
    deadline = opened + rules.deadline_s
    in_time = [each for each in accepted if each[0] < deadline]
    closed = in_time[wanted - 1][0] if len(in_time) >= wanted else deadline
    used = [names[index] for at, index in accepted if at <= closed][:wanted]
    late, given_up = [], []
    for _, index, last in rows:
        if names[index] not in used:
            (late if closed + times[index].latency_s > last else given_up).append(names[index])
    return closed, used, sorted(late), sorted(given_up)


@settings(max_examples=300)
@given(times=fleets, quorum=st.sampled_from([0.2, 0.5, 0.75, 1.0]), deadline_s=st.integers(1, 60), accept=seconds)
def test_a_calm_round_is_what_an_obvious_simulation_finds(
    times: list[DeviceTimes], quorum: float, deadline_s: float, accept: float
) -> None:
    # nothing falls on the deadline, and no two updates arrive at one moment
    deadline_s += 0.0371
    times = [replace(each, release_s=each.release_s + 0.00917 * index) for index, each in enumerate(times)]
    accept_s = accept / 16 + 0.0013
    rules = RoundSection(rounds=1, quorum=quorum, deadline_s=deadline_s)
    closed, used, late, given_up = first_round_by_scanning(times, rules, accept_s)
    if not used:
        return  # it is put off, which the hand-made timelines look at
    costs = replace(FREE, accept_s=accept_s)
    (only,) = run(clock(times, costs=costs, quorum=quorum, deadline_s=deadline_s))
    assert only.closed_s == pytest.approx(closed)
    assert sorted(arrivals(only)) == sorted(used)
    assert (sorted(only.late), sorted(only.given_up)) == (late, given_up)


@settings(max_examples=60)
@given(times=fleets, quorum=st.sampled_from([0.3, 0.7, 1.0]), deadline_s=st.integers(10, 60))
def test_everybody_is_counted_once_and_charged_rightly(
    times: list[DeviceTimes], quorum: float, deadline_s: int
) -> None:
    fleet = clock(times, rounds=3, quorum=quorum, deadline_s=deadline_s)
    outcomes = run(fleet)
    for outcome in outcomes:
        parts = [[each.device for each in outcome.arrivals], outcome.late, outcome.given_up, outcome.declined]
        assert sorted(name for part in (*parts, outcome.lost) for name in part) == list(outcome.cohort)
        assert outcome.opened_s < outcome.closed_s
    for each in fleet.fleet:
        spent = each.spent
        assert spent.used == sum(each.name in arrivals(outcome) for outcome in outcomes)
        assert spent.late == sum(each.name in outcome.late for outcome in outcomes)
        assert spent.chosen == spent.used + spent.late + spent.given_up + spent.declined + spent.lost
        assert spent.charged.total() == spent.used + spent.late
        assert spent.unused.total() == spent.late
        # whole updates left the device, at most a part of one for each late round, and small messages
        whole = sum(SIZES.update(count, with_public=True).wire for count in range(spent.used + spent.late))
        small = 20 * SIZES.packet[Birth] + 6 * SIZES.packet[Want]
        assert spent.used * WIRE <= spent.up_bytes + 1e-6 <= whole + small


@settings(max_examples=60)
@given(times=fleets, shorter=st.integers(10, 40), longer=st.integers(0, 40))
def test_a_longer_deadline_never_gets_fewer_updates(times: list[DeviceTimes], shorter: int, longer: int) -> None:
    (one,) = run(clock(times, deadline_s=shorter))
    (other,) = run(clock(times, deadline_s=shorter + longer))
    if one.extensions == 0:
        assert set(arrivals(one)) <= set(arrivals(other))


@settings(max_examples=60)
@given(times=fleets, faster=st.floats(0.1, 1.0), data=st.data())
def test_a_faster_board_is_never_later(times: list[DeviceTimes], faster: float, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(times) - 1))
    quicker = list(times)
    quicker[index] = replace(times[index], step_s=times[index].step_s * faster, release_s=0.0)
    (one,) = run(clock(times, deadline_s=1000))
    (other,) = run(clock(quicker, deadline_s=1000))
    name = "abcdef"[index]
    assert arrivals(other)[name] <= arrivals(one)[name]
    assert other.closed_s <= one.closed_s + 1e-9


@settings(max_examples=30)
@given(
    times=fleets,
    drops=st.lists(st.tuples(st.floats(0, 40), st.floats(0.5, 20)), max_size=4),
    cuts=st.lists(st.tuples(st.floats(0, 40), st.floats(0.5, 20)), max_size=4),
    crashes=st.lists(st.tuples(st.sampled_from(["aggregator", "broker"]), st.floats(0, 40)), max_size=3),
)
def test_whatever_happens_the_books_are_balanced(times: list[DeviceTimes], drops: Any, cuts: Any, crashes: Any) -> None:
    scenario = {
        "drop_out": [{"devices": 1, "at_s": at, "for_s": length} for at, length in drops],
        "outage": [{"devices": 1, "at_s": at, "for_s": length} for at, length in cuts],
        "crash": [{"process": process, "at_s": at, "for_s": 2.0} for process, at in crashes],
    }
    fleet = clock(times, scenario=scenario, rounds=3, deadline_s=60, logging=True)
    outcomes = run(fleet)
    assert [outcome.round for outcome in outcomes] == [1, 2, 3]
    moments = [event.at_s for outcome in outcomes for event in outcome.events]
    assert moments == sorted(moments)
    for each in fleet.fleet:
        spent = each.spent
        assert spent.chosen == spent.used + spent.late + spent.given_up + spent.declined + spent.lost
        assert spent.charged.total() == spent.used + spent.late
        assert each.participations == spent.charged.total()
        assert min(spent.up_bytes, spent.down_bytes, spent.compute_s) >= 0
        assert 0 < spent.on_s <= outcomes[-1].closed_s + 1e-9
    again = run(clock(times, scenario=scenario, rounds=3, deadline_s=60, logging=True))
    assert again == outcomes
