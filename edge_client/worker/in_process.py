"""Works in the guardian's own process: for simulations that host many devices in one process, and for tests."""

from __future__ import annotations

import time
from collections.abc import Callable

from hushfleet.edge_client.worker.job import Job, Outcome, Told
from hushfleet.edge_client.worker.work import JobWork


class InProcess:
    """A `Workshop` that works in `begin`; the outcome is there at the first `poll`. FOR SIMULATION ONLY.

    Nothing limits the work, and the keys are in the same memory.

    :param clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._heard: list[Told] = []
        self._work = JobWork(self._heard.append, clock=clock)
        self._outcome: Outcome | None = None

    @property
    def work(self) -> JobWork:
        """The work of this process, with the task that is loaded."""
        return self._work

    def begin(self, job: Job) -> None:
        self._outcome = self._work.do(job)

    def poll(self) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome

    def told(self) -> list[Told]:
        heard = list(self._heard)
        self._heard.clear()
        return heard

    def give_up(self) -> None:
        self._outcome = None
