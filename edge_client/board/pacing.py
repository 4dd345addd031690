"""Models a slower board than this machine by waiting: work and writes take as long as on that board.

FOR SIMULATION ONLY. The results never change, only the time when they are ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hushfleet.edge_client.board.config import SimulationSection
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore

SLICE_S = 0.05
LEAST_WAIT_S = 1.0
"""The shortest wait between steps. After a wait the caches are cold: in a measurement, steps of 0.4 ms with a wait
after each cost up to three times their CPU time, which the slowdown would then multiply."""


class Pacer:
    """Stretches the work of one thread: since `begin`, wall time is kept at `slowdown` times the CPU time, or more.

    :param slowdown: at least 1; with 1 nothing ever waits.
    :param stop: ends all waits once it is set.
    :param wall: monotonic seconds.
    :param cpu: seconds of CPU time of the thread that works.

    Wall time without CPU time, as on a busy machine, counts too: the board would have continued to work meanwhile.
    """

    def __init__(
        self,
        slowdown: float = 1.0,
        *,
        stop: threading.Event | None = None,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.slowdown = slowdown
        self._stop = stop or threading.Event()
        self._wall = wall
        self._cpu = cpu
        self._check: Callable[[], None] = lambda: None
        self.begin()

    def begin(self) -> None:
        """Starts the count: only work that is done from now on counts."""
        self._wall_from, self._cpu_from = self._wall(), self._cpu()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Does not count the work inside, which no board does, such as a simulation's test of a model."""
        self.catch_up()
        try:
            yield
        finally:
            self.begin()

    @contextmanager
    def checked_by(self, check: Callable[[], None]) -> Iterator[None]:
        """Runs `check` inside at each `step` and `catch_up`, and while they wait; an error that it raises ends them."""
        before, self._check = self._check, check
        try:
            yield
        finally:
            self._check = before

    def step(self) -> None:
        """Notes that a step is done and more follow: waits if `LEAST_WAIT_S` or more is due."""
        self._check()
        if self.slowdown > 1.0 and self._due() - self._wall() >= LEAST_WAIT_S:
            self._wait_until(self._due())

    def catch_up(self) -> None:
        """Waits until the board would have done all the work that this thread has done."""
        self._check()
        if self.slowdown > 1.0:
            self._wait_until(self._due())

    def wait(self, seconds: float) -> None:
        """Waits for something that is slow on the board besides its work, in addition to the work's slowdown."""
        began = self._wall()
        try:
            self._wait_until(began + seconds)
        finally:
            self._wall_from += self._wall() - began

    def _due(self) -> float:
        return self._wall_from + self.slowdown * (self._cpu() - self._cpu_from)

    def _wait_until(self, due: float) -> None:
        while (left := due - self._wall()) > 0 and not self._stop.wait(min(left, SLICE_S)):
            self._check()


class PacedStore(DeviceStore):
    """The store of a slow board: an update is committed no earlier than the board would have it, and writes take as
    long as on the board.

    :param write_mb_s: 10^6 bytes a second; None: as fast as this machine.

    Models, updates and states count, each byte once; facts of a few bytes do not.
    """

    def __init__(self, path: Path, *, device: str, durable: bool, pacer: Pacer, write_mb_s: float | None) -> None:
        self._pacer = pacer
        self._write_mb_s = write_mb_s
        super().__init__(path, device=device, durable=durable)

    def put_blob(self, digest: bytes, data: bytes) -> None:
        super().put_blob(digest, data)
        self._take_time(len(data))

    def commit_round(self, commit: RoundCommit) -> OutboxEntry:
        """Commits a round. Before the commit the round may still be given up without a charge; after it, it may not."""
        self._pacer.catch_up()
        with self._pacer.checked_by(lambda: None):
            entry = super().commit_round(commit)
            self._pacer.catch_up()
            self._take_time(commit.written_bytes)
        return entry

    def _take_time(self, written_bytes: int) -> None:
        if self._write_mb_s is not None:
            self._pacer.wait(written_bytes / (self._write_mb_s * 1e6))


def open_store(
    path: Path, *, device: str, simulation: SimulationSection | None, pacer: Pacer, in_fleet: bool = False
) -> DeviceStore:
    """Opens a device's store; raises the errors of `DeviceStore`. In a simulation it may be slow and not synced."""
    if simulation is None:
        return DeviceStore(path, device=device, in_fleet=in_fleet)
    return PacedStore(path, device=device, durable=simulation.durable, pacer=pacer, write_mb_s=simulation.write_mb_s)
