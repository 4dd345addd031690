"""Runs one cell in a process of its own: `python -m hushfleet.simulator.studies.reproduce.run_cell REQUEST.json`.

The run folder is made once and gone on with after any interruption; what it cost is counted over all parts.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.observe.events import EventLog
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.runtimes import ON_DEVICES, unavailable
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin, go_on
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import KeptCell, kept_cell
from hushfleet.simulator.studies.reproduce.work import work_of

REQUEST, OUTCOME, ERROR, SECONDS = "request.json", "outcome.json", "error.txt", "seconds.json"
RUN = "run"


@dataclass(frozen=True)
class Request:
    """What the process must know.

    :param folder: of this cell, among those that are under way.
    """

    folder: str
    data_dir: str | None
    runtime: str
    evaluate_last: int


def run_cell(cell: Cell, folder: Path, *, data_dir: Path | None, runtime: str = "") -> KeptCell:
    """Runs it here, in this process. Raises `HushfleetError`."""
    write_request(cell, folder, data_dir=data_dir, runtime=runtime)
    _run(Request(**json.loads((folder / REQUEST).read_text())))
    return finished(cell, folder)


def write_request(cell: Cell, folder: Path, *, data_dir: Path | None, runtime: str = "") -> None:
    """Puts all that the process needs into its folder; the task of an earlier part must be the same."""
    folder.mkdir(parents=True, exist_ok=True)
    task = cell.task()
    begun = RunFolder(folder / RUN)
    if begun.task.exists() and load_task(begun.task) != task:
        shutil.rmtree(folder / RUN)  # of a recipe that has been changed since
        (folder / SECONDS).unlink(missing_ok=True)
    elif not begun.task.exists() and begun.path.exists():
        shutil.rmtree(begun.path)  # was interrupted before it was whole
    (folder / "task.json").write_text(json.dumps(task.to_plain(), indent=1))
    request = Request(str(folder), None if data_dir is None else str(data_dir), runtime, cell.evaluate_last)
    (folder / REQUEST).write_text(json.dumps(asdict(request)))
    for name in (OUTCOME, ERROR):
        (folder / name).unlink(missing_ok=True)


def finished(cell: Cell, folder: Path) -> KeptCell:
    """What the process has left behind, as what is kept. Raises `HushfleetError`."""
    facts: dict[str, Any] = json.loads((folder / OUTCOME).read_text())
    return kept_cell(cell, Result.load(folder / RUN / "result.json"), **facts)


def best_runtime(model: str) -> str:
    """Compiled kernels where there are any for this network; else the devices' own graphs."""
    return ON_DEVICES if unavailable("native", model) else "native"


def _run(request: Request) -> None:
    folder = Path(request.folder)
    task = load_task(folder / "task.json")
    run, data_dir = RunFolder(folder / RUN), None if request.data_dir is None else Path(request.data_dir)
    simulation = go_on(run.path, data_dir=data_dir) if run.task.exists() else begin(task, run.path, data_dir=data_dir)
    runtime = request.runtime or best_runtime(task.model.name)
    with _counted(folder / SECONDS) as clock:
        _rounds(simulation, runtime, request.evaluate_last)
        result = assemble(simulation, engine="fast")
        result.save(run.result)
    samples, tested = work(simulation, request.evaluate_last)
    facts = {
        "seconds": clock.total,
        "samples": samples,
        "tested": tested,
        "runtime": runtime,
        "processor": processor(),
    }
    (folder / OUTCOME).write_text(json.dumps(facts))


def _rounds(simulation: Simulation, runtime: str, evaluate_last: int) -> None:
    """Own models are tested only where a table needs it: that can take longer than training."""
    rounds = simulation.task.round.rounds
    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        run_rounds(
            simulation, workers, events, runtime=runtime, evaluate_every=rounds, evaluate_last=evaluate_last
        )


def work(simulation: Simulation, evaluate_last: int) -> tuple[float, float]:
    """Samples that are trained on, and images that models are tested on, in the whole run."""
    devices = simulation.fleet.devices
    return work_of(
        simulation.task,
        train=sum(len(device.train) for device in devices) / len(devices),
        test=len(simulation.fleet.common_test),
        own=sum(len(device.local_test) for device in devices) / len(devices),
        evaluate_last=evaluate_last,
    )


def processor() -> str:
    """This machine's processor, by name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class _counted:
    """Seconds of all parts of an interrupted run, to within ten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = json.loads(path.read_text()) if path.exists() else 0.0
        self._began = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    @property
    def total(self) -> float:
        return float(self._before + time.monotonic() - self._began)

    def _keep(self) -> None:
        while not self._done.wait(10.0):
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.total))
            os.replace(part, self._path)

    def __enter__(self) -> _counted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def _end_with_parent() -> None:
    """The parent holds the other end of this pipe; a cell must not run on when nobody waits for it."""
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)


def main() -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        _run(request)
    except HushfleetError as error:
        (Path(request.folder) / ERROR).write_text(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
