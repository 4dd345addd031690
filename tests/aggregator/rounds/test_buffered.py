"""Buffered rounds (FedBuff): what is summed, how much it counts, who may hand in what, and resuming."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.metrics import privacy_tables
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import BadInput
from hushfleet.wire.format.messages import Ack, RoundPlan
from support.field import Field
from support.fleet import Fleet, Signed

RULES = {"mode": "buffered", "method": "dp-fedavg", "accounting": "strict", "wire": {"downlink": "full"}}


def buffered(folder: Path, **settings: Any) -> Fleet:
    fleet = Fleet(folder, **(RULES | {"devices": 5, "buffer_size": 3, "max_staleness": 2, "rounds": 40} | settings))
    fleet.open()
    return fleet


def hand_in(fleet: Fleet, name: str, update: Signed, public: bytes | None = None) -> str:
    """Hands an update in as a board does: with its public state where that is asked for; closes a full buffer."""
    found = fleet.engine.accept(name, update.data)
    if found.code == "state-unknown" and public is not None:
        again = fleet.devices.sign(name, update.header, update.values, update.counts, public=public)
        found = fleet.engine.accept(name, again.data)
    if fleet.engine.should_close():
        fleet.engine.close()
        if not fleet.engine.finished:
            fleet.open()
    return found.code


class SlowFedBuff:
    """Algorithm 1 of Nguyen et al. (2022), written down naively, in double precision: the server's part."""

    def __init__(self, start: np.ndarray, size: int) -> None:
        self.model, self.size, self.version = start.astype(np.float64), size, 0
        self.buffer: list[np.ndarray] = []

    def take(self, change: np.ndarray, trained_on: int) -> None:
        staleness = self.version - trained_on
        self.buffer.append(change / math.sqrt(1 + staleness))
        if len(self.buffer) == self.size:
            self.model = self.model + sum(self.buffer) / self.size
            self.buffer, self.version = [], self.version + 1


@settings(max_examples=20, deadline=None)
@given(
    turns=st.lists(st.integers(0, 4), min_size=10, max_size=60),
    size=st.integers(1, 4),
    most=st.integers(1, 3),
    kills=st.sets(st.integers(0, 59), max_size=3),
)
def test_it_is_fedbuff_whoever_comes_when(turns: list[int], size: int, most: int, kills: set[int]) -> None:
    """At each turn one device begins to train on the newest model, or hands in what it has trained."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = buffered(Path(folder), buffer_size=size, max_staleness=most)
        slow = SlowFedBuff(fleet.engine.global_params, size)
        at_work: dict[str, tuple[Signed, bytes]] = {}
        begun: dict[str, int] = {}
        for turn, index in enumerate(turns):
            if turn in kills:
                fleet.restart()
            name, plan = fleet.names[index], fleet.engine.plan
            assert plan is not None
            if name in at_work:
                update, public = at_work.pop(name)
                old = plan.round - update.header.round > most
                assert hand_in(fleet, name, update, public) == ("late" if old else "accepted")
                if not old:
                    slow.take(update.encoded.sent.astype(np.float64), update.header.round - 1)
                np.testing.assert_allclose(fleet.engine.global_params, slow.model, atol=1e-4)
                assert fleet.engine.closed_rounds == slow.version
            elif begun.get(name) != plan.round:
                public = fleet.devices.states[name].public.to_bytes()
                at_work[name], begun[name] = (fleet.update(name), public), plan.round
        fleet.store.close()


def test_the_plan_names_nobody_and_lets_everybody_in(tmp_path: Path) -> None:
    fleet = buffered(tmp_path)
    plan = fleet.engine.plan
    assert plan is not None
    assert (plan.cohort, plan.max_staleness, plan.noise_split) == ({}, 2, 1)
    assert plan.names("a board that was asleep")
    assert hand_in(fleet, "dev-4", fleet.update("dev-4")) == "accepted"


def test_the_order_of_arrival_changes_no_bit_and_a_stale_update_counts_less(tmp_path: Path) -> None:
    found = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        fleet = buffered(tmp_path / str(order), buffer_size=4)
        stale = fleet.update("dev-0")
        for name in fleet.names[1:]:
            hand_in(fleet, name, fleet.update(name))
        assert fleet.engine.closed_rounds == 1
        updates = [("dev-0", stale), *((name, fleet.update(name)) for name in fleet.names[1:4])]
        before = fleet.engine.global_params.astype(np.float64)
        for place in order:
            assert hand_in(fleet, *updates[place]) == "accepted"
        counted = [stale.encoded.sent / math.sqrt(2), *(update.encoded.sent for _, update in updates[1:])]
        np.testing.assert_allclose(fleet.engine.global_params, before + sum(counted) / 4, atol=1e-5)
        found.append(fleet.engine.global_digest)
    assert len(set(found)) == 1


def test_a_killed_aggregator_goes_on_with_the_same_buffer(tmp_path: Path) -> None:
    digests = []
    for killed in (False, True):
        fleet = buffered(tmp_path / str(killed))
        stale = fleet.update("dev-0")
        for name in fleet.names[1:4]:
            hand_in(fleet, name, fleet.update(name))
        for name, update in (("dev-0", stale), ("dev-1", fleet.update("dev-1")), ("dev-2", fleet.update("dev-2"))):
            hand_in(fleet, name, update)
            if killed and fleet.engine.accepted:
                accepted = fleet.engine.accepted
                assert fleet.restart().accepted == accepted
                assert fleet.engine.accept(name, update.data).code == "duplicate"
        assert fleet.engine.closed_rounds == 2
        digests.append(fleet.engine.global_digest)
    assert digests[0] == digests[1]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing in memory is used again."""


