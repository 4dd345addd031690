"""Decoding in worker processes: what a worker gives is what the function gives, and killing one costs nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.ingest import decoding_pool
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode
from hushfleet.aggregator.ingest.decoding_pool import (
    MAX_BYTES,
    MAX_RESTARTS,
    UPDATES_A_WORKER,
    DecodingPool,
    workers_for,
)
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader, encode_update

IDENTITY = Identity.from_bytes(bytes(range(32)))
COUNTS = (500, 200_000, 3)
SIZE = sum(COUNTS)
STEPS = {"quantized": (0.1, 0.5, 1.0), "one-bit": (0.5, 0.5, 0.5), "float16": (), "float32": ()}


def blob(codec: str, *, seed: int = 0, largest: float = 3.0) -> bytes:
    values = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
    values[seed] = largest
    header = UpdateHeader(
        task="t-1", round=1, device=f"dev-{seed}", codec=codec, value_count=SIZE, steps=STEPS[codec],
        noise_stds=(1.0,) * 3, clip_norms=(1.0,) * 3, public_digest=bytes(16), rounds_charged=1, epsilon_server=1.0,
        multiplier_server=1.0, noise_split=1,
    )  # fmt: skip
    return encode_update(header, values, counts=COUNTS, identity=IDENTITY).data


@pytest.fixture
def make_pool() -> Iterator[Callable[[int], DecodingPool]]:
    with contextlib.ExitStack() as stack:

        def make(workers: int) -> DecodingPool:
            pool = DecodingPool(workers)
            stack.callback(pool.close)
            return pool

        yield make


MakePool = Callable[[int], DecodingPool]


def submitted(pool: DecodingPool, data: bytes) -> Future[Decoded | Refusal]:
    """Waits for room."""
    ends_at = time.monotonic() + 60
    while (future := pool.submit(data, COUNTS)) is None:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    return future


def result(future: Future[Decoded | Refusal], data: bytes) -> Decoded | Refusal:
    wait([future], 60)
    assert future.done()
    return DecodingPool.result(future, data, COUNTS)


def assert_same(ours: Any, expected: Any) -> None:
    assert type(ours) is type(expected)
    if isinstance(expected, Refusal):
        assert (ours.code, ours.reason, ours.final) == (expected.code, expected.reason, expected.final)
    else:
        assert ours.values.tobytes() == expected.values.tobytes()
        assert ours.squares == expected.squares


def test_workers_give_what_the_function_gives_for_every_codec_and_every_fault(make_pool: MakePool) -> None:
    pool = make_pool(2)
    blobs = [blob(codec, seed=seed) for seed, codec in enumerate(STEPS)]
    blobs += [blob("float32", seed=4, largest=2.0**21), blobs[0][:-90], b"no update", blob("quantized", seed=7)]
    futures = [submitted(pool, data) for data in blobs]
    found = [result(future, data) for future, data in zip(futures, blobs, strict=True)]
    for each, data in zip(found, blobs, strict=True):
        assert_same(each, decode(data, COUNTS))
    codes = {place: each.code for place, each in enumerate(found) if isinstance(each, Refusal)}
    assert codes == {4: "out-of-bounds", 5: "malformed", 6: "malformed"}


def test_a_killed_worker_costs_its_time_and_is_replaced(make_pool: MakePool) -> None:
    pool, data = make_pool(1), blob("quantized")
    expected = decode(data, COUNTS)
    assert_same(result(submitted(pool, data), data), expected)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    futures = [submitted(pool, data) for _ in range(UPDATES_A_WORKER)]
    assert pool.submit(data, COUNTS) is None, "there is room for so many"
    assert not any(future.done() for future in futures)
    os.kill(pid, signal.SIGKILL)
    for future in futures:
        assert_same(result(future, data), expected)
        assert isinstance(future.exception(), BrokenProcessPool)
    again = submitted(pool, data)
    assert pool.pids != [pid]
    assert_same(result(again, data), expected)
    assert again.exception() is None


def test_a_worker_that_hangs_can_be_killed(make_pool: MakePool) -> None:
    pool, data = make_pool(1), blob("quantized")
    result(submitted(pool, data), data)
    os.kill(pool.pids[0], signal.SIGSTOP)
    future = submitted(pool, data)
    pool.kill()
    assert_same(result(future, data), decode(data, COUNTS))


def test_where_worker_after_worker_dies_there_is_no_room_any_more(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_pool, "_begin_worker", os.abort)
    pool, data = make_pool(1), blob("one-bit")
    for _ in range(MAX_RESTARTS + 1):
        assert_same(result(submitted(pool, data), data), decode(data, COUNTS))
    assert pool.submit(data, COUNTS) is None


def test_workers_are_bounded_by_cores_and_memory() -> None:
    assert workers_for(cores=1, update_bytes=1000) == 0
    assert workers_for(cores=4, update_bytes=1000) == 3
    assert workers_for(cores=64, update_bytes=1000) == decoding_pool.MAX_WORKERS
    assert workers_for(cores=64, update_bytes=MAX_BYTES // 4) == 2
    assert workers_for(cores=64, update_bytes=MAX_BYTES) == 0


def test_workers_import_no_pytorch_and_no_store(make_pool: MakePool) -> None:
    pool = make_pool(1)
    assert pool._executor is not None
    result(submitted(pool, blob("one-bit")), blob("one-bit"))
    for name in ("torch", "sqlite3"):
        found = pool._executor.submit(eval, f"{name!r} in __import__('sys').modules").result(60)
        assert found is False, name


def test_workers_die_with_the_main_process(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import time\n"
        "from hushfleet.aggregator.ingest.decoding_pool import DecodingPool\n"
        "if __name__ == '__main__':\n"
        "    pool = DecodingPool(2)\n"
        "    futures = [pool.submit(b'', [1]) for _ in range(2)]\n"
        "    [future.result() for future in futures]\n"
        "    print(*pool.pids, flush=True)\n"
        "    time.sleep(60)\n"
    )
    main = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=_environment())
    assert main.stdout is not None
    pids = [int(word) for word in main.stdout.readline().split()]
    assert pids
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
