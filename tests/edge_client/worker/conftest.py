"""Benches of a device whose rounds are trained by real child processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hushfleet.edge_client.worker.process import ChildProcess
from support.edge import Bench


@pytest.fixture
def in_children(make_bench: Callable[..., Bench]) -> Callable[..., Bench]:
    def make(*args: object, **options: object) -> Bench:
        bench = make_bench(*args, **options)
        bench.agent.rounds._handover._workshop = ChildProcess()
        return bench

    return make
