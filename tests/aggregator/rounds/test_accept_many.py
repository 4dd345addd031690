"""A batch of updates: the same answers, the same store and the same model as one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.storage.store import ChargeRow
from hushfleet.errors import StoreFull

MakeFleet = Callable[..., Any]
KINDS = ("good", "other", "forged", "cut", "loud", "of a stranger")


def sent(fleet: Any, name: str, kind: str) -> tuple[str, bytes]:
    made = fleet.update(name, advance=False, seed=7 if kind == "other" else None)
    if kind == "loud":
        made = fleet.devices.sign(name, made.header, made.values * 1000, made.counts)
    data = made.data
    if kind == "forged":
        data = data[:-1] + bytes([data[-1] ^ 1])
    return ("nobody" if kind == "of a stranger" else name), data[:50] if kind == "cut" else data


def one_by_one(fleet: Any, items: Sequence[tuple[str, bytes]]) -> list[CheckedUpdate]:
    return [fleet.engine.accept(*item) for item in items]


def outcome(fleet: Any, updates: Sequence[CheckedUpdate]) -> list[Any]:
    store = fleet.store
    return [
        [(each.code, each.reason, each.acknowledged, each.held, each.faults, each.kind) for each in updates],
        [store.charges(), store.devices(), store.updates(1), store.faults()],
        [store.update_data(1, row.device) for row in store.updates(1)],
        fleet.engine.responses.accepted,
        fleet.engine.close().participants,
        fleet.engine.global_digest,
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(KINDS)), max_size=12), later=st.booleans())
def test_a_batch_is_like_one_after_the_other(make_fleet: MakeFleet, script: list[tuple[int, str]], later: bool) -> None:
    fleets = [make_fleet(devices=5, wire={"codec": "float32"}, min_updates=1) for _ in range(2)]
    found = []
    for fleet, taken in zip(fleets, (one_by_one, lambda fleet, items: fleet.engine.accept_many(items)), strict=True):
        if later:
            fleet.run_round()
        fleet.open()
        updates = taken(fleet, [sent(fleet, fleet.names[place], kind) for place, kind in script])
        found.append(outcome(fleet, updates))
    assert found[0] == found[1]


def test_a_batch_is_one_transaction(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(devices=8)
    fleet.open()
    items = [sent(fleet, name, "forged" if name == "dev-3" else "good") for name in fleet.names]
    begun, transaction = [], fleet.store.transaction
    monkeypatch.setattr(fleet.store, "transaction", lambda: (begun.append(1), transaction())[1])
    codes = [update.code for update in fleet.engine.accept_many(items)]
    assert codes == ["bad-signature" if name == "dev-3" else "accepted" for name in fleet.names]
    assert len(begun) == 1


def test_a_full_disk_refuses_the_new_ones_of_a_batch_and_sums_none(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, calm = make_fleet(devices=5), make_fleet(devices=5)
    calm.run_round()
    fleet.open()
    items = [sent(fleet, name, "good") for name in fleet.names]
    fleet.engine.accept(*items[0])
    put_charge = fleet.store.put_charge

    def full(row: ChargeRow) -> None:
        if row.device == "dev-3":
            raise StoreFull("no space")
        put_charge(row)

    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "put_charge", full)
        codes = [update.code for update in fleet.engine.accept_many(items)]
    assert codes == ["duplicate"] + 4 * ["store-full"]
    assert (fleet.engine.accepted, len(fleet.store.updates(1)), len(fleet.store.charges())) == (1, 1, 1)
    codes = [update.code for update in fleet.engine.accept_many(items)]
    assert codes == ["duplicate"] + 4 * ["accepted"]
    fleet.engine.close()
    assert fleet.engine.global_digest == calm.engine.global_digest
