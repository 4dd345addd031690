"""Stolen boards were locked out, and the aggregator hands out a roster from before, which the operator once signed.

Held by: the newest number that a board has seen of its operator and federation, kept in its store before it is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hushfleet.edge_client.rosters import RosterSource
from hushfleet.secure.roster import Roster
from hushfleet.wire.format.identity import Identity
from support.device import config, make_bench, package  # noqa: F401
from support.edge import DEVICE
from support.secure_fleet import SecureFleet, with_secure_sums

STOLEN = ("other-000", "other-001", "other-002")


@pytest.fixture
def fleet(make_bench: Any, package: Any, config: Any) -> SecureFleet:  # noqa: F811
    operator = Identity.generate()
    owned = replace(
        config,
        limits=replace(config.limits, accounting="secure", min_devices=8),
        device=replace(config.device, roster_key=operator.public_key.hex()),
    )
    summed = with_secure_sums(package).with_spec(rounds=9)
    return SecureFleet(make_bench(package=summed, config=owned), operator=operator)


def sent(fleet: SecureFleet, round: int, roster: Roster) -> None:
    fleet.roster = roster
    fleet.open_round(round)
    bench = fleet.bench
    bench.acked(round)


def declined(fleet: SecureFleet, round: int, roster: Roster, why: str) -> None:
    fleet.roster = roster
    before, charged = len(fleet.bench.server.declines), len(fleet.bench.store.ledger.entries())
    fleet.open_round(round)
    fleet.bench.until(lambda: len(fleet.bench.server.declines) > before)
    decline = fleet.bench.server.declines[-1]
    assert decline.code == "no-privacy"
    assert why in decline.reason
    assert len(fleet.bench.store.ledger.entries()) == charged


def after(fleet: SecureFleet, roster: Roster, *, without: tuple[str, ...] = (), **changes: Any) -> Roster:
    """What the operator signs next."""
    assert fleet.operator is not None
    keys = {name: roster.key(place) for place, name in enumerate(roster.devices) if name not in without}
    content = type(roster.content).of(
        keys, federation=roster.federation, honest_fraction=roster.honest_fraction, min_devices=roster.min_devices
    )
    return replace(content, **changes).signed(fleet.operator, after=roster.number)


@pytest.mark.parametrize("restarted", [False, True])
def test_stolen_boards_do_not_come_back(fleet: SecureFleet, restarted: bool) -> None:
    old = fleet.roster
    new = after(fleet, old, without=STOLEN)
    sent(fleet, 1, old)
    sent(fleet, 2, new)
    if restarted:
        fleet.bench.restart()
    declined(fleet, 3, old, f"{old.name} is older than {new.name}, which this device has seen")
    sent(fleet, 4, new)
    sent(fleet, 5, after(fleet, new))


def test_they_did_where_no_number_was_kept(fleet: SecureFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RosterSource, "_pin", lambda *_: None)
    old = fleet.roster
    sent(fleet, 1, after(fleet, old, without=STOLEN))
    sent(fleet, 2, old)


def test_the_roster_of_another_federation(fleet: SecureFleet) -> None:
    own = fleet.roster
    other = after(fleet, own, federation="elsewhere")
    declined(fleet, 1, other, "names the federation 'elsewhere', and this device is in 'test'")
    sent(fleet, 2, own)  # whose number is lower: another federation's is not counted


def test_two_rosters_of_one_number(fleet: SecureFleet) -> None:
    """Each part of the fleet would take the other's devices for strangers."""
    first = fleet.roster
    assert fleet.operator is not None
    second = first.content.signed(fleet.operator, after=first.number - 1, at=first.date)
    assert (second.number, second.nonce != first.nonce) == (first.number, True)
    sent(fleet, 1, first)
    declined(fleet, 2, second, "has signed two different rosters as")
    sent(fleet, 3, after(fleet, first))


def test_refused_rosters_do_not_fill_the_card(fleet: SecureFleet) -> None:
    old = fleet.roster
    new = after(fleet, old)
    sent(fleet, 1, new)
    held = len(fleet.bench.store.blob_digests())
    for number in range(2, 5):
        declined(fleet, number, replace(old, date=number), "signature")
    assert len(fleet.bench.store.blob_digests()) == held


def test_a_board_without_an_operator_keeps_no_number(make_bench: Any, package: Any, config: Any) -> None:  # noqa: F811
    """The aggregator's word is all that it asks for, and that has no age."""
    owned = replace(config, limits=replace(config.limits, accounting="secure", min_devices=8))
    fleet = SecureFleet(make_bench(package=with_secure_sums(package), config=owned))
    first = fleet.roster
    sent(fleet, 1, first)
    sent(
        fleet,
        2,
        fleet.roster_of({DEVICE: fleet.bench.store.identity.public_key, "new": Identity.generate().public_key}),
    )
    sent(fleet, 3, first)
