"""What `import hushfleet as hf` offers a script or a notebook: the commands' own code, as functions.

import hushfleet as hf

task = hf.task("tasks/digits-hush.toml", {"privacy.epsilon": 2})
run = hf.simulate(task)
run.devices.plot.scatter("accuracy_alone", "accuracy_own")
run.report()
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.aggregator.observe.events import EventTail
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.simulator.boards import read_boards
from hushfleet.simulator.command import open_simulation, run_path
from hushfleet.simulator.options import Engine, RunOptions, Runtime
from hushfleet.simulator.run import run
from hushfleet.simulator.run_folder import RunFolder

__all__ = ["Run", "Task", "events", "open_run", "simulate", "task"]

_LOOK_EVERY_S = 0.1


def task(source: Path | str | Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Task:
    """A task: of a file, or of the same sections as a dict.

    :param changes: by key, for example `{"privacy.epsilon": 2}`.
    :raises BadInput: which key, which value, and what it may be.
    """
    overrides = tuple(f"{key}={_toml(value)}" for key, value in (changes or {}).items())
    if isinstance(source, Mapping):
        return parse_task(dict(source), overrides)
    return load_task(Path(source), overrides)


class Run:
    """A run that has ended.

    :param folder: with `result.json`, `report.html`, `models/` and more, see `hushfleet.simulator.run_folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._files = RunFolder(Path(folder))
        self.folder = self._files.path
        self.result = Result.load(self._files.result)

    @property
    def rounds(self) -> pd.DataFrame:
        """One row a round, see `RoundRow`."""
        return pd.DataFrame([row.model_dump() for row in self.result.rounds]).set_index("round")

    @property
    def devices(self) -> pd.DataFrame:
        """One row a device: accuracies at the end (fractions of 1), what it sent, what it spent."""
        details = self.result.details
        ends = {
            "accuracy_own": _last(details.accuracy_own_common),
            "accuracy_own_local": _last(details.accuracy_own_local),
            "accuracy_alone": details.local_only_common,
            "accuracy_alone_local": details.local_only_local,
            "rounds_accepted": details.rounds_accepted,
            "uplink_bytes": details.uplink_bytes,
        }
        frame = pd.DataFrame({name: values for name, values in ends.items() if values}, index=details.devices)
        spent = pd.DataFrame([row.model_dump() for row in self.result.privacy]).set_index("device")
        return frame.join(spent[["epsilon_server", "epsilon_release"]])

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, oldest first; docs/result.md has the kinds."""
        return EventTail(self._files.events).read()

    def report(self) -> Path:
        """The report, one HTML file that needs nothing else."""
        return self._files.report

    def _repr_html_(self) -> str:
        return self.rounds.to_html()


def simulate(
    task: Task,
    *,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    engine: Engine = "fast",
    runtime: Runtime = "auto",
    workers: int = 0,
    boards: str = "",
    alone: bool = True,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Runs a fleet on this machine, as `hushfleet simulate` does, and gives what came of it.

    :param out: the run folder; None: `runs/NAME-TIME`.
    :param boards: profiles, dealt to the devices in turn: rounds then run on a virtual clock.
    :param alone: also train each device alone, for comparison.
    :param resume: go on with the run in `out`.
    :raises BadInput: which value, and what to do.
    """
    folder = run_path(None if out is None else Path(out), task.name)
    _run(task, folder, RunOptions(engine=engine, runtime=runtime, workers=workers, local_only=alone,
                                  clocked=bool(boards) and engine != "live"),
         data_dir=data_dir, boards=boards, resume=resume, quiet=quiet)  # fmt: skip
    return Run(folder)


def events(task: Task, *, out: Path | str, **options: Any) -> Iterator[dict[str, Any]]:
    """As `simulate`, and gives the events while they come: for plots that move. The run is then `open_run(out)`."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            simulate(task, out=out, quiet=True, **options)
        except BaseException as error:  # is raised again where it can be seen
            failed.append(error)

    reader = EventTail(RunFolder(Path(out)).events)
    thread = threading.Thread(target=work, name="simulate", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_EVERY_S)
        if reader.path.exists():
            yield from reader.read()
    if failed:
        raise failed[0]
    yield from reader.read()


def open_run(folder: Path | str) -> Run:
    """A run that has ended. Raises `BadInput` where there is none."""
    return Run(Path(folder))


def _run(
    task: Task, folder: Path, options: RunOptions, *,
    data_dir: Path | str | None, boards: str, resume: bool, quiet: bool,
) -> None:  # fmt: skip
    mix = read_boards(boards, devices=task.data.devices, seed=task.seed) if boards else None
    data = None if data_dir is None else Path(data_dir)
    simulation = open_simulation(task, folder, data_dir=data, mix=mix, resume=resume)
    run(simulation, options, console=Console(quiet=quiet))


def _last(rows: list[list[Any]]) -> list[Any]:
    """Each column's newest value that was measured."""
    columns = zip(*rows, strict=True)
    return [next((value for value in reversed(column) if value is not None), None) for column in columns]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    raise BadInput(f"{value!r} cannot be a value of a task: give a number, a word, or true or false")
