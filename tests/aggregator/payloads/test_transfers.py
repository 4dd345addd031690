"""Updates on their way in: bounds, resuming, and patience that follows the link's pace."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.payloads import transfers as module
from hushfleet.aggregator.payloads.transfers import EXPIRE_S, LOOK_EVERY_S, Transfers
from hushfleet.errors import Malformed, TooLarge
from hushfleet.wire.format.chunks import Chunk, parse_frame, split
from hushfleet.wire.format.messages import Missing, Offer

BLOB = np.random.default_rng(0).bytes(5000)


def offer(blob: bytes = BLOB, size: int | None = None) -> Offer:
    return Offer("t-1", 1, hashlib.sha256(blob).digest(), size or len(blob))


def gap(device: str, *missing: tuple[int, int]) -> tuple[str, Missing]:
    return device, Missing("t-1", 1, offer().digest, missing)


def chunks(blob: bytes = BLOB) -> list[Chunk]:
    return [parse_frame(frame) for frame in split(blob, 1024)]


def test_chunks_in_any_order_make_the_update() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(), now=0)
    *some, last = reversed(chunks())
    assert [transfers.chunk("dev", chunk, now=0) for chunk in (*some, *some)] == [None] * 8
    assert transfers.chunk("dev", last, now=0) == (offer(), BLOB)
    assert transfers.due_at == float("inf")


def test_an_offer_above_the_cap_is_refused_before_anything_is_allocated() -> None:
    transfers = Transfers(max_bytes=4999)
    with pytest.raises(TooLarge, match="at most 4999"):
        transfers.offer("dev", offer(), now=0)
    assert transfers.due_at == float("inf")


def test_a_chunk_of_another_size_than_the_offered_one_is_refused() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(size=4000), now=0)
    with pytest.raises(Malformed, match="another blob"):
        transfers.chunk("dev", chunks()[0], now=0)


@pytest.mark.parametrize("early", [1, 3, 5])
def test_chunks_that_overtake_their_offer_are_held_until_it_comes(early: int) -> None:
    """A broker keeps the order within a topic only, and offers have a topic of their own (measured with NATS)."""
    transfers = Transfers(max_bytes=10_000)
    for chunk in chunks()[:early]:
        assert transfers.chunk("dev", chunk, now=0) is None
    whole = transfers.offer("dev", offer(), now=0)
    assert whole == (BLOB if early == 5 else None)
    assert [transfers.chunk("dev", chunk, now=0) for chunk in chunks()[early:]][-1:] == [(offer(), BLOB)][: 5 - early]


def test_chunks_of_the_next_update_may_come_while_another_one_is_open() -> None:
    """As where its public state is attached after all."""
    transfers, other = Transfers(max_bytes=10_000), b"x" * 5000
    transfers.offer("dev", offer(), now=0)
    assert [transfers.chunk("dev", chunk, now=0) for chunk in chunks(other)] == [None] * 5
    assert transfers.offer("dev", offer(other), now=0) == other


def test_early_chunks_with_wrong_content_are_asked_for_again() -> None:
    transfers = Transfers(max_bytes=10_000)
    for chunk in [replace(chunks()[0], payload=memoryview(bytes(1024))), *chunks()[1:]]:
        transfers.chunk("dev", chunk, now=0)
    with pytest.raises(Malformed, match="ask for all"):
        transfers.offer("dev", offer(), now=0)
    assert transfers.gaps(now=5) == [gap("dev")]


def test_what_is_held_early_is_bounded_for_each_device_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks too: what a chunk takes beside its payload counts."""
    monkeypatch.setattr(module, "MAX_EARLY_DEVICE_BYTES", 2 * (1024 + 512))
    monkeypatch.setattr(module, "MAX_EARLY_BYTES", 3 * (1024 + 512))
    transfers = Transfers(max_bytes=10_000)
    for chunk in [*chunks()[:2], *chunks()[:2]]:
        transfers.chunk("greedy", chunk, now=0)
    with pytest.raises(Malformed, match="did not offer"):
        transfers.chunk("greedy", chunks()[2], now=0)
    for chunk in chunks():
        transfers.chunk("late", chunk, now=0)  # there is room for one of them
    transfers.offer("late", offer(), now=0)
    assert transfers.gaps(now=5) == [gap("late", (1, 5))]
    transfers.drop("greedy")
    for chunk in chunks()[:2]:
        transfers.chunk("next", chunk, now=0)
    transfers.clear()
    assert transfers.offer("next", offer(), now=6) is None
    assert transfers.gaps(now=11) == [gap("next")], "what came for the round before is gone"


