"""What `hushfleet simulate`, and other commands that run a fleet, do when they are called."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.observe.display import summary_table
from hushfleet.aggregator.observe.progress import shown
from hushfleet.aggregator.planning.advice import worth_it
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.methods import allow_file
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run import run
from hushfleet.simulator.run_folder import Simulation, open_simulation
from hushfleet.simulator.studies.sweep import with_wire

INTERRUPTED = 130


def run_and_show(
    task: Task,
    folder: Path,
    options: RunOptions,
    console: Console,
    *,
    data_dir: Path | None = None,
    mix: FleetMix | None = None,
    resume: bool,
    out: Path | None = None,
) -> Result:
    """Runs it and prints the summary, and gives the result; on Ctrl-C says how to go on and exits with 130.

    :param out: what the command's `--out` is, where that is not the run's own folder.
    """
    with shown(console):
        simulation = open_simulation(task, folder, data_dir=data_dir, mix=mix, resume=resume)
    _warn(simulation, console)
    try:
        result = run(simulation, options, console=console)
    except KeyboardInterrupt:
        raise interrupted(console, again_command(out or folder)) from None
    console.print(summary_table(result))
    console.print(f"report  {simulation.folder.report}\nresult  {simulation.folder.result}", highlight=False)
    return result


def _warn(simulation: Simulation, console: Console) -> None:
    """Says so where a run of this size would not pay."""
    devices = simulation.fleet.devices
    images = max(1, round(sum(len(each.train) for each in devices) / len(devices)))
    model = simulation.prepared.spec.model
    advice = worth_it(simulation.task, classes=len(model.class_names), images=images, shape=model.image_shape)
    if advice is not None and advice.warning is not None:
        console.print(f"[yellow]note:[/] {escape(advice.warning)}", highlight=False, soft_wrap=True)


def overridden(
    path: Path,
    settings: Sequence[str] | None,
    options: Mapping[str, int | str | None] | None = None,
    *,
    method: str = "",
) -> Task:
    """The task with what `--set` and other options change of it.

    :param method: `FILE.py:NAME`, which this process and those that it starts may then run; empty: the task's own.
    """
    given = [f"{key}={value}" for key, value in (options or {}).items() if value is not None]
    given += [f"method.name={allow_file(method)}"] if method else []
    return load_task(path, (*(settings or ()), *given))


def interrupted(console: Console, command: str) -> typer.Exit:
    """Says by which command an interrupted one goes on."""
    words = f"\n[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(command)}"
    console.print(words, highlight=False, soft_wrap=True)
    return typer.Exit(INTERRUPTED)


def again_command(folder: Path) -> str:
    """What was typed, with the words that make it go on."""
    words = ["hushfleet", *sys.argv[1:]]
    words += [] if any(word.partition("=")[0] == "--out" for word in words) else ["--out", str(folder)]
    words += [] if "--resume" in words else ["--resume"]
    return shlex.join(words)


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadInput(f"--sweep {text!r}: give numbers such as 0,0.3,1,3") from error


def wire_choices(text: str, task: Task) -> tuple[str, ...]:
    """Refused before anything is begun, not after the run."""
    choices = tuple(part.strip() for part in text.split(",") if part.strip())
    for choice in choices:
        try:
            with_wire(task, choice)
        except BadInput as error:
            raise BadInput(f"--sweep-wire: {error}") from error
    return choices
