"""A device that its aggregator does not accept: what it logs, and when it asks again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import NotEnrolled
from support.edge import DEVICE, Bench


def refuse(bench: Bench, *, key: bytes | None = None, device: str = DEVICE, reason: str = "ask your operator") -> None:
    answer = NotEnrolled(device, key or bench.store.identity.public_key, reason)
    bench.server.send(bench.server.topics.down(DEVICE), answer)
    bench.steps(10)


def test_it_says_so_once_and_asks_again_ever_more_rarely(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hushfleet.edge")
    bench = make_bench()
    bench.server.open_round(0, phase="closed")
    bench.steps()
    assert [birth.state for birth in bench.server.births] == ["ready"]
    waits = []
    for _ in range(8):
        refuse(bench)
        refuse(bench)  # a second answer does not make it ask twice
        began, births = bench.clock.now, len(bench.server.births)
        while len(bench.server.births) == births:
            bench.clock.now += 30.0
            bench.steps(3)
        waits.append(bench.clock.now - began)
        bench.clock.now += 10_000.0
        bench.steps(10)
        assert len(bench.server.births) == births + 1, "it asks once for each answer"
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    assert [record.message for record in caplog.records if "operator" in record.message] == ["ask your operator"]
    refuse(bench, reason="blocked: it lies")
    assert caplog.records[-1].message == "blocked: it lies"


def test_an_answer_to_another_key_or_from_another_is_ignored(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    bench.server.open_round(0, phase="closed")
    bench.steps()
    refuse(bench, key=Identity.generate().public_key)
    refuse(bench, device="board-2")
    bench.server.identity = Identity.generate()
    refuse(bench)
    bench.clock.now += 10_000.0
    bench.steps(10)
    assert len(bench.server.births) == 1
    assert "operator" not in caplog.text
