"""Rounds with secure aggregation: a real device, the rest of the fleet played by the test, and the sum that comes
out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.worker import handover
from hushfleet.errors import BadInput, CopiedStore
from hushfleet.privacy.ring import Ring
from hushfleet.secure.prime_field import add_into
from hushfleet.secure.secure_round import SecureRound
from hushfleet.secure.unmasking_share import decode_answer, is_answer
from hushfleet.simulator.world.hub import Chaos
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan, SecurePlan
from hushfleet.wire.format.spec import BlobRef
from hushfleet.wire.format.update import max_update_bytes
from support.edge import DEVICE, Bench, Package
from support.secure_fleet import SecureFleet, with_secure_aggregation

MakeBench = Callable[..., Bench]
MakeFleet = Callable[..., SecureFleet]


@pytest.fixture
def make_fleet(make_bench: MakeBench, package: Package, config: DeviceConfig) -> MakeFleet:
    def make(
        *, others: int = 11, honest_fraction: float = 0.9, chaos: Chaos | None = None, **of_device: object
    ) -> SecureFleet:
        limits = replace(config.limits, accounting="secure", min_devices=8, honest_fraction=honest_fraction)
        trusting = replace(config, limits=limits, device=replace(config.device, **of_device))
        summed = with_secure_aggregation(package, honest_fraction=honest_fraction)
        return SecureFleet(make_bench(package=summed, config=trusting, chaos=chaos), others)

    return make


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The integers of each update before they are masked."""
    seen: list[np.ndarray] = []
    encode = Ring.encode

    def noted(self: Ring, *arguments: object) -> np.ndarray:
        seen.append(encode(self, *arguments))
        return seen[-1].copy()

    monkeypatch.setattr(Ring, "encode", noted)
    return seen


def sent(fleet: SecureFleet, round: int) -> RoundPlan:
    """Opens a round, and lets the device have its update acknowledged."""
    plan = fleet.open_round(round)
    bench = fleet.bench
    bench.acked(round)
    return plan


def answer_of(fleet: SecureFleet, round: int) -> str | None:
    entry = fleet.bench.store.answers.of(fleet.spec.task, round)
    return None if entry is None else entry.status


def test_the_sum_of_a_round_opens_and_nothing_else_does(make_fleet: MakeFleet, encoded: list[np.ndarray]) -> None:
    fleet = make_fleet()
    plan = sent(fleet, 1)
    secure_round = fleet.of(plan)
    included = secure_round.devices[:-2]
    assert DEVICE in included
    (update,) = fleet.bench.server.updates
    header, values = fleet.read(update)
    assert (header.codec, header.value_count) == ("masked", fleet.shared)
    assert (values[: fleet.shared] != encoded[0]).mean() > 0.99
    (entry,) = fleet.bench.store.ledger.entries()
    assert entry.payload_digest == fleet.bench.store.outbox(fleet.spec.task, 1).digest

    bitmap = secure_round.pack_included(included)
    fleet.unmask(plan, bitmap)
    fleet.bench.until(lambda: answer_of(fleet, 1) == "acked")
    _, answer = fleet.bench.server.updates
    assert is_answer(answer)
    assert decode_answer(answer, public_key=fleet.bench.store.identity.public_key).header.round == 1
    sums, expected = fleet.sum(secure_round, update, included)
    add_into(expected, encoded[0], secure_round.prime)
    opened, _ = secure_round.opened(sums, fleet.answers(secure_round, bitmap, answer))
    np.testing.assert_array_equal(opened, expected)
    assert fleet.bench.server.declines == []
    assert fleet.bench.agent.rejected.total == 0
    assert len(encoded) == 1


