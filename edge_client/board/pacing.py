"""Models a slower board than this machine by waiting: training and writes take as long as on that board.

FOR SIMULATION ONLY. The results never change, only the time when they are ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hushfleet.edge_client.board.config import SimulationSection
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore

LEAST_WAIT_S = 1.0
"""The shortest wait between steps. After a wait the caches are cold: in a measurement, steps of 0.4 ms with a wait
after each cost up to three times their CPU time, which the slowdown would then multiply."""


class Pacer:
    """Stretches the work of a worker: since `begin`, wall time is kept at `slowdown` times the CPU time, or more.

    :param slowdown: at least 1; with 1 nothing ever waits.
    :param wall: monotonic seconds.
    :param cpu: seconds of CPU time of the thread that works.
    :param sleep: waits for so many seconds.

    Wall time without CPU time, as on a busy machine, counts too: the board would have continued to work meanwhile.
    """

    def __init__(
        self,
        slowdown: float = 1.0,
        *,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.slowdown = slowdown
        self._wall, self._cpu, self._sleep = wall, cpu, sleep
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

    def step(self) -> None:
        """Notes that a step is done and more follow: waits if `LEAST_WAIT_S` or more is due."""
        if self.slowdown > 1.0 and self._due_s() >= LEAST_WAIT_S:
            self.catch_up()

    def catch_up(self) -> None:
        """Waits until the board would have done all the work that this thread has done."""
        if self.slowdown > 1.0 and (left := self._due_s()) > 0:
            self._sleep(left)

    def _due_s(self) -> float:
        return self._wall_from + self.slowdown * (self._cpu() - self._cpu_from) - self._wall()


class SlowStore(DeviceStore):
    """The store of a slow board: models, updates and states take as long to write as on the board, each byte once.

    :param write_mb_s: 10^6 bytes a second.
    :param stop: ends all waits once it is set.
    """

    def __init__(self, path: Path, *, device: str, durable: bool, write_mb_s: float, stop: threading.Event) -> None:
        self._write_mb_s, self._stop = write_mb_s, stop
        super().__init__(path, device=device, durable=durable)

    def put_blob(self, digest: bytes, data: bytes) -> None:
        super().put_blob(digest, data)
        self._take_time(len(data))

    def commit_coded(self, commit: CodedRound) -> OutboxEntry:
        entry, state = super().commit_coded(commit), commit.state
        self._take_time(sum(map(len, (commit.update, state.public, state.own or b"", state.private))))
        return entry

    def _take_time(self, written_bytes: int) -> None:
        self._stop.wait(written_bytes / (self._write_mb_s * 1e6))


def open_store(
    path: Path, *, device: str, simulation: SimulationSection | None, stop: threading.Event, in_fleet: bool = False
) -> DeviceStore:
    """Opens a device's store; raises the errors of `DeviceStore`. In a simulation it may be slow and not synced."""
    if simulation is None:
        return DeviceStore(path, device=device, in_fleet=in_fleet)
    if simulation.write_mb_s is None:
        return DeviceStore(path, device=device, durable=simulation.durable)
    write_mb_s = simulation.write_mb_s
    return SlowStore(path, device=device, durable=simulation.durable, write_mb_s=write_mb_s, stop=stop)
