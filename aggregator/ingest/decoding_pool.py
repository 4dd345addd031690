"""Worker processes that decode updates, beside the one process that decides and adds.

A worker knows no task, no key and no store: it gets bytes, and gives values and their squares, or a refusal. So it may
be killed at any moment, which costs nothing but time: the bytes are still here and are decoded again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode

UPDATES_A_WORKER = 2
"""One that is decoded, and one that waits, so that no worker waits for the main process."""
MAX_RESTARTS = 5
"""A machine on which workers die more often (out of memory, for one) is left alone."""
MAX_WORKERS = 8
"""More decode faster than one main process checks signatures and commits."""
MAX_BYTES = 512 << 20
"""Of all updates in the pool together, as bytes and as values."""

log = logging.getLogger("hushfleet.aggregator")


def workers_for(*, cores: int, update_bytes: int) -> int:
    """How many workers are worth having: one core is the main process's; 0 where updates are too large.

    :param update_bytes: of the largest update and of its values.
    """
    return max(0, min(cores - 1, MAX_WORKERS, MAX_BYTES // (UPDATES_A_WORKER * update_bytes)))


class DecodingPool:
    """Decodes updates; one thread only may use it. The workers end with this process, however that ends.

    :param workers: how many processes, at least 1.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._restarts = 0
        self._futures: set[Future[Decoded | Refusal]] = set()
        self._executor: ProcessPoolExecutor | None = self._started()

    @property
    def pids(self) -> list[int]:
        """Of the workers that have been started; each is, when it is first needed."""
        return [] if self._executor is None else list(self._executor._processes or ())

    def submit(self, data: bytes, counts: Sequence[int]) -> Future[Decoded | Refusal] | None:
        """Begins to decode an update; None where all workers are busy, or keep dying."""
        self._futures = {future for future in self._futures if not future.done()}
        if self._executor is None or len(self._futures) >= self._workers * UPDATES_A_WORKER:
            return None
        try:
            future = self._executor.submit(decode, data, tuple(counts))
        except (BrokenProcessPool, OSError) as error:
            self._restarts += 1
            log.warning("a decoding process died or did not start; what it had is decoded again: %s", error)
            if self._restarts > MAX_RESTARTS:
                log.warning("too many decoding processes died; updates are decoded in the main process from now on")
            self._executor = self._started() if self._restarts <= MAX_RESTARTS else None
            return self.submit(data, counts)
        self._futures.add(future)
        return future

    @staticmethod
    def result(future: Future[Decoded | Refusal], data: bytes, counts: Sequence[int]) -> Decoded | Refusal:
        """Of a future that is done; where a worker died, the update is decoded here."""
        try:
            return future.result()
        except (BrokenProcessPool, CancelledError):
            return decode(data, counts)

    def kill(self) -> None:
        """Ends all workers at once; the futures of what they had are soon done."""
        for process in () if self._executor is None else list((self._executor._processes or {}).values()):
            process.kill()

    def close(self) -> None:
        """Ends all workers; what they were decoding is dropped."""
        self.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = None

    def _started(self) -> ProcessPoolExecutor:
        # not forked: this process has threads, and PyTorch
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, mp_context=spawn, initializer=_begin_worker)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
