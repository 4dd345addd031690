"""Every decoder of `benchmarks.fuzz` on edits of real bytes; the long form is guided by coverage."""

from __future__ import annotations

import base64
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


# Pillow raises a SyntaxError for it.
BROKEN_PNG = (
    b"iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKklEQVR4nGNkYGRipiVgSUhIoKkFjAcOHiJXLwcHBxEWqKqpk2sB"
    b"UYD2QfT02XMswkT5njgLvLx9qGQUDgtWrV5DXRPRPM/ILyBIXQvQAO0j+fyFi0QrJifqGU1MzUjWRAqgfRB9+fqNmZmaCR/dgsio"
    b"aNqYDLNg567dFBqB3/OMcvIKFFqAH9A+ku/df4BblgpRz+js4kqpGfgtWLxkKU0MhnmekYOTiyYWwADtI/nEyVOk6iEp6hl19fRJ"
    b"tYAkQPsgevvuPRKX+mUeY1BwCJWNRLNg0+Yt1DEJh+cZxSUkqWMBDkD7SL5+4yZBRZREPQCx8k/RgNbYgwAAAABJRU5ErkJggg=="
)


def test_a_broken_image_that_was_found_is_refused() -> None:
    target = TARGETS["cifar-image"]
    assert not target.run(base64.b64decode(BROKEN_PNG))
