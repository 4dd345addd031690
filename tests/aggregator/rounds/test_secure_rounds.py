"""Rounds of secure aggregation without a network: two phases, late updates, members that lie or are silent, and
restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.errors import BadInput, StoreError, StoreFull
from hushfleet.secure.membership_list import MembershipList, MembershipListContent
from hushfleet.secure.prime_field import PRIMES, add_into
from hushfleet.wire.format.identity import Identity
from support.secure import SecureFleet

Make = Callable[..., SecureFleet]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SecureFleet] = []

    def one(**settings: Any) -> SecureFleet:
        made.append(SecureFleet(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield one
    for fleet in made:
        fleet.store.close()


def unmasked_mean(fleet: SecureFleet, names: list[str]) -> np.ndarray:
    """By an oracle that sees every update."""
    total = np.zeros(256, np.uint32)
    for name in names:
        add_into(total, fleet.integers(name), PRIMES[16])
    return fleet.ring.decode(total) / len(names)


def test_the_model_moves_by_the_mean_of_updates_that_nobody_saw(make: Make) -> None:
    fleet = make()
    before = fleet.engine.global_params.astype(np.float64)
    fleet.engine.open_round(())
    assert not fleet.plan.cohort, "a plan names nobody"
    fleet.send(fleet.names)
    expected = unmasked_mean(fleet, fleet.names)
    assert not fleet.engine.should_close(fleet.now)
    assert fleet.plan.phase == "unmask"
    for member in fleet.round.members:
        assert not fleet.engine.should_close(fleet.now)
        assert fleet.engine.accept(member, fleet.answer(member)).code == "accepted"
    assert fleet.engine.should_close(fleet.now)
    summary = fleet.engine.close()
    assert np.array_equal(fleet.engine.global_params, (before + expected).astype(np.float32))
    assert summary.participants == 10
    assert [row.device for row in fleet.store.charges()] == fleet.names


def test_without_masks_the_models_are_the_same_bit_for_bit(make: Make) -> None:
    with_masks, without = make(), make(masked=False)
    for missing in ([], ["dev-3"], ["dev-7"]):
        for fleet in (with_masks, without):
            fleet.run_round(missing=missing)
        assert with_masks.engine.global_digest == without.engine.global_digest
    assert with_masks.engine.finished


@pytest.mark.parametrize("masked", [True, False])
def test_values_that_may_have_wrapped_around_are_counted(
    make: Make, masked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make(masked=masked)
    assert fleet.run_round().suspected_wraps == 0
    assert "wrapped around" not in caplog.text
    fleet.engine.open_round(())
    loud = np.zeros(256, np.int64)
    loud[[3, 90, 200]] = PRIMES[16] // 2 - np.sum(
        [fleet.integers(name)[[3, 90, 200]] for name in fleet.names[1:]], axis=0
    )
    integers = (loud % PRIMES[16]).astype(np.uint32)
    assert fleet.engine.accept("dev-0", fleet.update("dev-0", integers=integers)).code == "accepted"
    fleet.send(fleet.names[1:])
    fleet.engine.should_close(fleet.now)
    for member in fleet.round.members if masked else ():
        fleet.engine.accept(member, fleet.answer(member))
    summary = fleet.engine.close()
    assert (summary.participants, summary.suspected_wraps) == (10, 3)
    assert "3 of 256 values of the sum" in caplog.text


def opened(fleet: SecureFleet, senders: list[str] | None = None) -> SecureFleet:
    """A round whose set of devices is settled."""
    fleet.engine.open_round(())
    fleet.send(fleet.names if senders is None else senders)
    fleet.now += 600
    assert not fleet.engine.should_close(fleet.now)
    assert fleet.plan.phase == "unmask"
    return fleet


def test_once_the_set_is_settled_an_update_comes_too_late(make: Make) -> None:
    fleet = make()
    fleet.engine.open_round(())
    late, again = fleet.update("dev-9"), fleet.update("dev-0")
    fleet.send(fleet.names[:9])
    fleet.now += 600
    fleet.engine.should_close(fleet.now)
    assert fleet.plan.phase == "unmask"
    verdict = fleet.engine.accept("dev-9", late)
    assert (verdict.code, verdict.acknowledged) == ("late", False)
    assert fleet.engine.accept("dev-0", again).acknowledged, "it is in the store"
    assert len(fleet.store.updates(1)) == 9


def test_a_member_whose_decline_comes_late_still_answers(make: Make) -> None:
    """A device hears of the round after the aggregator has opened it, so its deadline passes later."""
    fleet = opened(make(), [f"dev-{number}" for number in range(9)])
    assert not fleet.engine.decline("dev-9", "busy", "the round's deadline passed", round=1)
    assert fleet.engine.accept("dev-9", fleet.answer("dev-9")).code == "accepted"


def test_a_round_that_a_full_disk_delayed_goes_on_after_a_kill(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its membership list is stored when it opens at last, not only when that is tried for the first time."""
    fleet = make()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "open_round", Mock(side_effect=StoreFull("no space")))
        with pytest.raises(StoreFull):
            fleet.engine.open_round(())
    plan = fleet.engine.open_round(())
    assert fleet.restart().announcement == plan
    fleet.send(fleet.names)
    assert fleet.engine.accepted == 10


