"""Decoding in worker processes: what a worker gives is what the function gives, and killing one costs nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.ingest import decoding_pool
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode
from hushfleet.aggregator.ingest.decoding_pool import (
    MAX_DEATHS,
    MAX_SHARED_BYTES,
    SLOTS_A_WORKER,
    DecodingPool,
    workers_for,
)
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader, encode_update

IDENTITY = Identity.from_bytes(bytes(range(32)))
COUNTS = (500, 200_000, 3)
SIZE = sum(COUNTS)
STEPS = {"quantized": (0.1, 0.5, 1.0), "one-bit": (0.5, 0.5, 0.5), "float16": (), "float32": ()}
MAX_BYTES = 5 * SIZE + 1000


def blob(codec: str, *, seed: int = 0, largest: float = 3.0) -> bytes:
    values = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
    values[seed] = largest
    header = UpdateHeader(
        task="t-1", round=1, device=f"dev-{seed}", codec=codec, value_count=SIZE, steps=STEPS[codec],
        noise_stds=(1.0,) * 3, clip_norms=(1.0,) * 3, public_digest=bytes(16), rounds_charged=1, epsilon_server=1.0,
        multiplier_server=1.0, noise_split=1,
    )  # fmt: skip
    return encode_update(header, values, counts=COUNTS, identity=IDENTITY).data


class Taken:
    """What came of each ticket; values are copied, since their memory is used again."""

    def __init__(self) -> None:
        self.of: dict[int, Decoded | Refusal | None] = {}

    def __call__(self, ticket: int, decoded: Decoded | Refusal | None) -> None:
        assert ticket not in self.of
        self.of[ticket] = decoded._replace(values=decoded.values.copy()) if isinstance(decoded, Decoded) else decoded

    def wait(self, pool: DecodingPool[int], count: int) -> None:
        ends_at = time.monotonic() + 60
        while len(self.of) < count:
            assert time.monotonic() < ends_at
            pool.collect(wait_s=1.0)


MakePool = Callable[[int], tuple[DecodingPool[int], Taken]]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    with contextlib.ExitStack() as stack:

        def make(workers: int) -> tuple[DecodingPool[int], Taken]:
            taken = Taken()
            pool: DecodingPool[int] = DecodingPool(
                workers=workers, max_bytes=MAX_BYTES, max_values=SIZE, done=taken
            )
            stack.callback(pool.close)
            return pool, taken

        yield make


def assert_same(ours: Any, expected: Any) -> None:
    assert type(ours) is type(expected)
    if isinstance(expected, Refusal):
        assert (ours.code, ours.reason, ours.final) == (expected.code, expected.reason, expected.final)
    else:
        assert ours.values.tobytes() == expected.values.tobytes()
        assert ours.squares == expected.squares


def test_workers_give_what_the_function_gives_for_every_codec_and_every_fault(make_pool: MakePool) -> None:
    pool, taken = make_pool(2)
    blobs = [blob(codec, seed=seed) for seed, codec in enumerate(STEPS)]
    blobs += [blob("float32", seed=4, largest=2.0**21), blobs[0][:-90], b"no update", blob("quantized", seed=7)]
    for ticket, data in enumerate(blobs):
        while not pool.has_room:
            pool.collect(wait_s=1.0)
        pool.put(ticket, data, counts=COUNTS)
    taken.wait(pool, len(blobs))
    for ticket, data in enumerate(blobs):
        assert_same(taken.of[ticket], decode(data, counts=COUNTS))
    codes = {ticket: each.code for ticket, each in taken.of.items() if isinstance(each, Refusal)}
    assert codes == {4: "out-of-bounds", 5: "malformed", 6: "malformed"}


def test_a_killed_worker_gives_its_updates_back_and_is_replaced(make_pool: MakePool) -> None:
    pool, taken = make_pool(1)
    data = blob("quantized")
    pool.put(0, data, counts=COUNTS)
    taken.wait(pool, 1)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    for ticket in range(1, 1 + SLOTS_A_WORKER):
        pool.put(ticket, data, counts=COUNTS)
    assert not pool.has_room
    pool.collect()
    assert set(taken.of) == {0}
    os.kill(pid, signal.SIGKILL)
    taken.wait(pool, 1 + SLOTS_A_WORKER)
    assert [taken.of[ticket] for ticket in range(1, 1 + SLOTS_A_WORKER)] == [None] * SLOTS_A_WORKER
    assert pool.has_room
    assert pool.pids != [pid]
    pool.put(9, data, counts=COUNTS)
    taken.wait(pool, 2 + SLOTS_A_WORKER)
    assert_same(taken.of[9], decode(data, counts=COUNTS))


def test_where_worker_after_worker_dies_there_is_no_room_any_more(make_pool: MakePool) -> None:
    pool, taken = make_pool(1)
    for ticket in range(MAX_DEATHS + 1):
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        pool.put(ticket, b"", counts=COUNTS)
        taken.wait(pool, ticket + 1)
    assert not pool.has_room
    assert set(taken.of.values()) == {None}


def test_an_update_is_not_lost_where_taking_another_one_fails(make_pool: MakePool) -> None:
    pool, taken = make_pool(1)
    (pid,) = pool.pids
    for ticket in (0, 1):
        pool.put(ticket, blob("one-bit"), counts=COUNTS)

    def fail(ticket: int, decoded: object) -> None:
        raise RuntimeError(ticket)

    pool._done = fail  # as where no answer can be sent
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="0"):
        pool.collect(wait_s=30.0)
    pool._done = taken
    taken.wait(pool, 1)
    assert set(taken.of) == {1}


def test_workers_are_bounded_by_cores_and_memory() -> None:
    assert workers_for(cores=1, max_bytes=1000, max_values=100) == 0
    assert workers_for(cores=4, max_bytes=1000, max_values=100) == 3
    assert workers_for(cores=64, max_bytes=1000, max_values=100) == decoding_pool.MAX_WORKERS
    assert workers_for(cores=64, max_bytes=MAX_SHARED_BYTES // 8, max_values=MAX_SHARED_BYTES // 32) == 2
    assert workers_for(cores=64, max_bytes=MAX_SHARED_BYTES, max_values=100) == 0


def test_workers_import_no_pytorch_and_die_with_the_main_process(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys, time\n"
        "from hushfleet.aggregator.ingest.decoding_pool import DecodingPool\n"
        "if __name__ == '__main__':\n"
        "    assert 'torch' not in sys.modules and 'sqlite3' not in sys.modules\n"
        "    pool = DecodingPool(workers=2, max_bytes=100, max_values=10, done=print)\n"
        "    print(*pool.pids, flush=True)\n"
        "    time.sleep(60)\n"
    )
    main = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=_environment())
    assert main.stdout is not None
    pids = [int(word) for word in main.stdout.readline().split()]
    assert len(pids) == 2
    main.kill()
    main.wait()
    ends_at = time.monotonic() + 30
    while any(map(_is_running, pids)):
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _is_running(pid: int) -> bool:
    """Dead ones that nobody has waited for do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
