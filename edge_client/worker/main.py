"""The worker's process: it limits itself, reads a job, works, sends the outcome, and waits for the next job."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from hushfleet.edge_client.worker import limits
from hushfleet.edge_client.worker.frames import Message, frame, read_job
from hushfleet.edge_client.worker.job import MAX_TEXT_CHARS, Job, Told
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.worker.work import JobWork


def main(pipe_fd: int) -> None:
    """Does the jobs whose descriptors come from the pipe, and answers to it; ends the process with the pipe."""
    limits.begin()
    pipe = socket.socket(fileno=pipe_fd)
    logging.getLogger("hushfleet").setLevel(logging.INFO)

    def send(message: Message) -> None:
        pipe.sendall(frame(message))

    logging.getLogger("hushfleet").addHandler(_Telling(send))
    work: JobWork | None = None
    while (given := _next_job(pipe)) is not None:
        job, file = given
        try:
            work = work or _prepared(job, send)
            limits.allow(job)
            work.file = file
            outcome = work.do(job)
        except Exception as error:  # also of an import
            from hushfleet.edge_client.storage.declines import decline_reason
            from hushfleet.edge_client.worker.job import Failed

            outcome = Failed(*decline_reason(error))
        if file is not None:
            os.close(file)
        del job, given  # the memory is free while the next one comes
        send(outcome)
        del outcome
    os._exit(0)  # nothing here needs an orderly end, which takes ONNX Runtime some time


def _next_job(pipe: socket.socket) -> tuple[Job, int | None] | None:
    """Returns the next job, and the file of features, if it comes with one; None when the guardian has closed the
    pipe."""
    _, descriptors, _, _ = socket.recv_fds(pipe, 1, 2)
    if not descriptors:
        return None
    descriptor, *others = descriptors
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        os.close(descriptor)
        return read_job(data), next(iter(others), None)


def _prepared(job: Job, tell: Callable[[Told], None]) -> JobWork:
    """Imports what training needs, and then gives up what it does not need."""
    model = TaskSpec.from_bytes(job.package).model
    makes_features = model.features is not None and job.features != "kept"
    if not model.is_linear or makes_features:
        _import_onnx_runtime(job)
    from hushfleet.edge_client.board.process import return_freed_memory
    from hushfleet.edge_client.worker.work import JobWork

    return_freed_memory()
    limits.close(job)
    return JobWork(tell)


def _import_onnx_runtime(job: Job) -> None:
    if job.config.device.accelerator != "cpu" and job.config.simulation is None:
        from hushfleet.edge_client.board.installed_runtime import use_installed_runtime

        use_installed_runtime(sys.path)
    from hushfleet.edge_client.worker import task_graphs  # noqa: F401


class _Telling(logging.Handler):
    """Sends lines of the log to the guardian, who writes them."""

    def __init__(self, tell: Callable[[Told], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(Told(min(record.levelno, logging.CRITICAL), self.format(record)[:MAX_TEXT_CHARS]))
        except Exception:
            self.handleError(record)