def test_a_sum_of_too_few_devices_is_extended_and_never_opened(make: Make) -> None:
    fleet = make()
    before = fleet.engine.global_digest
    fleet.engine.open_round(())
    fleet.send(fleet.names[:5])
    deadline = fleet.plan.deadline_s
    fleet.now += 600
    assert not fleet.engine.should_close(fleet.now, ready=10)
    assert fleet.plan.phase == "open"
    assert fleet.plan.deadline_s > deadline
    for name in fleet.names[5:]:
        fleet.engine.decline(name, "busy", "", round=1)
    fleet.now += 600
    assert fleet.engine.should_close(fleet.now, ready=10)
    summary = fleet.engine.close()
    assert (summary.participants, fleet.engine.global_digest) == (0, before)
    assert len(fleet.store.charges()) == 5, "what was sent is charged"


def test_members_that_stay_silent_hold_up_nobody_for_ever(make: Make) -> None:
    fleet = opened(make())
    before, extended = fleet.engine.global_digest, 0
    for member in fleet.round.members[: fleet.round.rule.threshold - 1]:
        fleet.engine.accept(member, fleet.answer(member))
    while not fleet.engine.should_close(fleet.now + 600, ready=10):
        fleet.now += 600
        extended += 1
        assert extended < 10
    assert extended == 3
    assert fleet.engine.close().participants == 0
    assert fleet.engine.global_digest == before
    fleet.run_round()
    assert fleet.engine.global_digest != before


def test_enough_answers_are_waited_upon_for_a_moment_only(make: Make) -> None:
    fleet = opened(make())
    for member in fleet.round.members[: fleet.round.rule.threshold]:
        fleet.engine.accept(member, fleet.answer(member))
    assert not fleet.engine.should_close(fleet.now + 9)
    assert fleet.engine.should_close(fleet.now + 10)
    assert fleet.engine.close().participants == 10


def test_a_lie_among_all_answers_changes_nothing(make: Make) -> None:
    honest, lied = opened(make()), opened(make())
    for fleet in (honest, lied):
        for place, member in enumerate(fleet.round.members):
            answer = fleet.answer(member, change=int(fleet is lied and place == 4))
            assert fleet.engine.accept(member, answer).code == "accepted"
        assert fleet.engine.should_close(fleet.now)
        fleet.engine.close()
    assert lied.engine.global_digest == honest.engine.global_digest
    assert not lied.store.faults(), "a device's wrong mask would look the same"


def test_answers_that_contradict_each_other_are_waited_with_for_another(make: Make) -> None:
    fleet = opened(make())
    members, least = fleet.round.members, fleet.round.rule.threshold
    for place, member in enumerate(members[: least + 1]):
        fleet.engine.accept(member, fleet.answer(member, change=int(place == 2)))
    fleet.now += 10
    assert not fleet.engine.should_close(fleet.now)
    fleet.engine.accept(members[least + 1], fleet.answer(members[least + 1]))
    assert fleet.engine.should_close(fleet.now + 10)
    assert fleet.engine.close().participants == 10


