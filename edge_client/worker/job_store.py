"""A job's part of the device's store, for the round that a worker trains: it is read, and the result is kept here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.arrays import coded, decoded_state, residual_of
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry, RoundCommit
from hushfleet.edge_client.worker.job import Job
from hushfleet.errors import StoreError
from hushfleet.methods.state import DeviceState
from hushfleet.privacy.charge import Totals
from hushfleet.privacy.ledger import LedgerView


class JobLedger(LedgerView):
    """The totals of a job's task, which the guardian has verified."""

    def __init__(self, job: Job) -> None:
        self.device, self._task, self._spent = job.config.device.id, job.plan.task, job.spent

    def totals(self, task: str | None = None) -> Totals:
        return self._spent if task in (None, self._task) else Totals()


class JobStore:
    """Implements `RoundStore` for one job.

    :param job: the present one; in a process with several jobs it is replaced.
    """

    identity: Any = None
    """A worker has no key: its guardian signs."""

    def __init__(self, job: Job) -> None:
        self.take(job)

    def take(self, job: Job) -> None:
        """Begins the next job."""
        self.job = job
        self.ledger = JobLedger(job)
        self.commit: CodedRound | None = None
        self.new: dict[bytes, None] = {}
        self._known = dict(job.arrivals)

    def release(self) -> None:
        """Drops what only this job needs: a process that waits for the next one keeps its memory small."""
        self.job, self.commit = replace(self.job.light(), state=None), None

    @property
    def answers(self) -> Answers:
        raise StoreError("a worker answers no committee")

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        return None

    def package_of(self, task: str) -> bytes | None:
        return None  # the guardian has compared it

    def load_state(self, task: str) -> DeviceState | None:
        stored = self.job.state if task == self.job.plan.task else self.job.earlier
        return None if stored is None else decoded_state(stored)

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        return residual_of(self.job.state, size=size)

    def commit_round(self, commit: RoundCommit[DeviceState]) -> OutboxEntry:
        """Keeps the result for the guardian, who stores it."""
        self.commit = coded(commit)
        digest = hashlib.sha256(commit.update).digest()
        return OutboxEntry(commit.task, commit.round, commit.update, digest, commit.public_before, "pending")

    def arrived(self, keys: Sequence[bytes]) -> list[int]:
        """Returns when each sample arrived; new ones arrive now, and the guardian stores them before the round."""
        self.new |= dict.fromkeys(key for key in keys if key not in self._known)
        return [self._known.get(key, self.job.at) for key in keys]
