"""Worker processes that decode updates into shared memory, beside the one process that decides and adds.

A worker knows no task, no key and no store: it gets bytes, and gives values and their squares, or a refusal. So it may
be killed at any moment, which costs nothing but its time: the bytes are still here and are decoded again. Memory is
bounded: `SLOTS_A_WORKER` slots a worker, each with room for one update's bytes and its values. They are one anonymous
piece that vanishes with the processes, however those end; a worker ends when its pipe does.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode

SLOTS_A_WORKER = 2
"""One that is decoded, and one that waits, so that no worker waits for the main process."""
MAX_DEATHS = 5
"""So many workers are replaced; a machine on which more die (out of memory, for one) is left alone."""
MAX_WORKERS = 8
"""More decode faster than one main process checks signatures and commits."""
MAX_SHARED_BYTES = 512 << 20
_ALIGNED = 64
# Not `multiprocessing.Process`: that would import the program's main module, and PyTorch with it, into each worker.
_PROGRAM = "import sys; from hushfleet.aggregator.ingest.decoding_pool import work; work(*map(int, sys.argv[1:]))"

log = logging.getLogger("hushfleet.aggregator")

Ticket = TypeVar("Ticket")


class _Places(NamedTuple):
    """Where a slot has an update's bytes and its float32 values, in bytes of the shared memory."""

    data_bytes: int
    value_count: int

    @property
    def slot_bytes(self) -> int:
        return self._values_start + _aligned(4 * self.value_count)

    def data(self, memory: mmap.mmap, slot: int, size: int) -> memoryview:
        start = slot * self.slot_bytes
        return memoryview(memory)[start : start + size]

    def values(self, memory: mmap.mmap, slot: int, size: int) -> np.ndarray:
        return np.frombuffer(memory, np.float32, size, slot * self.slot_bytes + self._values_start)

    @property
    def _values_start(self) -> int:
        return _aligned(self.data_bytes)


class _Answer(NamedTuple):
    """Of a worker: the fields of `Decoded` but the values, or those of a `Refusal`."""

    peaks: tuple[float, ...]
    squares: tuple[float, ...]
    refused: tuple[str, str, bool] | None


@dataclass
class _Job(Generic[Ticket]):
    slot: int
    ticket: Ticket
    value_count: int


@dataclass
class _Worker(Generic[Ticket]):
    """:param jobs: what it was given, in its order; :param free: slots that it was not given."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    free: list[int]
    jobs: deque[_Job[Ticket]] = field(default_factory=deque)


class DecodingPool(Generic[Ticket]):
    """Decodes updates of one task; one thread only may use it.

    :param workers: how many processes; :param max_bytes: of an update; :param max_values: of its values.
    :param done: called by `collect` with the ticket and what came of it; None if its worker died. Values lie in
        shared memory and are overwritten once `done` has returned.
    """

    def __init__(
        self,
        *,
        workers: int,
        max_bytes: int,
        max_values: int,
        done: Callable[[Ticket, Decoded | Refusal | None], None],
    ) -> None:
        self._places = _Places(max_bytes, max_values)
        self._file = _anonymous_file(workers * SLOTS_A_WORKER * self._places.slot_bytes)
        self._memory = mmap.mmap(self._file, 0)
        self._done = done
        self._deaths = 0
        self._lost: deque[Ticket] = deque()
        self._workers: list[_Worker[Ticket]] = []
        for first in range(0, workers * SLOTS_A_WORKER, SLOTS_A_WORKER):
            self._start(list(range(first, first + SLOTS_A_WORKER)))

    @property
    def has_room(self) -> bool:
        return any(worker.free for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def put(self, ticket: Ticket, data: bytes, *, counts: Sequence[int]) -> None:
        """Gives an update to the worker with the least to do; there must be room."""
        worker = max(self._workers, key=lambda each: len(each.free))
        slot = worker.free.pop()
        self._places.data(self._memory, slot, len(data))[:] = data
        worker.jobs.append(_Job(slot, ticket, sum(counts)))
        with contextlib.suppress(OSError):  # it has died: `collect` will see the end of its pipe
            worker.pipe.send((slot, len(data), tuple(counts)))

    def collect(self, *, wait_s: float = 0.0) -> None:
        """Hands on what has been decoded; with nothing there yet, waits for it at most `wait_s` seconds."""
        busy = {worker.pipe: worker for worker in self._workers if worker.jobs}
        for pipe in multiprocessing.connection.wait(list(busy), wait_s) if busy else ():
            worker = busy[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(worker)
            else:
                self._hand_on(worker, answer)
        while self._lost:
            self._done(self._lost.popleft(), None)

    def kill_busy(self) -> None:
        """Ends all workers that owe an answer; `collect` gives their updates back."""
        for worker in self._workers:
            if worker.jobs:
                worker.process.kill()

    def close(self) -> None:
        """Ends all workers; what they were decoding is dropped."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
        self._workers.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _start(self, slots: list[int]) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            inherited = (theirs.fileno(), self._file)
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, (*inherited, *self._places))],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._workers.append(_Worker(process, ours, slots))

    def _hand_on(self, worker: _Worker[Ticket], answer: _Answer) -> None:
        job = worker.jobs.popleft()
        try:
            if answer.refused is not None:
                code, reason, final = answer.refused
                self._done(job.ticket, Refusal(code, reason, final=final))
            else:
                values = self._places.values(self._memory, job.slot, job.value_count)
                self._done(job.ticket, Decoded(values, answer.peaks, answer.squares))
        finally:
            worker.free.append(job.slot)

    def _bury(self, worker: _Worker[Ticket]) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.kill()
        worker.process.wait()
        self._deaths += 1
        slots = worker.free + [job.slot for job in worker.jobs]
        log.warning(
            "a decoding process died with exit code %s; its %d updates are decoded again",
            worker.process.returncode,
            len(worker.jobs),
        )
        if self._deaths <= MAX_DEATHS:
            self._start(slots)
        elif not self._workers:
            log.warning("too many decoding processes died; updates are decoded in the main process from now on")
        self._lost.extend(job.ticket for job in worker.jobs)


def workers_for(*, cores: int, max_bytes: int, max_values: int) -> int:
    """How many workers are worth having: one core is the main process's; 0 where the slots would be too large."""
    room = MAX_SHARED_BYTES // (SLOTS_A_WORKER * _Places(max_bytes, max_values).slot_bytes)
    return max(0, min(cores - 1, MAX_WORKERS, room))


def work(pipe_file: int, memory_file: int, *places_of: int) -> None:
    """A worker's life: until the pipe ends. The arguments are descriptors that it inherited, and its `_Places`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process decides
    pipe, memory, places = Connection(pipe_file), mmap.mmap(memory_file, 0), _Places(*places_of)
    while True:
        try:
            slot, size, counts = pipe.recv()
        except EOFError:
            return
        decoded = decode(places.data(memory, slot, size), counts=counts, out=places.values(memory, slot, sum(counts)))
        if isinstance(decoded, Refusal):
            pipe.send(_Answer((), (), (decoded.code, decoded.reason, decoded.final)))
        else:
            pipe.send(_Answer(decoded.peaks, decoded.squares, None))


def _anonymous_file(size: int) -> int:
    """A descriptor of so many bytes of memory that ends with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("hushfleet-decoding")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.truncate(file, size)
    return file


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