def test_answers_that_contradict_each_other_are_waited_with_for_a_lost_member(make: Make) -> None:
    fleet = opened(make())
    *others, last = fleet.round.members
    for place, member in enumerate(others):
        fleet.engine.accept(member, fleet.answer(member, change=int(place == 2)))
    fleet.engine.lost(last)
    fleet.now += 600
    for _ in range(5):
        assert not fleet.engine.should_close(fleet.now), "it may come back before the extended deadline"
    assert fleet.engine.responses.extensions == 1
    fleet.engine.back(last)
    fleet.engine.accept(last, fleet.answer(last))
    assert fleet.engine.should_close(fleet.now)
    assert fleet.engine.close().participants == 10


def test_a_lie_that_nothing_contradicts_makes_an_absurd_sum_which_is_not_taken(make: Make) -> None:
    fleet = opened(make())
    before = fleet.engine.global_digest
    for place, member in enumerate(fleet.round.members[: fleet.round.rule.threshold]):
        fleet.engine.accept(member, fleet.answer(member, change=777 * (place == 0)))
    fleet.now += 600
    while not fleet.engine.should_close(fleet.now):
        fleet.now += 600
    assert fleet.engine.close().participants == 0
    assert fleet.engine.global_digest == before


def test_answers_are_refused_with_a_reason(make: Make) -> None:
    fleet = make(devices=101, min_devices=60, unit={"delta": 1e-5})
    fleet.engine.open_round(())
    fleet.send(fleet.names)
    fleet.engine.should_close(fleet.now)
    first, second, third = fleet.round.members[:3]
    stranger = next(name for name in fleet.names if name not in fleet.round.members)
    good = fleet.answer(first)
    assert fleet.plan.secure is not None
    other_set = bytes([fleet.plan.secure.included[0] ^ 128]) + fleet.plan.secure.included[1:]
    accept = fleet.engine.accept
    assert accept(second, good).code == "bad-signature"
    refused = accept(second, fleet.answer(second, included=other_set))
    assert (refused.code, refused.kind) == ("malformed", "answer")
    assert fleet.store.faults() == {second: 1}
    assert accept(third, fleet.answer(third)[:-70]).code == "malformed"
    assert accept(third, b"HM\x01\x00").code == "malformed"
    assert accept(stranger, good).code == "late"
    assert accept(first, good).acknowledged
    assert accept(first, good).acknowledged
    assert accept(first, fleet.answer(first, change=1)).code == "duplicate"
    fleet.engine.exclude(third)
    assert accept(third, fleet.answer(third)).code == "unknown-device"


def test_updates_that_do_not_fit_are_refused_with_a_reason(make: Make) -> None:
    fleet = make()
    fleet.engine.open_round(())
    values = fleet.integers("dev-0")
    cases = {
        "wrong-shape": fleet.update("dev-0", integers=values[:-1]),
        "malformed": fleet.update("dev-1", codec="float32"),
        "out-of-bounds": fleet.update("dev-2", multiplier_server=9.0),
        "late": fleet.update("dev-3", round=2),
    }
    for place, (code, data) in enumerate(cases.items()):
        assert fleet.engine.accept(f"dev-{place}", data).code == code
    assert fleet.engine.accepted == 0
    assert not fleet.store.updates(1)


def test_wherever_the_aggregator_is_killed_the_bits_are_the_same(make: Make) -> None:
    calm, killed = make(rounds=2), make(rounds=2)
    for number in (1, 2):
        calm.run_round(missing=["dev-3"])
        killed.engine.open_round(())
        killed.restart()
        for name in [each for each in killed.names if each != "dev-3"]:
            killed.send([name])
            killed.restart()
        killed.engine.decline("dev-3", "busy", "", round=number)
        killed.restart()
        assert not killed.engine.should_close(killed.now)
        included = killed.plan.secure
        killed.restart()
        assert (killed.plan.phase, killed.plan.secure) == ("unmask", included)
        for member in [each for each in killed.round.members if each != "dev-3"]:
            assert killed.engine.accept(member, killed.answer(member)).acknowledged
            killed.restart()
            assert killed.engine.accept(member, killed.answer(member)).acknowledged
        killed.now += 60
        assert killed.engine.should_close(killed.now)
        killed.restart()
        killed.now += 60
        assert killed.engine.should_close(killed.now)
        killed.engine.close()
        killed.restart()
        assert killed.engine.global_digest == calm.engine.global_digest
    assert killed.engine.finished


