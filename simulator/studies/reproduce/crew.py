"""Cells in parallel processes, and what may go wrong with them: interruption, failure, memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.fast.workers import ENVIRONMENT
from hushfleet.simulator.run_folder import RunFolder
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import Kept, KeptCell
from hushfleet.simulator.studies.reproduce.run_cell import ERROR, REQUEST, RUN, finished, write_request

MEMORY_EACH = 2 << 30
"""Bytes that a cell may take: the data set, a worker's images, a cohort's updates."""
_POLL_S = 0.2
_LOG = "log.txt"
_TAIL = 2000


@dataclass
class Job:
    """A cell that is under way in its process."""

    cell: Cell
    folder: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    _seen: tuple[int, int] = (-1, 0)

    @property
    def rounds_done(self) -> int:
        """Rounds that are closed, those before an interruption included."""
        events = RunFolder(self.folder / RUN).events
        try:
            size = events.stat().st_size
            if size == self._seen[0]:
                return self._seen[1]
            with events.open("rb") as file:
                file.seek(max(0, size - (1 << 20)))
                lines = file.read().split(b"\n")
        except OSError:
            return 0
        closed = [line for line in lines if b'"event":"round_close"' in line and line.endswith(b"}")]
        done = int(json.loads(closed[-1])["round"]) if closed else self._seen[1]
        self._seen = (size, done)
        return done


@dataclass(frozen=True)
class Failure:
    """A cell that ended with an error; its folder stays."""

    cell: Cell
    error: str


Outcome = KeptCell | Failure


def jobs_here(asked: int = 0) -> int:
    """How many cells run at a time: one a core, within the memory that is free."""
    if asked:
        return asked
    return max(1, min(len(os.sched_getaffinity(0)), _available_bytes() // MEMORY_EACH))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def run_cells(
    cells: Sequence[Cell],
    kept: Kept,
    *,
    runs: Path,
    jobs: int,
    data_dir: Path | None,
    runtime: str = "",
    watch: Callable[[Sequence[Job]], None] = lambda _: None,
) -> Iterator[tuple[Cell, Outcome]]:
    """Runs cells that are not finished yet; each finished one is kept at once, and its run folder is deleted.

    :param runs: where run folders are while cells are under way, also after an interruption.
    :param watch: called several times a second with the jobs under way.
    """
    waiting = list(cells)
    with _ending() as under_way:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                cell = waiting.pop(0)
                job = _start(cell, runs / cell.key, data_dir, runtime)
                if isinstance(job, Failure):
                    yield cell, job
                else:
                    under_way.append(job)
            watch(under_way)
            for job in [job for job in under_way if job.process.poll() is not None]:
                under_way.remove(job)
                yield job.cell, _ended(job, kept)
            if under_way:
                time.sleep(_POLL_S)


@contextmanager
def _ending() -> Iterator[list[Job]]:
    under_way: list[Job] = []
    try:
        yield under_way
    finally:
        for job in under_way:
            job.process.kill()  # every round is a checkpoint, and a run survives a kill
        for job in under_way:
            job.process.wait()
            _close(job)


def _start(cell: Cell, folder: Path, data_dir: Path | None, runtime: str) -> Job | Failure:
    try:
        write_request(cell, folder, data_dir=data_dir, runtime=runtime)
    except HushfleetError as error:
        return Failure(cell, str(error))
    with (folder / _LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hushfleet.simulator.studies.reproduce.run_cell", str(folder / REQUEST)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,  # Ctrl-C reaches this process only, which ends them in order
        )
    return Job(cell, folder, process)


def _ended(job: Job, kept: Kept) -> Outcome:
    _close(job)
    if job.process.returncode != 0:
        return Failure(job.cell, _why(job))
    try:
        one = finished(job.cell, job.folder)
        path = one.save(kept.out)
    except (HushfleetError, OSError, ValueError) as error:
        return Failure(job.cell, str(error))
    kept.add(KeptCell.load(path))
    shutil.rmtree(job.folder)
    return one


def _close(job: Job) -> None:
    if job.process.stdin is not None:
        job.process.stdin.close()


def _why(job: Job) -> str:
    told = job.folder / ERROR
    if told.exists():
        return told.read_text()
    code = job.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    log = (job.folder / _LOG).read_text(errors="replace").strip()[-_TAIL:]
    last = log.splitlines()[-1] if log else "it said nothing"
    return f"its process {how}: {last} (all of it: {job.folder / _LOG})"