def kill(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.mark.parametrize("step", ["put_update", "put_charge", "close_round", "open_round"])
def test_a_kill_inside_a_transaction_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The last update of a buffer comes, of an older version; the buffer closes, the next version opens."""
    digests = []
    for killed in (False, True):
        fleet = buffered(tmp_path / str(killed), buffer_size=2, method="hush", rounds=6)
        stale = fleet.update("dev-0")
        for name in ("dev-1", "dev-2", "dev-3"):
            hand_in(fleet, name, fleet.update(name))
        assert (fleet.engine.closed_rounds, fleet.engine.accepted) == (1, 1)
        if killed:
            monkeypatch.setattr(fleet.store, step, kill)
            with pytest.raises(Killed):
                hand_in(fleet, "dev-0", stale)
            fleet.restart()
            found = fleet.engine.accept("dev-0", stale.data)
            assert found.code == ("accepted" if step in ("put_update", "put_charge") else "duplicate")
            if fleet.engine.should_close():
                fleet.engine.close()
            if fleet.engine.plan is None:
                fleet.open()
        else:
            hand_in(fleet, "dev-0", stale)
        assert fleet.engine.announcement.round == 3
        assert len(fleet.store.charges()) == 4
        digests.append((fleet.engine.global_digest, fleet.engine.announcement, fleet.store.get("controls")))
    assert digests[0] == digests[1]


def test_one_update_counts_once_whichever_buffer_it_is_offered_for(tmp_path: Path) -> None:
    fleet = buffered(tmp_path)
    first = fleet.update("dev-0")
    assert hand_in(fleet, "dev-0", first) == "accepted"
    for name in ("dev-1", "dev-2"):
        hand_in(fleet, name, fleet.update(name))
    assert fleet.engine.closed_rounds == 1
    again = fleet.engine.accept("dev-0", first.data)  # the second buffer is open
    assert (again.code, again.acknowledged, fleet.engine.accepted) == ("duplicate", True, 0)
    assert [len(fleet.store.updates(round)) for round in (1, 2)] == [3, 0]
    assert len(fleet.store.charges()) == 3


def test_a_second_update_for_one_version_is_refused(tmp_path: Path) -> None:
    fleet = buffered(tmp_path)
    fleet.engine.accept("dev-0", fleet.update("dev-0", advance=False).data)
    other = fleet.engine.accept("dev-0", fleet.update("dev-0", seed=99).data)
    assert (other.code, other.acknowledged) == ("duplicate", False)


@pytest.mark.parametrize("round", [4, 1])
def test_a_version_that_is_unknown_or_too_old_is_refused(tmp_path: Path, round: int) -> None:
    fleet = buffered(tmp_path, buffer_size=1, max_staleness=1)
    plans: list[RoundPlan] = []
    for name in ("dev-1", "dev-2"):
        plans.append(fleet.engine.announcement)
        hand_in(fleet, name, fleet.update(name))
    assert fleet.engine.announcement.round == 3
    update = fleet.devices.update("dev-0", plans[0])
    forged = fleet.devices.sign("dev-0", update.header, update.values, update.counts, round=round)
    found = fleet.engine.accept("dev-0", forged.data)
    assert (found.code, found.acknowledged, fleet.engine.accepted) == ("late", False, 0)
    assert fleet.store.faults() == {}, "an honest board may be late"


def test_there_is_no_version_zero(tmp_path: Path) -> None:
    fleet = buffered(tmp_path)
    update = fleet.update("dev-0")
    forged = fleet.devices.sign("dev-0", update.header, update.values, update.counts, round=0)
    assert fleet.engine.accept("dev-0", forged.data).code == "late"


def test_updates_of_one_device_that_come_in_the_wrong_order_do_not_turn_its_state_back(tmp_path: Path) -> None:
    fleet = buffered(tmp_path, buffer_size=1)
    state = fleet.devices.states["dev-0"].public.to_bytes()
    older = fleet.update("dev-0")
    hand_in(fleet, "dev-1", fleet.update("dev-1"))
    newer_state = fleet.devices.states["dev-0"].public.to_bytes()
    assert hand_in(fleet, "dev-0", fleet.update("dev-0"), newer_state) == "accepted"
    held = fleet.store.public_state("dev-0")
    assert hand_in(fleet, "dev-0", older, state) == "late"
    assert fleet.store.public_state("dev-0") == held


def test_a_hoard_of_old_updates_does_not_fill_a_buffer(tmp_path: Path) -> None:
    fleet = buffered(tmp_path, max_staleness=10)
    hoard: list[tuple[Signed, bytes]] = []
    for _ in range(4):
        state = fleet.devices.states["dev-0"].public.to_bytes()
        hoard.append((fleet.update("dev-0"), state))
        for name in ("dev-1", "dev-2", "dev-3"):
            hand_in(fleet, name, fleet.update(name))
    found = [hand_in(fleet, "dev-0", *each) for each in hoard]
    assert found == ["accepted", "accepted", "next-sum", "next-sum"]
    assert (fleet.engine.closed_rounds, fleet.engine.accepted, fleet.store.faults()) == (4, 2, {})
    hand_in(fleet, "dev-1", fleet.update("dev-1"))
    assert hand_in(fleet, "dev-0", *hoard[2]) == "accepted", "the next sum takes it"


def test_a_third_update_for_one_sum_is_not_answered_and_comes_again(make_field: Callable[..., Field]) -> None:
    field = make_field(**(RULES | {"devices": 4, "buffer_size": 3, "max_staleness": 5, "rounds": 9}))
    field.join_all()
    hoard = []
    for _ in range(3):
        hoard.append(field.fleet.update("dev-0").data)
        for name in ("dev-1", "dev-2", "dev-3"):
            field.deliver(name, field.fleet.update(name).data)
    answers = [field.deliver("dev-0", data, round=round) for round, data in enumerate(hoard, start=1)]
    assert [type(answer) for answer in answers] == [Ack, Ack, type(None)]
    assert isinstance(field.deliver("dev-1", field.fleet.update("dev-1").data), Ack)
    assert field.plan.round == 5
    assert isinstance(field.deliver("dev-0", hoard[2], round=3), Ack)
    assert field.refusals() == {}


def test_a_board_is_not_blamed_where_its_version_is_not_kept(tmp_path: Path) -> None:
    """The operator has raised `max_staleness`, and the controls of older versions were dropped before."""
    fleet = buffered(tmp_path, method="hush", buffer_size=1, max_staleness=1, rounds=8)
    state, stale = fleet.devices.states["dev-0"].public.to_bytes(), fleet.update("dev-0")
    for _ in range(4):
        hand_in(fleet, "dev-1", fleet.update("dev-1"))
    task = fleet.prepared.task
    task = replace(task, round=replace(task.round, max_staleness=9))
    fleet.prepared = replace(fleet.prepared, task=task)
    fleet.restart()
    assert hand_in(fleet, "dev-0", stale, state) == "late"
    assert fleet.store.faults() == {}


def test_a_run_that_goes_on_with_buffered_rounds_takes_its_open_round_over(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, **(RULES | {"mode": "synchronous", "devices": 5, "rounds": 40}))
    fleet.open()
    assert fleet.engine.accept("dev-0", fleet.update("dev-0").data).code == "accepted"
    task = fleet.prepared.task
    rules = replace(task.round, mode="buffered", buffer_size=2, max_staleness=2)
    fleet.prepared = replace(fleet.prepared, task=replace(task, round=rules))
    fleet.restart()
    assert (fleet.engine.announcement.max_staleness, fleet.engine.accepted) == (2, 1)
    assert hand_in(fleet, "dev-1", fleet.update("dev-1")) == "accepted"
    assert fleet.engine.closed_rounds == 1


def test_what_a_stale_update_had_to_fetch_is_what_led_to_its_own_version(tmp_path: Path) -> None:
    fleet = buffered(tmp_path, buffer_size=1, max_staleness=5, wire={"downlink": "difference"})
    hand_in(fleet, "dev-0", fleet.update("dev-0"))
    stale = fleet.update("dev-0")
    for _ in range(2):
        hand_in(fleet, "dev-1", fleet.update("dev-1"))
    sizes = [difference.size for difference in fleet.engine.announcement.differences]
    assert len(sizes) == 3
    assert hand_in(fleet, "dev-0", stale) == "accepted"
    metrics = fleet.store.rounds()[3].metrics
    assert metrics is not None
    assert metrics["downlink_bytes"] == sizes[0]
    assert fleet.engine.progress.trained_on == fleet.store.held_models(until=4)


def test_a_stale_update_is_released_also_where_its_own_version_has_no_update(tmp_path: Path) -> None:
    """In a simulation a version may close without one, where boards decline."""
    fleet = buffered(tmp_path, buffer_size=1)
    stale = fleet.update("dev-0")
    fleet.engine.close()
    fleet.open()
    hand_in(fleet, "dev-0", stale)
    (table,) = privacy_tables(fleet.store, [math.inf], delta=0.01)
    assert table["dev-0"].epsilon_release == table["dev-0"].epsilon_server > 0


def test_a_stale_update_is_held_to_the_noise_of_its_own_version(tmp_path: Path) -> None:
    """The method `hush` asks for another clip norm and another noise in each round."""
    fleet = buffered(tmp_path, method="hush", buffer_size=1, rounds=6)
    for _ in range(4):
        hand_in(fleet, "dev-1", fleet.update("dev-1"))
    first, state = fleet.engine.announcement, fleet.devices.states["dev-0"].public.to_bytes()
    update = fleet.update("dev-0")
    hand_in(fleet, "dev-1", fleet.update("dev-1"))
    second = fleet.engine.announcement
    assert first.controls["noise_multiplier"] < second.controls["noise_multiplier"]
    fleet.restart()
    louder = fleet.devices.sign(
        "dev-0", update.header, update.values, update.counts, public=state,
        multiplier_server=second.controls["noise_multiplier"],
    )  # fmt: skip
    assert fleet.engine.accept("dev-0", louder.data).code == "out-of-bounds"
    assert hand_in(fleet, "dev-0", update, state) == "accepted"
    assert [row.noise_multiplier for row in fleet.store.charges() if row.device == "dev-0"] == [
        pytest.approx(first.controls["noise_multiplier"])
    ]


def test_each_update_protects_itself_alone_and_is_charged_for_its_version(tmp_path: Path) -> None:
    fleet = buffered(tmp_path / "run", buffer_size=2)
    with DeviceRegister(tmp_path) as register:
        book = ChargeBook(register, fleet.engine)
        book.expect(fleet.names)
        stale = fleet.update("dev-0")
        for name in ("dev-1", "dev-2"):
            hand_in(fleet, name, fleet.update(name))
        book.closed(1)
        book.expect(fleet.names)
        hand_in(fleet, "dev-0", stale)
        hand_in(fleet, "dev-0", fleet.update("dev-0"))  # twice in one buffer, of two versions
        book.closed(2)
        notes = register.charges("dev-0", after=("", -1), at_most=9)
    assert fleet.engine.closed_rounds == 2
    assert [(task, round) for task, round, _ in notes] == [("tiny-0001", 1), ("tiny-0001", 2)]
    (table,) = privacy_tables(fleet.store, [math.inf], delta=0.01)
    row = table["dev-0"]
    assert row.rounds_charged == 2
    assert row.epsilon_release == row.epsilon_server, "nobody else's noise is counted on"


def test_versions_that_a_board_has_passed_over_are_not_noted_for_ever(tmp_path: Path) -> None:
    """A slow board is told of each version. It trains three of seven, and one of these updates is never accepted."""
    fleet = buffered(tmp_path / "run", method="hush", buffer_size=1, rounds=7)
    with DeviceRegister(tmp_path) as register:
        book = ChargeBook(register, fleet.engine)

        def passes(name: str, update: Signed, public: bytes | None = None) -> None:
            assert hand_in(fleet, name, update, public) == "accepted"
            book.closed(fleet.engine.closed_rounds)
            book.expect(fleet.names[:2])

        def noted() -> list[int]:
            return [round for _, round, _ in register.charges("dev-0")]

        book.expect(fleet.names[:2])
        passes("dev-0", fleet.update("dev-0"))
        for _ in range(5):
            if fleet.engine.announcement.round == 3:
                fleet.update("dev-0")  # it is lost
            passes("dev-1", fleet.update("dev-1"))
        assert noted() == [1, 2, 3, 4, 5, 6, 7]
        state = fleet.devices.states["dev-0"].public.to_bytes()
        passes("dev-0", fleet.update("dev-0"), state)
        kept = [1, 5, 7]  # nobody knows which of 2 to 6 was lost: 6 has more noise than the others
        assert noted() == kept
        ChargeBook(register, fleet.engine)
        assert noted() == kept


TASK = {
    "name": "t",
    "model": {"name": "linear"},
    "method": {"name": "dp-fedavg"},
    "data": {"name": "digits", "devices": 8},
    "privacy": {"noise_multiplier": 1.0},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": {"mode": "buffered"}}, "needs buffer_size"),
        ({"round": {"buffer_size": 3}}, 'need mode = "buffered"'),
        ({"round": {"mode": "buffered", "buffer_size": 9}}, "take 8 or fewer"),
        ({"round": {"mode": "buffered", "buffer_size": 3, "quorum": 0.5}}, "quorum = 0.5"),
        ({"round": {"mode": "buffered", "buffer_size": 3, "aggregation": "median"}}, "needs the 'mean'"),
        ({"privacy": {"accounting": "secure", "epsilon": 2.0}}, "The sum over whoever comes in a window is"),
        ({"privacy": {"accounting": "as-published", "noise_multiplier": 1.0}}, "each update of a buffer has its whole"),
        ({"method": {"name": "dp-fedsim"}}, "weighs updates"),
        ({"method": {"name": "acdp-pfsd"}}, "steers a round by the reports"),
    ],
)
def test_what_has_no_meaning_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_task(TASK | {"round": {"mode": "buffered", "buffer_size": 3}} | changes)


def test_a_task_says_how_stale_an_update_may_be() -> None:
    task = parse_task(TASK | {"round": {"mode": "buffered", "buffer_size": 3}})
    assert parse_task(task.to_plain()) == task
    assert task.round.max_staleness == 20