def test_a_cohort_is_drawn_by_the_membership_list_and_the_round_alone(make: Make) -> None:
    fleet = make(devices=100, min_devices=30, cohort_size=50)
    fleet.engine.open_round(fleet.names[:3])
    cohort = set(fleet.engine.cohort)
    assert 30 <= len(cohort) <= 70
    outside = next(name for name in fleet.names if name not in cohort)
    inside = min(cohort)
    data = fleet.update(inside)
    assert fleet.engine.accept(inside, data).code == "accepted"
    offered = CheckedUpdate(outside, kind="offer", task="tiny-0001", round=1, digest=bytes(32))
    assert not fleet.engine.admit(offered)
    assert offered.code == "not-in-cohort"
    fleet.restart()
    assert set(fleet.engine.cohort) == cohort


def test_a_draw_of_too_few_devices_is_given_up_at_once(make: Make) -> None:
    fleet = make(devices=40, min_devices=20, cohort_size=20, rounds=30, unit={"delta": 1e-5})
    before = fleet.engine.global_digest
    fleet.engine.open_round(())
    while fleet.engine.cohort:  # half of all draws are of fewer than 20
        fleet.engine.close()
        fleet.engine.open_round(())
    number = fleet.plan.round
    assert fleet.engine.should_close(fleet.now)
    fleet.restart()
    assert fleet.engine.should_close(fleet.now)
    assert fleet.engine.close().participants == 0
    assert (fleet.engine.closed_rounds, fleet.engine.global_digest) == (number, before)


@pytest.mark.parametrize("cohort_size", [None, 20])
def test_a_task_that_goes_beyond_what_the_operator_signed_is_not_opened(make: Make, cohort_size: int | None) -> None:
    """Nor given up round after round, as a draw of too few is."""
    fleet = make(devices=40, min_devices=8, **({} if cohort_size is None else {"cohort_size": cohort_size}))
    keys = {name: each.public_key for name, each in fleet.identities.items()}
    operator = Identity.generate()
    for limits, why in (
        ({"honest_fraction": 0.9, "min_devices": 8}, "of 1 of the devices is honest; the operator has signed 0.9"),
        (
            {"honest_fraction": 1.0, "min_devices": 9},
            "sums of 8 devices; the operator has signed 9 or more in membership list",
        ),
    ):
        with pytest.raises(BadInput, match=why):
            fleet.engine.open_round((), membership_list=MembershipListContent.of(keys, **limits).signed(operator))
        assert fleet.engine.plan is None
    signed = MembershipListContent.of(keys, honest_fraction=1.0, min_devices=8).signed(operator)
    assert fleet.engine.open_round((), membership_list=signed).round == 1


@pytest.mark.parametrize("cohort_size", [None, 20])
def test_a_fleet_that_has_outgrown_its_task_opens_no_round(make: Make, cohort_size: int | None) -> None:
    """Nor gives up all of its rounds: of more boards more may be corrupt than the noise allows, in almost any draw."""
    drawn = {} if cohort_size is None else {"cohort_size": cohort_size}
    fleet = make(devices=40, min_devices=16, honest_fraction=0.9, unit={"delta": 1e-5}, **drawn)
    keys = {name: each.public_key for name, each in fleet.identities.items()}
    more = keys | {f"new-{index}": Identity.from_bytes(bytes([index]) * 32).public_key for index in range(100, 120)}
    with pytest.raises(BadInput, match=f"of 16 may have only 10, with {cohort_size or 60} of 60 devices drawn"):
        fleet.engine.open_round((), membership_list=MembershipList.of(more))
    assert (fleet.engine.plan, fleet.engine.closed_rounds) == (None, 0)
    assert fleet.engine.open_round((), membership_list=MembershipList.of(keys)).round == 1


def test_a_round_that_an_earlier_version_has_opened_is_refused_in_words(make: Make) -> None:
    fleet = make()
    fleet.engine.open_round(())
    assert fleet.engine.membership_list is not None
    fields = msgspec.msgpack.decode(fleet.engine.membership_list)
    old = msgspec.msgpack.encode({name: fields[name] for name in ("devices", "keys", "signature")})
    fleet.store.put("roster", old)
    with pytest.raises(StoreError, match="an earlier version of Hushfleet"):
        fleet.restart()
