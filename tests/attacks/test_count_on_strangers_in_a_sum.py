"""A task of secure aggregation counts on trust that a board's owner has not given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hushfleet.errors import BadInput
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan, SecurePlan
from hushfleet.wire.format.spec import BlobRef, SecureSpec
from support.secure_fleet import SecureFleet, with_secure_aggregation


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"accounting": "strict"}, 'limits.accounting is "strict", which trusts nobody'),
        ({"accounting": "secure", "min_devices": 9}, "limits.min_devices is 9"),
        ({"accounting": "secure", "min_devices": 8, "honest_fraction": 0.8}, "limits.honest_fraction is 0.8"),
        ({"accounting": "secure", "min_devices": 8, "noise_split": 5}, "limits.noise_split is 5"),
        ({"accounting": "secure", "min_devices": 8, "min_noise_multiplier": 2.1}, "limits.min_noise_multiplier is 2.1"),
        ({"accounting": "secure"}, "limits.min_devices is 10"),
        ({"accounting": "secure", "min_devices": 8}, None),
        ({"accounting": "as-published", "min_devices": 8, "honest_fraction": 0.9, "min_noise_multiplier": 2.0}, None),
    ],
)
def test_what_the_owner_allows(make_bench: Any, package: Any, config: Any, limits: Any, words: str | None) -> None:
    owned = replace(config, limits=replace(config.limits, **limits))
    fleet = SecureFleet(make_bench(package=with_secure_aggregation(package), config=owned))
    server = fleet.bench.server
    fleet.bench.until(lambda: bool(server.births))
    fleet.open_round(1)
    fleet.bench.until(lambda: bool(server.declines or server.updates))
    if words is None:
        (entry,) = fleet.bench.store.ledger.entries()
        assert (entry.charge.noise_multiplier, entry.charge.noise_split) == (2.0, 7)
    else:
        assert words in server.declines[-1].reason
        assert server.declines[-1].code == "no-privacy"
        assert fleet.bench.store.ledger.entries() == []


def test_a_membership_list_with_room_for_more_corrupt_devices_than_were_counted() -> None:
    """The task says that 80 of 90 are honest; with 200 in the membership list, 20 may be corrupt."""
    spec = SecureSpec(16, min_devices=90, honest_devices=80, honest_fraction=0.9)
    membership_lists = [
        MembershipList.of({f"d{i:03}": Identity.generate().public_key for i in range(count)}) for count in (100, 200)
    ]
    plans = [
        RoundPlan(
            "t-1", 1, 20, "open", bytes(32), 400, {}, 1, 60.0, secure=SecurePlan(BlobRef.of(each.to_bytes()), 1.0)
        )
        for each in membership_lists
    ]
    SecureRound(spec, plans[0], membership_lists[0], size=10)
    with pytest.raises(BadInput, match="may have only 70"):
        SecureRound(spec, plans[1], membership_lists[1], size=10)
