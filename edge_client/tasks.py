"""Turns a task notice into a task that can be run: fetches its package and its graphs, which a worker checks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.download import BlobSource
from hushfleet.edge_client.storage.declines import DeclineReason, decline_reason
from hushfleet.edge_client.storage.state_files import FEATURES
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import blobs_of_models
from hushfleet.edge_client.worker.runtime import TaskRuntime
from hushfleet.errors import BadInput, Malformed, StoreError, TooLarge, WireError
from hushfleet.wire.format.messages import Message, TaskNotice
from hushfleet.wire.format.spec import MAX_SPEC_BYTES, BlobRef, TaskSpec

_log = logging.getLogger("hushfleet.edge")


class TaskHandler:
    """The task that the aggregator announced last: `runtime` once it is loaded, or `declined` with the reason why not.

    :param counted: gives counted unix seconds, for the owner's limits.
    """

    def __init__(
        self,
        config: DeviceConfig,
        store: DeviceStore,
        blobs: BlobSource,
        counted: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._blobs = blobs
        self._counted = counted
        self.notice: TaskNotice | None = None
        self.runtime: TaskRuntime | None = None
        self.declined: DeclineReason | None = None

    @property
    def name(self) -> str | None:
        return None if self.notice is None else self.notice.task

    @property
    def hides_duration(self) -> bool:
        """True if nothing may reveal how long this device trains; also while no task is loaded."""
        return self.runtime is None or self.runtime.constant_time or bool(self._config.limits.constant_time)

    def on_notice(self, notice: Message) -> bool:
        """Takes a notice; returns whether its task is another one than before. Raises `Malformed` or `TooLarge`."""
        if not isinstance(notice, TaskNotice):
            raise Malformed(f"expected a task, got a {type(notice).__name__}")
        if notice.size > MAX_SPEC_BYTES:
            raise TooLarge(f"a task package of {notice.size} bytes is above the cap of {MAX_SPEC_BYTES}")
        before, self.notice = self.notice, notice
        if before is not None and replace(before, epoch=notice.epoch) == notice:
            return False
        _log.info("task %s", notice.task)
        self.runtime, self.declined = None, None
        self._blobs.drop()
        self._make_room(notice)
        return True

    def _make_room(self, notice: TaskNotice) -> None:
        """Deletes the blobs of earlier tasks, except those that this device predicts with.

        Blobs are also deleted after each training, but a device that skips many tasks would keep the graphs of all.
        """
        store = self._store
        try:
            if store.blob(notice.digest) is None:  # otherwise it began before a restart, and its blobs stay
                store.path.with_name(FEATURES).unlink(missing_ok=True)
                store.note_awaited(f"the task {notice.task} is not here yet")
                keep = {digest for digest in (store.task_digest, store.global_digest) if digest is not None}
                keep |= blobs_of_models(store)
                package = store.blob(store.task_digest) if store.task_digest else None
                if package is not None:
                    keep.update(graph.digest for graph in TaskSpec.from_bytes(package).model.graphs)
                store.drop_blobs(keep=keep)
        except (OSError, StoreError, WireError, BadInput) as error:  # a full disk shows up when the task is fetched
            _log.error("files of earlier tasks could not be deleted: %s", error)

    def retry_after_full_disk(self) -> None:
        """Tries a task again that was declined for a full disk: a new round began, and there may be room again."""
        if self.declined is not None and self.declined.code == "disk":
            self.declined = None

    def advance(self) -> None:
        """Does what can be done now; ends with a `runtime`, a reason to decline, or a fetch in progress."""
        if self.notice is None or self.runtime is not None or self.declined is not None:
            return
        try:
            self.runtime = self._load(self.notice)
        except Exception as error:
            self.decline(error)

    def decline(self, error: Exception) -> None:
        """Notes that the task cannot be run here, so that each of its rounds is declined."""
        if isinstance(error, (WireError, BadInput)):
            self.stop(DeclineReason("error", f"the task cannot be run here: {error}"))
        else:
            self.stop(decline_reason(error))

    def stop(self, reason: DeclineReason) -> None:
        """Declines each round of the task, as `decline`."""
        self.declined = reason
        _log.error("task declined (%s): %s", *reason)

    def _load(self, notice: TaskNotice) -> TaskRuntime | None:
        package = self._blobs.need(BlobRef(notice.digest, notice.size))
        if package is None:
            return None
        spec = TaskSpec.from_bytes(package)
        if spec.task != notice.task:
            raise Malformed(f"the package of task {notice.task!r} says that it is {spec.task!r}")
        if any(self._blobs.need(ref) is None for ref in spec.model.graphs):
            return None
        return TaskRuntime(
            digest=notice.digest, spec=spec, config=self._config, store=self._store, counted=self._counted
        )
