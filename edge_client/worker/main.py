"""The worker's process: it limits itself, reads its job, works, and sends the outcome to its guardian."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable

from hushfleet.edge_client.worker import limits
from hushfleet.edge_client.worker.frames import frame, read_job
from hushfleet.edge_client.worker.job import MAX_TEXT_CHARS, Failed, Finished, HeadChosen, Job, Told


def main(pipe_fd: int, job_fd: int) -> None:
    """Does the job in `job_fd`, and writes to `pipe_fd`; ends the process."""
    limits.begin()
    with mmap.mmap(job_fd, 0, access=mmap.ACCESS_READ) as data:
        job = read_job(data[:])
    os.close(job_fd)

    def send(message: Told | Finished | HeadChosen | Failed) -> None:
        view = memoryview(frame(message))
        while view:
            view = view[os.write(pipe_fd, view) :]

    logging.getLogger("hushfleet").setLevel(logging.INFO)
    logging.getLogger("hushfleet").addHandler(_Telling(send))
    send(_outcome(job, send))
    os._exit(0)  # nothing here needs an orderly end, which takes ONNX Runtime some time


def _outcome(job: Job, tell: Callable[[Told], None]) -> Finished | HeadChosen | Failed:
    try:
        if job.config.device.accelerator != "cpu" and job.config.simulation is None:
            from hushfleet.edge_client.board.installed_runtime import use_installed_runtime

            use_installed_runtime(sys.path)
        from hushfleet.edge_client.board.process import return_freed_memory
        from hushfleet.edge_client.worker.work import JobWork

        return_freed_memory()
        limits.close(job)
        return JobWork(tell).do(job)
    except Exception as error:  # also of an import
        from hushfleet.edge_client.storage.declines import decline_reason

        return Failed(*decline_reason(error))


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