def test_a_pause_is_followed_by_what_is_missing_later_and_later() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(), now=0)
    transfers.chunk("dev", chunks()[1], now=0.1)
    told = []
    for tick in range(200):
        told += [(tick / 10, each) for each in transfers.gaps(now=tick / 10)]
    assert {each for _, each in told} == {gap("dev", (0, 1), (2, 5))}
    assert [round(at - told[0][0]) for at, _ in told] == [0, 2, 6, 14]
    assert 1.1 <= told[0][0] <= 1.2


def test_a_slow_link_is_given_the_time_that_it_needs() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(), now=0)
    for index, chunk in enumerate(chunks()[:4]):
        transfers.chunk("dev", chunk, now=3.0 * index)
    assert transfers.gaps(now=9 + 11.9) == []
    assert [missing.missing for _, missing in transfers.gaps(now=9 + 12.1)] == [((4, 5),)]


def test_the_same_offer_again_asks_sooner() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(), now=0)
    assert len(transfers.gaps(now=1)) == 1
    assert transfers.gaps(now=2) == []
    transfers.offer("dev", offer(), now=2)
    assert transfers.gaps(now=2) == [gap("dev")]


def test_another_offer_replaces_the_first() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(), now=0)
    other = b"y" * 5000
    transfers.offer("dev", offer(other), now=0)
    assert transfers.chunk("dev", chunks()[0], now=0) is None
    whole = [transfers.chunk("dev", chunk, now=0) for chunk in chunks(other)]
    assert whole[-1] == (offer(other), other)


def test_wrong_content_begins_anew() -> None:
    transfers = Transfers(max_bytes=10_000)
    transfers.offer("dev", offer(), now=0)
    first, *rest = chunks()
    transfers.chunk("dev", replace(first, payload=memoryview(bytes(1024))), now=0)
    for chunk in rest[:-1]:
        transfers.chunk("dev", chunk, now=0)
    with pytest.raises(Malformed, match="ask for all"):
        transfers.chunk("dev", rest[-1], now=0)
    assert transfers.gaps(now=5) == [gap("dev")]
    assert [transfers.chunk("dev", chunk, now=5) for chunk in chunks()][-1] == (offer(), BLOB)


def test_open_transfers_are_bounded_together_and_take_turns() -> None:
    transfers = Transfers(max_bytes=10_000, max_open_bytes=12_000)
    for index in range(4):
        transfers.offer(f"dev-{index}", offer(), now=0)
    assert transfers.chunk("dev-3", chunks()[0], now=0) is None, "dropped, since there is no room"
    assert transfers.gaps(now=0.5) == []
    for chunk in chunks():
        transfers.chunk("dev-0", chunk, now=0.5)
    assert transfers.gaps(now=0.6) == [gap("dev-2")]
    transfers.drop("dev-1")
    assert transfers.gaps(now=0.7) == [gap("dev-3")]
    for name in ("dev-2", "dev-3"):
        assert [transfers.chunk(name, chunk, now=0.8) for chunk in chunks()][-1] == (offer(), BLOB)


def test_who_offers_again_keeps_its_turn() -> None:
    transfers = Transfers(max_bytes=10_000, max_open_bytes=5000)
    for name in ("dev-0", "dev-1", "dev-2", "dev-1"):
        transfers.offer(name, offer(), now=0)
    transfers.drop("dev-0")
    assert transfers.gaps(now=0.1) == [gap("dev-1")]


def test_an_abandoned_transfer_makes_room() -> None:
    transfers = Transfers(max_bytes=10_000, max_open_bytes=5000)
    transfers.offer("gone", offer(), now=0)
    transfers.offer("waiting", offer(), now=1)
    told = transfers.gaps(now=EXPIRE_S + 1)
    assert told == [gap("waiting")]


def test_what_a_message_costs_does_not_grow_with_the_transfers_that_are_open() -> None:
    """Ten thousand devices offer within a moment; with each message the first that is due is asked for."""

    passes = 0

    class Open(dict[str, Any]):
        def items(self) -> Any:
            nonlocal passes
            passes += 1
            return super().items()

        def values(self) -> Any:
            nonlocal passes
            passes += 1
            return super().values()

    transfers, devices = Transfers(max_bytes=10_000), 10_000
    transfers._open = Open()
    for index in range(devices):
        transfers.offer(f"dev-{index}", offer(), now=index / devices)
    told = []
    for message in range(1000):
        now = 1.2 + message / 1000
        told += [device for device, _ in transfers.gaps(now=now)]
        transfers.offer("dev-0", offer(), now=now)  # one that asks again and again
        assert transfers.due_at <= now + LOOK_EVERY_S
    assert set(told) == {f"dev-{index}" for index in range(devices)}
    assert passes <= 11
