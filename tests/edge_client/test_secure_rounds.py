"""Rounds with a secure sum: a real device, the rest of the fleet played by the test, and the sum that comes out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hushfleet.privacy.ring import Ring
from hushfleet.secure.field import add_into
from hushfleet.secure.member_answer import decode_answer, is_answer
from hushfleet.wire.format.messages import RoundPlan
from support.edge import DEVICE, Bench, Package
from support.secure_fleet import SecureFleet, with_secure_sums

MakeBench = Callable[..., Bench]
MakeFleet = Callable[..., SecureFleet]


@pytest.fixture
def make_fleet(make_bench: MakeBench, package: Package) -> MakeFleet:
    def make(**how: object) -> SecureFleet:
        others = {name: how.pop(name) for name in ("others", "operator") if name in how}
        return SecureFleet(make_bench(package=with_secure_sums(package), **how), **others)

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
    bench.until(lambda: bench.entry_status(round) == "acked" and bench.agent.rounds.upload is None)
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
    opened = secure_round.opened(sums, fleet.answers(secure_round, bitmap, answer))
    np.testing.assert_array_equal(opened, expected)
    assert fleet.bench.server.declines == []
    assert fleet.bench.agent.rejected.total == 0
    assert len(encoded) == 1
