"""A worker in a process of its own: what it gets, what it can reach, and how a guardian outlives it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.worker.process import ChildProcess
from support.device import config, make_bench, package  # noqa: F401
from support.edge import Bench

MakeBench = Callable[..., Bench]


@pytest.fixture
def in_children(make_bench: MakeBench) -> MakeBench:  # noqa: F811
    """Benches whose rounds are trained by real child processes."""

    def make(*args: object, **options: object) -> Bench:
        bench = make_bench(*args, **options)
        bench.agent.rounds._handover._workshop = ChildProcess()
        return bench

    return make


def until(bench: Bench, done: Callable[[], bool]) -> None:
    """Like `bench.until`, but real time passes for the worker."""
    for _ in range(60_000):
        if done():
            return
        bench.agent.step(0.0)
        bench.server.pump()
        time.sleep(0.001)
    raise AssertionError("not reached")


@pytest.mark.parametrize("is_simulated", [True, False])
def test_a_round_is_trained_in_a_child(in_children: MakeBench, config: DeviceConfig, is_simulated: bool) -> None:  # noqa: F811
    bench = in_children(config=config if is_simulated else replace(config, simulation=None))
    bench.server.open_round(1)
    until(bench, lambda: bench.entry_status(1) == "acked" or bool(bench.server.declines))
    assert bench.server.declines == []
    assert len(bench.server.updates) == 1
    assert [entry.round for entry in bench.store.ledger.entries()] == [1]
    assert bench.agent.rounds._handover._workshop.pid is None
    assert os.getpid()
