"""Implements the commands that run a fleet: runs it, shows the result, and explains how to resume after Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer
from rich.markup import escape

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.planning.pay import pay
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.results.result import Result
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run import opened, run
from hushfleet.simulator.run_folder import RunFolder, Simulation, run_path

INTERRUPTED = 130


def run_and_show(
    task: Task, options: RunOptions, console: Console, *, out: Path | None = None, workers: WorkerPool | None = None
) -> Result:
    """Runs the task, prints the summary and returns the result. After Ctrl-C, prints how to resume, and exits with 130.

    :param out: the command's `--out`, if this is not the run's own folder.
    :param workers: as of `run`.
    """
    simulation = opened(task, RunFolder(run_path(options.out, task.name)), options, console)
    _warn(simulation, console)
    try:
        result = run(simulation, options, console=console, workers=workers)
    except KeyboardInterrupt:
        raise interrupted(console, again_command(out or simulation.folder.path)) from None
    from hushfleet.aggregator.report.summary import summary_table

    console.print(summary_table(result))
    for name, path in (("report", simulation.folder.report), ("result", simulation.folder.result)):
        if path.exists():
            console.print(f"{name}  {path}", highlight=False, markup=False)
    return result


def _warn(simulation: Simulation, console: Console) -> None:
    """Warns if federating at this size is not worth it."""
    devices = simulation.fleet.devices
    images = max(1, round(sum(len(each.train) for each in devices) / len(devices)))
    model = simulation.prepared.spec.model
    described = len(model.class_names), model.image_shape
    found = pay(simulation.task, images=images, images_by="", described=described)
    if found is not None and found.answer != "yes":
        words = f"{found.in_words}. See: hushfleet plan --help"
        console.print(f"[yellow]note:[/] {escape(words)}", highlight=False, soft_wrap=True)


def interrupted(console: Console, command: str) -> typer.Exit:
    """Prints the command that resumes the run; returns the exit to raise."""
    words = f"\n[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(command)}"
    console.print(words, highlight=False, soft_wrap=True)
    return typer.Exit(INTERRUPTED)


def again_command(folder: Path) -> str:
    """Returns the command that was typed, with `--out` and `--resume`."""
    words = ["hushfleet", *sys.argv[1:]]
    words += [] if any(word.partition("=")[0] == "--out" for word in words) else ["--out", str(folder)]
    words += [] if "--resume" in words else ["--resume"]
    return shlex.join(words)
