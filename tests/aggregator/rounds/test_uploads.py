"""Whole updates on their way to the engine: each gets one answer, whatever they are and however they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.payloads.refusals import RefusalCounter
from hushfleet.aggregator.rounds.uploads import Uploads
from hushfleet.errors import StoreError
from hushfleet.wire.format.chunks import split
from hushfleet.wire.format.messages import Offer

MakeFleet = Callable[..., Any]


def take(uploads: Uploads, fleet: Any, name: str, data: bytes) -> CheckedUpdate:
    offer = Offer("tiny-0001", fleet.engine.plan.round, hashlib.sha256(data).digest(), len(data))
    uploads._arrived[name] = offer, data
    (update,) = uploads.take_arrived()
    return update


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Any:
    fleet = make_fleet(wire={"codec": "float32"})
    fleet.open()
    return fleet


@pytest.fixture
def uploads(fleet: Any) -> Uploads:
    return Uploads(fleet.engine, RefusalCounter(fleet.store, now=0.0), clock=lambda: fleet.now)


def test_what_is_refused_counts_for_nobody_else(fleet: Any, uploads: Uploads) -> None:
    good, loud = fleet.update("dev-0"), fleet.update("dev-1")
    louder = fleet.devices.sign("dev-1", loud.header, loud.values * 1e6, loud.counts).data
    codes = [take(uploads, fleet, name, data).code for name, data in (
        ("dev-0", good.data), ("dev-1", louder), ("stranger", good.data),
    )]  # fmt: skip
    assert codes == ["accepted", "out-of-bounds", "unknown-device"]
    assert fleet.engine.accepted == 1


def test_two_updates_of_one_device_count_once(fleet: Any, uploads: Uploads) -> None:
    first, second = (fleet.update("dev-0", seed=seed, advance=False) for seed in (1, 2))
    public = fleet.devices.states["dev-0"].public.to_bytes()
    with_state = fleet.devices.sign("dev-0", first.header, first.values, first.counts, public=public)
    codes = [take(uploads, fleet, "dev-0", each.data).code for each in (first, second, with_state)]
    assert codes == ["accepted", "duplicate", "duplicate"]
    assert fleet.engine.accepted == len(fleet.store.updates(1)) == 1


def test_an_update_of_a_round_that_is_over_is_late(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(min_updates=1)
    fleet.open()
    uploads = Uploads(fleet.engine, RefusalCounter(fleet.store, now=0.0), clock=lambda: fleet.now)
    late = fleet.update("dev-1", advance=False).data
    assert take(uploads, fleet, "dev-0", fleet.update("dev-0").data).code == "accepted"
    fleet.engine.close()
    fleet.open()
    assert take(uploads, fleet, "dev-1", late).code == "late"
    assert fleet.engine.accepted == 0
    assert fleet.engine.responses.expects("dev-1")


@pytest.mark.parametrize("mode", ["synchronous", "buffered"])
def test_half_an_update_is_dropped_with_its_round_unless_a_later_sum_takes_it(make_fleet: MakeFleet, mode: str) -> None:
    rules = {"mode": mode, "buffer_size": 1, "method": "dp-fedavg", "accounting": "strict"}
    fleet = make_fleet(**(rules if mode == "buffered" else {"min_updates": 1}))
    fleet.open()
    uploads = Uploads(fleet.engine, RefusalCounter(fleet.store, now=0.0), clock=lambda: fleet.now)
    data = fleet.update("dev-1", advance=False).data
    offer = Offer("tiny-0001", 1, hashlib.sha256(data).digest(), len(data))
    assert uploads.offer("dev-1", offer) is None
    first, *others = split(data, 200)
    uploads.chunk("dev-1", first)
    assert uploads.take_arrived() == []
    assert take(uploads, fleet, "dev-0", fleet.update("dev-0").data).code == "accepted"
    fleet.engine.close()
    uploads.end_round()
    fleet.open()
    for frame in others:
        uploads.chunk("dev-1", frame)
    assert [update.code for update in uploads.take_arrived()] == ["accepted"] * (mode == "buffered")


def test_a_store_that_fails_refuses_and_the_update_may_come_again(
    fleet: Any, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = fleet.update("dev-0").data

    def fail(*args: object, **options: object) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "put_update", fail)
        assert take(uploads, fleet, "dev-0", data).code == "store-full"
    assert take(uploads, fleet, "dev-0", data).code == "accepted"
    assert fleet.engine.accepted == 1
