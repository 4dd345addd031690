"""Every decoder of `fuzz.targets` on random edits of real bytes; `make fuzz` is guided by coverage."""

from __future__ import annotations

import base64
import random
import struct
import subprocess
import time
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import pytest

from fuzz.__main__ import fuzz_target
from fuzz.targets import TARGETS, WIRE

FROM_NETWORK, FROM_FILES = 2000, 60  # inputs of each target
CPU_S = 2.0  # of one input; some milliseconds are usual
MEMORY_BYTES = 64 << 20
INTERESTING = [0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC4, 0xC6, 0xCA, 0xCB, 0xCF, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: bits, bytes, cuts, insertions, repetitions, lengths."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(result) + 1)
        match rng.randrange(7):
            case 0 if where < len(result):
                result[where] ^= 1 << rng.randrange(8)
            case 1 if where < len(result):
                result[where] = rng.choice(INTERESTING)
            case 2:
                del result[where : where + rng.randint(1, 20)]
            case 3:
                result[where:where] = rng.randbytes(rng.randint(1, 20))
            case 4:
                result[where:where] = result[where : where + rng.randint(1, 60)]
            case 5:
                result[where : where + 4] = struct.pack("<I", rng.choice([0, 1, 255, 1 << 16, (1 << 32) - 1]))
            case _:
                result = result[:where] if rng.random() < 0.1 else result
    return bytes(result)


@pytest.mark.parametrize("name", TARGETS)
def test_edited_bytes_raise_what_is_documented_and_stay_small(name: str) -> None:
    target = TARGETS[name]
    from_network = target.allowed == WIRE
    seeds = target.seeds()
    assert all(map(target.run, seeds)) or name == "message-raw", "what a fuzzer begins with is what is accepted"
    rng = random.Random(name)
    outcomes = Counter()
    tracemalloc.start()
    try:
        for turn in range(FROM_NETWORK if from_network else FROM_FILES):
            data = mutated(seeds[turn % len(seeds)], rng)
            began = time.process_time()
            outcomes["accepted" if target.run(data) else "refused"] += 1
            assert time.process_time() - began < CPU_S
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()
    if from_network:
        assert min(outcomes["accepted"], outcomes["refused"]) > 5, "edits reach the parser and what is behind it"


# Pillow raises a SyntaxError for it.
BROKEN_PNG = (
    b"iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKklEQVR4nGNkYGRipiVgSUhIoKkFjAcOHiJXLwcHBxEWqKqpk2sB"
    b"UYD2QfT02XMswkT5njgLvLx9qGQUDgtWrV5DXRPRPM/ILyBIXQvQAO0j+fyFi0QrJifqGU1MzUjWRAqgfRB9+fqNmZmaCR/dgsio"
    b"aNqYDLNg567dFBqB3/OMcvIKFFqAH9A+ku/df4BblgpRz+js4kqpGfgtWLxkKU0MhnmekYOTiyYWwADtI/nEyVOk6iEp6hl19fRJ"
    b"tYAkQPsgevvuPRKX+mUeY1BwCJWNRLNg0+Yt1DEJh+cZxSUkqWMBDkD7SL5+4yZBRZREPQCx8k/RgNbYgwAAAABJRU5ErkJggg=="
)


def test_a_broken_image_that_was_found_is_refused() -> None:
    target = TARGETS["image"]
    assert not target.run(base64.b64decode(BROKEN_PNG))


def test_a_small_input_never_makes_a_large_allocation() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = bytes(1 << 20)
    bomb = struct.pack("<BI", 1, 0) + b"".join(packer.compress(block) for _ in range(200)) + packer.flush()
    counts = b"\x81\xa4task" + b"\xdd\x7f\xff\xff\xff"
    tracemalloc.start()
    try:
        assert not TARGETS["coded-values"].run(bomb)
        assert not TARGETS["message"].run(b"\x06" + counts)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


STATISTICS = "#300 DONE cov: 12 ft: 14 corp: 4/351b\nstat::number_of_executed_units: {}\n"
CRASH = "KeyError: 'a'\nTest unit written to /x/topic-crash-1\nBase64: Gg==\n"


def test_what_is_reported_is_what_the_fuzzer_says_it_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = iter([(77, CRASH + STATISTICS.format(120)), (0, STATISTICS.format(180)), (0, "Done 300 runs in 2 s")])
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        asked.append(command[command.index("--inputs") + 1])
        code, text = next(said)
        return subprocess.CompletedProcess(command, code, "", text)

    monkeypatch.setattr(subprocess, "run", run)
    row = fuzz_target("topic", 300, tmp_path, 1)
    assert (row["inputs"], row["edges"], asked) == (300, 12, ["300", "180"])
    assert row["crashes"] == [{"input": "topic-crash-1 Gg==", "error": "KeyError: 'a'"}]
    with pytest.raises(SystemExit, match="does not say what it ran"):
        fuzz_target("topic", 300, tmp_path, 1)
