"""Stolen boards were locked out, and the aggregator hands out a membership list from before, which the operator once
signed.

Held by: the newest number that a board has seen of its operator and federation, kept in its store before it is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hushfleet.edge_client.membership_lists import MembershipListSource
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.identity import Identity
from support.edge import DEVICE
from support.secure_fleet import SecureFleet, with_secure_aggregation

STOLEN = ("other-000", "other-001", "other-002")


@pytest.fixture
def fleet(make_bench: Any, package: Any, config: Any) -> SecureFleet:
    operator = Identity.generate()
    owned = replace(
        config,
        limits=replace(config.limits, accounting="secure", min_devices=8),
        device=replace(config.device, roster_key=operator.public_key.hex()),
    )
    summed = with_secure_aggregation(package).with_spec(rounds=9)
    return SecureFleet(make_bench(package=summed, config=owned), operator=operator)


def sent(fleet: SecureFleet, round: int, membership_list: MembershipList) -> None:
    fleet.membership_list = membership_list
    fleet.open_round(round)
    bench = fleet.bench
    bench.acked(round)


def declined(fleet: SecureFleet, round: int, membership_list: MembershipList, why: str) -> None:
    fleet.membership_list = membership_list
    before, charged = len(fleet.bench.server.declines), len(fleet.bench.store.ledger.entries())
    fleet.open_round(round)
    fleet.bench.until(lambda: len(fleet.bench.server.declines) > before)
    decline = fleet.bench.server.declines[-1]
    assert decline.code == "no-privacy"
    assert why in decline.reason
    assert len(fleet.bench.store.ledger.entries()) == charged


def after(
    fleet: SecureFleet, membership_list: MembershipList, *, without: tuple[str, ...] = (), **changes: Any
) -> MembershipList:
    """What the operator signs next."""
    assert fleet.operator is not None
    keys = {
        name: membership_list.key(place) for place, name in enumerate(membership_list.devices) if name not in without
    }
    content = type(membership_list.content).of(
        keys,
        federation=membership_list.federation,
        honest_fraction=membership_list.honest_fraction,
        min_devices=membership_list.min_devices,
    )
    return replace(content, **changes).signed(fleet.operator, after=membership_list.number)


@pytest.mark.parametrize("restarted", [False, True])
def test_stolen_boards_do_not_come_back(fleet: SecureFleet, restarted: bool) -> None:
    old = fleet.membership_list
    new = after(fleet, old, without=STOLEN)
    sent(fleet, 1, old)
    sent(fleet, 2, new)
    if restarted:
        fleet.bench.restart()
    declined(fleet, 3, old, f"{old.name} is older than {new.name}, which this device has seen")
    sent(fleet, 4, new)
    sent(fleet, 5, after(fleet, new))


def test_they_did_where_no_number_was_kept(fleet: SecureFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MembershipListSource, "_pin", lambda *_: None)
    old = fleet.membership_list
    sent(fleet, 1, after(fleet, old, without=STOLEN))
    sent(fleet, 2, old)


def test_the_membership_list_of_another_federation(fleet: SecureFleet) -> None:
    own = fleet.membership_list
    other = after(fleet, own, federation="elsewhere")
    declined(fleet, 1, other, "names the federation 'elsewhere', and this device is in 'test'")
    sent(fleet, 2, own)  # whose number is lower: another federation's is not counted


def test_two_membership_lists_of_one_number(fleet: SecureFleet) -> None:
    """Each part of the fleet would take the other's devices for strangers."""
    first = fleet.membership_list
    assert fleet.operator is not None
    second = first.content.signed(fleet.operator, after=first.number - 1, at=first.date)
    assert (second.number, second.nonce != first.nonce) == (first.number, True)
    sent(fleet, 1, first)
    declined(fleet, 2, second, "has signed two different membership lists as")
    sent(fleet, 3, after(fleet, first))


def test_refused_membership_lists_do_not_fill_the_card(fleet: SecureFleet) -> None:
    old = fleet.membership_list
    new = after(fleet, old)
    sent(fleet, 1, new)
    held = len(fleet.bench.store.blob_digests())
    for number in range(2, 5):
        declined(fleet, number, replace(old, date=number), "signature")
    assert len(fleet.bench.store.blob_digests()) == held


def test_a_board_without_an_operator_keeps_no_number(make_bench: Any, package: Any, config: Any) -> None:
    """The aggregator's word is all that it asks for, and that has no age."""
    owned = replace(config, limits=replace(config.limits, accounting="secure", min_devices=8))
    fleet = SecureFleet(make_bench(package=with_secure_aggregation(package), config=owned))
    first = fleet.membership_list
    sent(fleet, 1, first)
    sent(
        fleet,
        2,
        fleet.membership_list_of(
            {DEVICE: fleet.bench.store.identity.public_key, "new": Identity.generate().public_key}
        ),
    )
    sent(fleet, 3, first)
