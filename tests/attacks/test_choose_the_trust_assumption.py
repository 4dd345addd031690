"""An aggregator writes into the task how many boards are honest and how small a sum may be, and then reads one update.

It says that all boards are honest and has k - 1 of the k in the smallest sum on its side. The sum less what these have
sent is the victim's own, and a k-th of the noise that the victim's ledger was charged for. Held by: what a board's
card allows, and what the operator has signed with the list of boards; the stricter of them counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.privacy.accountant import epsilon
from hushfleet.privacy.ring import Ring
from hushfleet.privacy.step import Step
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import PrivacySpec, SecureSpec, WireSpec
from support.edge import CHUNK_BYTES, DEVICE
from support.secure_fleet import SecureFleet

CORRUPT = ["other-000", "other-001", "other-002"]
LEAST = len(CORRUPT) + 1
DELTA = 1e-5
ALL = {"min_devices": LEAST, "honest_fraction": 1.0}  # what boards took before they had limits of their own


@pytest.fixture
def make_fleet(make_bench: Any, package: Any, config: Any) -> Any:
    """With the aggregator's own task; `limits` are of the victim, and a key of the operator has signed the list."""

    def make(**limits: Any) -> SecureFleet:
        operator = Identity.generate()
        secure = SecureSpec(16, min_devices=LEAST, honest_devices=LEAST, honest_fraction=1.0)
        privacy = PrivacySpec("device", "secure", clip_norm=1.0, noise_multiplier=2.0, delta=DELTA, secure=secure)
        task = package.with_spec(privacy=privacy, wire=WireSpec(codec="masked", chunk_bytes=CHUNK_BYTES))
        victim = replace(
            config,
            limits=replace(config.limits, accounting="secure", epsilon_server=1000.0, **limits),
            device=replace(config.device, roster_key=operator.public_key.hex()),
        )
        return SecureFleet(make_bench(package=task, config=victim), 11, operator=operator)

    return make


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, Ring]]:
    """The victim's integers before they are masked."""
    seen, encode = [], Ring.encode

    def noted(self: Ring, *arguments: Any) -> np.ndarray:
        seen.append((encode(self, *arguments), self))
        return seen[-1][0].copy()

    monkeypatch.setattr(Ring, "encode", noted)
    return seen


def test_without_limits_one_update_is_read(make_fleet: Any, encoded: list[tuple[np.ndarray, Ring]]) -> None:
    """The attack itself, where owner and operator allow all that the aggregator writes."""
    fleet = make_fleet(**ALL)
    bench = fleet.bench
    plan = fleet.open_round(1)
    bench.acked(1)
    secure_round, update = fleet.of(plan), bench.server.updates[0]
    names = sorted([DEVICE, *CORRUPT], key=secure_round.devices.index)
    included = secure_round.pack_included(names)
    sums, known = fleet.sum(secure_round, update, names)
    fleet.unmask(plan, included)
    bench.until(lambda: len(bench.server.updates) == 2)
    total, _ = secure_round.opened(sums, fleet.answers(secure_round, included, bench.server.updates[1]))

    integers, ring = encoded[0]
    assert ((total.astype(np.int64) - known) % secure_round.prime).tolist() == integers.tolist()
    (entry,) = bench.store.ledger.entries()
    charged = entry.charge.noise_multiplier
    real = math.sqrt(ring.scale.variance / LEAST - 4) / math.sqrt(ring.scale.bound)
    assert (charged, round(real, 2)) == (2.0, 1.0)
    spent, lost = (epsilon([Step(multiplier, 1, 20)], delta=DELTA) for multiplier in (charged, real))
    assert lost > 2 * spent  # of 20 rounds


def declined(fleet: SecureFleet, why: str) -> RoundPlan:
    plan = fleet.open_round(1)
    fleet.bench.until(lambda: bool(fleet.bench.server.declines))
    (decline,) = fleet.bench.server.declines
    assert decline.code == "no-privacy"
    assert why in decline.reason
    assert fleet.bench.store.ledger.entries() == []
    assert fleet.bench.server.updates == []
    return plan


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({}, "the task opens sums of 4 devices; this device's limits.min_devices is 10"),
        (
            {"min_devices": LEAST},
            "a share of 1 of the devices to be honest; this device's limits.honest_fraction is 0.9",
        ),
    ],
)
def test_a_board_that_says_nothing_takes_nine_tenths_and_ten(make_fleet: Any, limits: Any, why: str) -> None:
    assert (LimitsSection(1.0).honest_fraction, LimitsSection(1.0).min_devices) == (0.9, 10)
    declined(make_fleet(**limits), why)


@pytest.mark.parametrize(
    ("signed", "why"),
    [
        ({"min_devices": 10, "honest_fraction": 1.0}, "opens sums of 4 devices; the operator has signed 10 or more"),
        (
            {"min_devices": LEAST, "honest_fraction": 0.75},
            "of 1 of the devices is honest; the operator has signed 0.75",
        ),
    ],
)
def test_the_operators_word_binds_a_board_that_would_take_more(make_fleet: Any, signed: Any, why: str) -> None:
    fleet = make_fleet(**ALL)
    assert fleet.operator is not None
    fleet.membership_list = replace(fleet.membership_list.content, **signed).signed(fleet.operator)
    declined(fleet, why)


def test_a_member_of_a_committee_does_not_help(make_fleet: Any) -> None:
    """A board that would not train in such a sum does not open it for others either."""
    fleet = make_fleet(min_devices=10, honest_fraction=1.0)
    plan = declined(fleet, "limits.min_devices is 10")
    secure_round = fleet.of(plan)
    assert DEVICE in secure_round.members
    fleet.unmask(plan, secure_round.pack_included(secure_round.devices[:LEAST]))
    fleet.bench.steps(60)
    assert fleet.bench.server.updates == []
    assert fleet.bench.store.answers.of(fleet.spec.task, 1) is None