def refused(fleet: SecureFleet, plan: RoundPlan, included: bytes, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """The device must not answer, and says why in its own log."""
    answered, sent_before = answer_of(fleet, plan.round), len(fleet.bench.server.updates)
    with caplog.at_level(logging.ERROR, logger="hushfleet.edge"):
        fleet.unmask(plan, included)
        fleet.bench.steps(40)
    assert why in caplog.text
    assert (answer_of(fleet, plan.round), len(fleet.bench.server.updates)) == (answered, sent_before)
    assert fleet.bench.server.declines == []  # nobody hears of it


def test_the_guardian_lets_an_update_be_as_long_as_its_committee_makes_it(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fleet of fifty an update of 24 or 32 bits a value is longer than all its values in float32."""
    seen: list[int] = []
    monkeypatch.setattr(handover, "max_update_bytes", lambda size: seen.append(size) or max_update_bytes(size))
    fleet = make_fleet(others=15)
    secure_round = fleet.of(sent(fleet, 1))
    _, values = fleet.read(fleet.bench.server.updates[0])
    assert secure_round.rule.may_miss > 0
    assert seen == [secure_round.sent] == [len(values)]


def test_a_second_set_is_never_answered(make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture) -> None:
    """Two sums that differ by one device would tell what it has sent."""
    fleet = make_fleet()
    plan = sent(fleet, 1)
    secure_round = fleet.of(plan)
    first = secure_round.pack_included(secure_round.devices)
    fleet.unmask(plan, first)
    fleet.bench.until(lambda: answer_of(fleet, 1) == "acked")
    refused(fleet, plan, secure_round.pack_included(secure_round.devices[:-1]), caplog, "a second sum of round 1")
    fleet.bench.restart()
    caplog.clear()
    refused(fleet, plan, secure_round.pack_included(secure_round.devices[1:]), caplog, "a second sum of round 1")
    # the first set, asked for again by an aggregator that has lost its store: the same bytes
    answer = fleet.bench.server.updates.pop()
    fleet.bench.server._open.clear()
    fleet.unmask(plan, first)
    fleet.bench.until(lambda: len(fleet.bench.server.updates) == 2)
    assert fleet.bench.server.updates[-1] == answer


@pytest.mark.parametrize(
    ("bitmap", "why"),
    [
        (lambda of: of.pack_included(of.devices[:7]), "the sum has 7 devices"),
        (lambda of: of.pack_included(of.devices) + b"\0", "a bitmap of 3 bytes"),
        (lambda of: b"\xff", "a bitmap of 1 bytes"),
        (lambda of: b"\xff\xff", "a bitmap of 2 bytes"),  # names a thirteenth device
    ],
)
def test_a_set_that_must_not_be_opened(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, bitmap: Callable[[SecureRound], bytes], why: str
) -> None:
    fleet = make_fleet()
    plan = sent(fleet, 1)
    refused(fleet, plan, bitmap(fleet.of(plan)), caplog, why)
    assert answer_of(fleet, 1) is None


def declined(fleet: SecureFleet, why: str) -> None:
    fleet.bench.until(lambda: fleet.bench.server.declines != [])
    (decline,) = fleet.bench.server.declines
    assert decline.code == "no-privacy"
    assert why in decline.reason
    assert fleet.bench.store.ledger.entries() == []


def test_a_membership_list_that_is_not_the_operators(make_fleet: MakeFleet) -> None:
    operator = Identity.generate()
    fleet = make_fleet(roster_key=operator.public_key.hex())
    fleet.open_round(1)
    declined(fleet, "not signed by the operator")
    fleet.operator = Identity.generate()
    fleet.membership_list = fleet.membership_list_of({DEVICE: fleet.bench.store.identity.public_key})
    fleet.open_round(2)
    fleet.bench.until(lambda: len(fleet.bench.server.declines) == 2)
    fleet.operator = operator
    fleet.membership_list = fleet.membership_list_of({DEVICE: fleet.bench.store.identity.public_key})
    sent(fleet, 3)


def test_a_membership_list_with_another_key_for_this_device(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.membership_list = fleet.membership_list_of({DEVICE: Identity.generate().public_key})
    fleet.open_round(1)
    declined(fleet, "another key for this device")


def test_a_cohort_that_is_too_small(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(others=6)
    fleet.open_round(1)
    declined(fleet, "the cohort has 7 devices")


def test_a_vast_membership_list_is_not_fetched(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open_round(1, secure=SecurePlan(BlobRef(bytes(32), 1 << 30), 1.0))
    declined(fleet, "above the cap")


def test_bytes_that_are_no_membership_list(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    data = b"no roster"
    fleet.bench.server.package.blobs[BlobRef.of(data).digest] = data
    fleet.open_round(1, secure=SecurePlan(BlobRef.of(data), 1.0))
    declined(fleet, "MembershipList")


def test_a_device_that_is_not_in_the_cohort_is_silent(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.membership_list = fleet.membership_list_of({})
    plan = fleet.open_round(1)
    fleet.bench.steps(60)
    secure_round = fleet.of(plan)
    fleet.unmask(plan, secure_round.pack_included(secure_round.devices))
    fleet.bench.steps(60)
    server = fleet.bench.server
    assert (server.declines, server.updates, fleet.bench.store.ledger.entries()) == ([], [], [])
    assert fleet.bench.agent.rejected.total == 0


def test_a_task_and_a_plan_that_disagree(make_fleet: MakeFleet) -> None:
    """A plan that names devices, in a task of secure aggregation: the update would leave without its masks."""
    fleet = make_fleet()
    server = fleet.bench.server
    server.open_round(1)
    fleet.bench.until(lambda: server.declines != [])
    assert (server.updates, fleet.bench.store.ledger.entries()) == ([], [])


def test_a_committed_update_is_for_one_membership_list(make_fleet: MakeFleet, encoded: list[np.ndarray]) -> None:
    """With the same keys two updates would have the same mask, and with others the first would open no sum."""
    fleet = make_fleet()
    plan = sent(fleet, 1)
    own, before = fleet.bench.store.identity.public_key, fleet.membership_list
    fleet.membership_list = fleet.membership_list_of({DEVICE: own, "another": Identity.generate().public_key})
    fleet.open_round(1, epoch=2)
    declines = fleet.bench.server.declines
    fleet.bench.until(lambda: declines != [])
    assert "another sum" in declines[0].reason
    fleet.membership_list = before
    (update,) = fleet.bench.server.updates
    fleet.bench.server.updates.clear()
    fleet.bench.server._open.clear()
    fleet.open_round(1, epoch=3, secure=plan.secure)
    fleet.bench.until(lambda: fleet.bench.server.updates != [])
    assert fleet.bench.server.updates == [update]
    assert len(encoded) == 1
    assert len(fleet.bench.store.ledger.entries()) == 1


@pytest.mark.parametrize("where", ["plan", "package"])
def test_devices_that_were_told_of_other_noise_share_no_sum(make_fleet: MakeFleet, where: str) -> None:
    """Each counts on the noise of the others; a server may tell each something else."""
    fleet = make_fleet()
    plan = sent(fleet, 1)
    here = fleet.of(plan)
    bitmap = here.pack_included(here.devices)
    fleet.unmask(plan, bitmap)
    fleet.bench.until(lambda: answer_of(fleet, 1) == "acked")
    update, answer = fleet.bench.server.updates
    if where == "plan":
        sums, _ = fleet.sum(fleet.of(replace(plan, controls={"noise_multiplier": 0.01})), update, here.devices)
    else:
        weaker = replace(fleet.spec, privacy=replace(fleet.spec.privacy, noise_multiplier=0.01))
        sums, _ = fleet.sum(here, update, here.devices, told=weaker)
    with pytest.raises(BadInput, match="contradict"):
        here.opened(sums, fleet.answers(here, bitmap, answer))


def test_an_earlier_rounds_unmask_plan_is_not_answered(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    plan = sent(fleet, 1)
    secure_round = fleet.of(plan)
    bitmap = secure_round.pack_included(secure_round.devices)
    sent(fleet, 2)
    fleet.unmask(plan, bitmap)
    fleet.bench.steps(40)
    assert answer_of(fleet, 1) is None
    assert fleet.bench.agent.rejected.counts == {"Replayed": 1}


def test_a_member_that_was_away_answers_without_an_update(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.bench.hub.cut(DEVICE)
    plan = fleet.open_round(1)
    secure_round = fleet.of(plan)
    fleet.unmask(plan, secure_round.pack_included([name for name in secure_round.devices if name != DEVICE]))
    fleet.bench.hub.restore(DEVICE)
    fleet.bench.until(lambda: answer_of(fleet, 1) == "acked")
    assert fleet.bench.store.ledger.entries() == []
    (answer,) = fleet.bench.server.updates
    assert is_answer(answer)


def test_training_ends_when_the_set_is_fixed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    bench, batches = fleet.bench, []
    plan = fleet.open_round(1)
    secure_round = fleet.of(plan)
    others = secure_round.pack_included([name for name in secure_round.devices if name != DEVICE])

    def interrupt() -> None:
        batches.append(1)
        if len(batches) == 1:
            fleet.unmask(plan, others)

    bench.while_training(interrupt)
    bench.until(lambda: answer_of(fleet, 1) == "acked")
    assert bench.entry_status(1) is None
    assert bench.store.ledger.entries() == []


def test_an_upload_ends_when_the_set_is_fixed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    plan = fleet.open_round(1)
    fleet.bench.until(lambda: len(fleet.bench.server.chunks_seen) == 2)
    secure_round = fleet.of(plan)
    fleet.unmask(plan, secure_round.pack_included([name for name in secure_round.devices if name != DEVICE]))
    fleet.bench.until(lambda: answer_of(fleet, 1) == "acked")
    assert fleet.bench.entry_status(1) == "pending"


def test_power_lost_in_every_step_of_a_round(make_fleet: MakeFleet, encoded: list[np.ndarray]) -> None:
    fleet = make_fleet()
    bench = fleet.bench
    plan = fleet.open_round(1)
    for steps in range(1, 60):
        if bench.entry_status(1) == "acked":
            break
        bench.restart()
        bench.steps(steps)
    secure_round = fleet.of(plan)
    fleet.unmask(plan, secure_round.pack_included(secure_round.devices))
    for steps in range(1, 60):
        if answer_of(fleet, 1) == "acked":
            break
        bench.restart()
        bench.steps(steps)
    update, answer = bench.server.updates
    assert bench.store.outbox(fleet.spec.task, 1).data == update
    assert bench.store.answers.of(fleet.spec.task, 1).data == answer
    assert len(bench.store.ledger.entries()) == 1
    sums, expected = fleet.sum(secure_round, update, secure_round.devices)
    add_into(expected, encoded[-1], secure_round.prime)
    bitmap = secure_round.pack_included(secure_round.devices)
    opened, _ = secure_round.opened(sums, fleet.answers(secure_round, bitmap, answer))
    np.testing.assert_array_equal(opened, expected)


@pytest.mark.parametrize("seed", range(2))
def test_lost_doubled_and_reordered_messages(make_fleet: MakeFleet, seed: int) -> None:
    fleet = make_fleet(chaos=Chaos(seed=seed, drop=0.15, duplicate=0.2, reorder=0.2))
    bench = fleet.bench

    def through(done: Callable[[], bool]) -> None:
        for _ in range(3000):
            if done():
                return
            bench.steps(1)
            bench.clock.now += 0.5
        raise AssertionError("not done")

    for number in (1, 2):
        plan = fleet.open_round(number, deadline_s=1e6)
        through(lambda: bench.entry_status(number) == "acked")  # noqa: B023
        secure_round = fleet.of(plan)
        fleet.unmask(plan, secure_round.pack_included(secure_round.devices))
        through(lambda: answer_of(fleet, number) == "acked")  # noqa: B023
    assert len(set(bench.server.updates)) == 4
    assert [entry.round for entry in bench.store.ledger.entries()] == [1, 2]


def test_a_device_that_is_no_member_is_done_with_its_update(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(others=2000, honest_fraction=1.0)
    for number in range(1, fleet.spec.rounds + 1):
        plan = sent(fleet, number)
        secure_round = fleet.of(plan)
        if DEVICE not in secure_round.members:
            break
    else:
        raise AssertionError("drawn into the committee of every round, of 2,001 devices")
    updates = len(fleet.bench.server.updates)
    fleet.unmask(plan, secure_round.pack_included(secure_round.devices))
    fleet.bench.steps(60)
    assert answer_of(fleet, plan.round) is None
    assert len(fleet.bench.server.updates) == updates
    assert fleet.bench.server.declines == []


def test_a_deadline_that_is_extended_does_not_begin_the_answer_again(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    plan = sent(fleet, 1)
    secure_round = fleet.of(plan)
    included = secure_round.pack_included(secure_round.devices)
    fleet.unmask(plan, included)
    fleet.bench.server.answers = False
    fleet.bench.until(lambda: len(fleet.bench.server.updates) == 2)
    fleet.bench.steps(20)
    chunks = len(fleet.bench.server.chunks_seen)
    fleet.unmask(plan, included, deadline_s=900.0)
    fleet.bench.steps(20)
    fleet.bench.server.answers = True
    fleet.bench.clock.now += 100  # it offers again
    fleet.bench.until(lambda: answer_of(fleet, 1) == "acked")
    assert len(fleet.bench.server.chunks_seen) == chunks


def test_an_old_copy_of_the_store_that_lacks_an_answer_stops_for_good(make_fleet: MakeFleet, tmp_path: Path) -> None:
    """It could be asked for a second set."""
    fleet = make_fleet()
    bench = fleet.bench
    plan = sent(fleet, 1)
    old = bench.store.path.read_bytes()
    secure_round = fleet.of(plan)
    fleet.unmask(plan, secure_round.pack_included(secure_round.devices))
    bench.until(lambda: answer_of(fleet, 1) == "acked")
    bench.hub.cut(DEVICE)
    bench.store.close()
    bench.store.path.write_bytes(old)
    bench.restart()
    with pytest.raises(CopiedStore):
        bench.steps(60)


def test_membership_lists_do_not_fill_the_card(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    own = fleet.bench.store.identity.public_key
    for number in (1, 2, 3):
        fleet.membership_list = fleet.membership_list_of({DEVICE: own, f"new-{number}": Identity.generate().public_key})
        sent(fleet, number)
    # package, two graphs, the global model and the membership list
    assert len(fleet.bench.store.blob_digests()) == 5
