"""Every decoder of `benchmarks.fuzz` on edits of real bytes; the long form is guided by coverage."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from benchmarks.fuzz.mutate import mutated
from benchmarks.fuzz.targets import TARGETS

INPUTS = 60
CPU_S = 2.0  # of one input; some milliseconds are usual
MEMORY_BYTES = 64 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_edited_bytes_raise_what_is_documented_and_stay_small(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert all(map(target.run, seeds)) or name == "message-raw", "what a fuzzer begins with is what is accepted"
    rng = random.Random(name)
    tracemalloc.start()
    try:
        for turn in range(INPUTS):
            data = mutated(seeds[turn % len(seeds)], rng)
            began = time.process_time()
            target.run(data)
            assert time.process_time() - began < CPU_S
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()
