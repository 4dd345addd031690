"""Does the jobs of a guardian: trains a round, or chooses a personalized head. It runs in a worker's process.

What goes wrong becomes a `Failed` with a public reason. Which samples the device has decides about a decline only where
the training time is no secret.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.notes import DataUse, Note
from hushfleet.edge_client.storage.declines import Declined, DeclineReason, decline_reason, ran_out_of_memory
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.edge_client.worker.job import (
    MAX_TEXT_CHARS,
    Applied,
    Failed,
    Finished,
    HeadChosen,
    Job,
    NeedsFeatures,
    Told,
)
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.edge_client.worker.loaded_task import LoadedTask
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import BadInput, GraphRefused, StoreError, WireError
from hushfleet.schema import pack, unpack
from hushfleet.wire.format.spec import BlobRef, TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.board import new_samples
    from hushfleet.edge_client.worker import head, kept_features
    from hushfleet.secure import membership_list
else:
    new_samples = at_need("hushfleet.edge_client.board.new_samples")
    head = at_need("hushfleet.edge_client.worker.head")
    kept_features = at_need("hushfleet.edge_client.worker.kept_features")
    membership_list = at_need("hushfleet.secure.membership_list")

_MAX_WHY_CHARS = MAX_TEXT_CHARS // 4  # JSON may write a character as six

_log = logging.getLogger("hushfleet.edge")


class JobWork:
    """Does one job after the other; the task and the data stay loaded between them.

    :param tell: receives what is told meanwhile.
    :param clock: monotonic seconds.
    """

    file: int | None = None
    """The descriptor of the board's file of features, for a job that uses it."""

    def __init__(self, tell: Callable[[Told], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._loaded: tuple[bytes, JobStore, LoadedTask] | None = None
        self._kept: kept_features.KeptFeatures | None = None

    @property
    def loaded(self) -> LoadedTask:
        """The task of the last job."""
        assert self._loaded is not None
        return self._loaded[2]

    def do(self, job: Job) -> Finished | HeadChosen | Applied | NeedsFeatures | Failed:
        """Returns the outcome of a job."""
        if job.differences:
            return _applied(job)
        if self.file is None and job.features == "kept":  # it could not be opened
            return NeedsFeatures()
        if self.file is not None:
            self._kept = self._kept or kept_features.KeptFeatures(makes=job.features == "make")
            self._kept.file = self.file
        try:
            store, task = self._task(job)
        except Exception as error:
            return Failed(*_of_task(error), of_task=True)
        try:
            if self._kept is not None and self._kept.makes:
                return _made_features(task)
            return self._round(job, store, task) if job.head is None else head.chosen_head(job, job.head, task)
        except kept_features.FeaturesLacking:
            return NeedsFeatures()
        except Exception as error:
            return Failed(*decline_reason(error))
        finally:
            store.release()

    def _task(self, job: Job) -> tuple[JobStore, LoadedTask]:
        digest = BlobRef.of(job.package).digest
        if self._loaded is not None and self._loaded[0] == digest:
            store, task = self._loaded[1:]
            store.take(job)
        else:
            self._loaded, store = None, JobStore(job)
            kept = None if job.accelerator is None else unpack(ChosenAccelerator, job.accelerator, what="the choice")
            task = LoadedTask(
                TaskSpec.from_bytes(job.package),
                job.graphs,
                config=job.config,
                store=store,
                note=_DataNote(self._tell),
                clock=self._clock,
                digest=digest,
                accelerator=kept,
                processor_only=job.processor_only,
                kept_features=self._kept,
            )
            self._loaded = digest, store, task
        if task.chosen is not None and pack(task.chosen) != job.accelerator:
            self._tell(Told(accelerator=pack(task.chosen)))
        return store, task

    def _round(self, job: Job, store: JobStore, task: LoadedTask) -> Finished:
        params = np.frombuffer(job.model, "<f4")
        if not np.isfinite(params).all():  # nothing could be sent, and the failure may depend on the data
            raise Declined("no-privacy", "the round's model has values that are not finite")
        if job.hides and job.nominal_s is None:
            self._tell(Told(nominal_s=task.nominal_seconds(params)))
        listed = None if job.membership_list is None else membership_list.MembershipList.from_bytes(job.membership_list)
        round = DeviceRound(task.trainer, job.plan, listed)
        round.at, round.mask_keys = job.at, job.mask_keys
        assert job.charge is not None
        round.charge = job.charge
        task.begins()
        samples = b"" if job.hides or job.blank else self._read(job, round)
        round.run(params, blank=job.blank)
        done = store.commit
        assert done is not None
        failed = None if round.failed is None else round.failed[:MAX_TEXT_CHARS]
        if task.chosen is not None and task.chosen.failed is not None:
            self._tell(Told(accelerator=pack(task.chosen)))
        return Finished(done.charge, done.update, done.public_before, done.state, failed, samples, tuple(store.new))

    def _read(self, job: Job, round: DeviceRound) -> bytes:
        """Reads the data before any training; returns the samples' digests if new ones count.

        Raises `BadInput` if the task needs data and this device has none, and `Declined` if too few are new.
        """
        spec = round.trainer.spec
        try:
            samples = round.samples()
        except (BadInput, StoreError):
            raise
        except Exception as error:  # training fails in the same way, and hides it in its answer
            _log.error("the data cannot be read: %s", error)
            return b""
        if job.trained_samples is None or not spec.after_new or round.asks:
            return b""
        digests = new_samples.digests_of(samples)
        if new_samples.count_new(digests, job.trained_samples, task=spec.task) < spec.after_new:
            raise Declined(
                "paused",
                f"fewer than {spec.after_new} new samples since the last update; this device's owner lets it say so",
            )
        return b"".join(digests)


def _made_features(task: LoadedTask) -> NeedsFeatures:
    """Makes the features of the samples, in the file. What goes wrong here goes wrong again where they are needed."""
    try:
        task.data.samples()
    except Exception as error:
        _log.error("no features are kept: %s", error)
    return NeedsFeatures()


def _applied(job: Job) -> Applied | Failed:
    from hushfleet.wire.format.difference import apply_all

    try:
        return Applied(apply_all(job.model, job.differences, job.plan.task, job.counts))
    except WireError as error:
        return Failed("error", str(error)[:MAX_TEXT_CHARS])


class _DataNote(Note):
    """Tells the guardian what the data were used for, who writes it down."""

    def __init__(self, tell: Callable[[Told], None]) -> None:
        super().__init__(None)
        self._tell = tell

    def keep(self, words: object) -> None:
        if isinstance(words, DataUse):
            self._tell(Told(data_use=self.text_of(replace(words, why=words.why[:_MAX_WHY_CHARS]))))


def _of_task(error: Exception) -> DeclineReason:
    """Returns the public reason why a task cannot be run here."""
    if isinstance(error, (WireError, BadInput)):
        return DeclineReason("error", f"the task cannot be run here: {error}"[:MAX_TEXT_CHARS])
    if isinstance(error, GraphRefused) and not ran_out_of_memory(error):  # depends only on task and limits
        return DeclineReason("graph", str(error)[:MAX_TEXT_CHARS])
    return decline_reason(error)
