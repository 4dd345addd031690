"""Runs the worker processes of the fast engine: one for each core, with one thread each.

Results do not depend on their number: each device's randomness is derived from its number and the round.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self, TypeVar

import psutil

from hushfleet.errors import HushfleetError
from hushfleet.methods import ALLOWED_FILE
from hushfleet.output import escape_output

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

# One process with one thread for each core: threads of one process would compete for the cores. Also, glibc returns
# freed megabytes to the kernel immediately, which zeroes them again for the next batch: keeping them saves up to a
# third of the time. glibc reads these variables when a process starts.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


_STARTING = threading.RLock()


class WorkerPool(Protocol):
    """Processes that work on a list of items: on this machine (`Workers`) or on a cluster (`RayWorkers`).

    :param count: how many work at the same time.
    """

    count: int

    def map(self, function: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
        """Yields outcomes in the order of the items, as they become ready."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None: ...


class Workers:
    """Runs functions of one item in `count` processes, or here when `count` is 1.

    In a program `with hf.Workers() as workers:` keeps the processes for the runs of the block.

    :param count: 0 means one for each processor core. In a daemonic process, such as Celery's, which may not have
        children, it is 1.
    """

    def __init__(self, count: int = 0) -> None:
        alone = multiprocessing.current_process().daemon
        self.count = 1 if alone else count or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        self._known: set[object] = set()

    def begin(self, folder: Path, device: str = "") -> None:
        """Begins another run in this folder: processes that have loaded something else by its name are replaced."""
        method = os.environ.get(ALLOWED_FILE, "")
        path = Path(method.rpartition(":")[0])
        key = method, path.stat().st_mtime_ns if method and path.exists() else 0, device
        if folder in self._known or (self._known and key not in self._known):
            self.__exit__(None)
            self._known.clear()
        self._known |= {folder, key}

    def map(self, function: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
        """Yields outcomes in the order of the items, as they become ready."""
        if self.count == 1:
            return map(function, items)
        if self._pool is None:
            # Spawned, not forked: a fork of a process that has used OpenMP threads may hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=begin_worker)
        others = {*multiprocessing.active_children()}
        with inherited():  # a process is started when there is work for it
            outcomes = self._pool.map(function, items)
        self._processes |= {*multiprocessing.active_children()} - others
        return _heard(outcomes)

    def processor_s(self) -> float:
        """Returns the processor time that this process and its workers have used so far."""
        taken = time.process_time()
        for process in self._processes:
            with suppress(psutil.Error):  # it was killed: `map` reports that
                times = psutil.Process(process.pid).cpu_times()
                taken += times.user + times.system
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:  # unfinished work is done again, as after a power cut
                for process in self._processes:
                    process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _heard(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    try:
        yield from outcomes
    except BrokenProcessPool as error:
        raise HushfleetError(
            "a worker process was killed, perhaps because memory ran out; take fewer --workers, and go on by --resume"
        ) from error


@contextmanager
def inherited() -> Iterator[None]:
    """Lets processes that are started inside inherit `ENVIRONMENT` and leave Ctrl-C to this process.

    This process then ends the others properly. They do not import the main program, as spawned processes otherwise do:
    a script without `if __name__ == "__main__"` would start again in each of them.
    """
    with _STARTING:
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = program
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def begin_worker() -> None:
    """Initialises a worker process: it has one thread, and ends with its parent.

    Only the parent receives a signal to the whole process group, as `timeout` and Slurm send.
    """
    os.setpgrp()
    escape_output()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process with its parent: an orphan would wait for work forever, and hold a device's store."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
