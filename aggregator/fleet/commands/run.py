"""`hushfleet fleet serve|up|task|set|pause|resume`: run the fleet service or all four processes, and say what they
train."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.fleet.commands.options import FILE, RUN_IT, Dir
from hushfleet.errors import BadInput

app = typer.Typer()


@app.command("up", rich_help_panel=RUN_IT)
def _up(path: Dir) -> None:
    """Run broker, fleet service and aggregator in this terminal, until Ctrl-C. Start it again to go on.

    For labs. In the field they are services: DIR/systemd has their units.
    """
    from hushfleet.aggregator.fleet.processes import run_fleet
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder

    logging.getLogger("hushfleet").setLevel(logging.INFO)
    run_fleet(FleetFolder(path), _stop_on_signals())


@app.command("task", rich_help_panel=RUN_IT)
def _task(
    path: Dir,
    task: Annotated[Path, typer.Argument(metavar="TASK.toml", help="The next task, with a name of its own.", **FILE)],
    now: Annotated[bool, typer.Option("--now", help="Change the task even if the present one is not finished; it can "
"go on later.")] = False,
) -> None:  # fmt: skip
    """Give the fleet its next task. Each run has its own folder, DIR/runs/NAME; boards go on with their ledgers.

    If too few boards can pay for its rounds within their cards' limits, it is refused; the error says what they can
    pay.

    A task with [season] repeats: the fleet service begins each next season by itself. Files that the task names beside
    itself are copied into DIR.

    An aggregator that runs takes the task by itself. To go on with an earlier run, give its file:
    DIR/runs/NAME/task.toml.
    """
    from hushfleet.aggregator.config.task import load_task
    from hushfleet.aggregator.fleet import descriptions
    from hushfleet.aggregator.fleet.tasks.next_task import set_task
    from hushfleet.aggregator.fleet.tasks.pay import pay_of_fleet
    from hushfleet.aggregator.fleet.tasks.seasons import season_view
    from hushfleet.aggregator.fleet.tasks.task_check import KIND_ADVICE, kind_note, season_note, spread
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.watching.watch import view_now

    folder = FleetFolder(path)
    before, run = folder.run.name, view_now(folder).run
    if run is not None and not run.finished and not now:
        raise BadInput(f"{descriptions.progress(run)}; wait for the others, or say --now to leave it for later")
    goes_on = set_task(folder, task)
    print(
        f"the fleet's task is {folder.run.name}; its run {'goes on' if goes_on else 'begins'} in {folder.run}: an "
        "aggregator that runs takes it by itself; one that has ended: sudo systemctl restart hushfleet-aggregator"
    )
    checked = load_task(folder.task)
    now_s = time.time()
    seasons = season_view(folder, now_s)
    lasts_s = None if seasons is None else seasons.lasts_s(now_s)
    if (found := pay_of_fleet(checked, folder, lasts_s=lasts_s)) is not None:
        print(f"{found.in_words}.")
    if seasons is not None:
        print(f"it repeats: {descriptions.season(seasons, now=now_s)}")
    if (why := kind_note(checked, folder.config)) is not None:
        print(f"note: {why}. {KIND_ADVICE}")
    if (why := season_note(checked, folder.config)) is not None:
        print(f"note: {why}")
    if run is not None and run.rounds_closed and not goes_on and checked.model.start is None:
        print(
            "note: its model begins anew; to go on from the one that the fleet has learned, add to the task's [model]: "
            f'start = "runs/{before}"'
        )
    if not checked.schedule.is_set:
        print(
            f"note: its {checked.round.rounds} rounds follow each other without a pause, on the images that boards "
            'have now; for a round a day add to the task: [schedule] with every = "24h"'
        )
    if (slowly := spread(checked, folder)) is not None:
        print(f"note: {slowly}")


@app.command("set", rich_help_panel=RUN_IT)
def _set(
    path: Dir,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=NUMBER]...", help="round.min_devices=12, round.min_updates=10, or =default.")] = None,
) -> None:  # fmt: skip
    """Change with how many boards rounds open and make a model, while the task runs; without KEY: show the numbers.

    A running aggregator takes them within seconds. An open round takes a lower number of updates at once, and a higher
    one counts from the next round on. The next task begins with its own numbers.

    Example: `hushfleet fleet set greenhouse round.min_devices=12 round.min_updates=10`
    """
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.watching import round_numbers

    folder = FleetFolder(path)
    if settings:
        round_numbers.change(folder, settings)
    for line in round_numbers.show(folder):
        print(line)


@app.command("pause", rich_help_panel=RUN_IT)
def _pause(path: Dir) -> None:
    """Pause training: no round opens, and the open one rests. Boards that train give up and have spent nothing.

    It holds until `fleet resume`, over restarts as well. Health, enrolment and releases go on.

    Examples:

    `hushfleet fleet pause greenhouse`

    `hushfleet fleet resume greenhouse`
    """
    from hushfleet import atomic_file
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder

    folder = FleetFolder(path)
    if folder.paused.exists():
        print(f"training is paused already; to let it go on: hushfleet fleet resume {path}")
        return
    atomic_file.write_whole(folder.paused, b"by hushfleet fleet pause\n", durable=True)
    print(f"training is paused within seconds, until: hushfleet fleet resume {path}")


@app.command("resume", rich_help_panel=RUN_IT)
def _resume(path: Dir) -> None:
    """Let training go on after `fleet pause`: an open round goes on where it was, and others open by the schedule."""
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder

    folder = FleetFolder(path)
    if not folder.paused.exists():
        print("training is not paused")
        return
    folder.paused.unlink()
    print("training goes on within seconds, by the task's schedule")


@app.command("serve", hidden=True)
def _serve(path: Dir) -> None:
    """Run the fleet service until it is stopped: it enrols boards and watches over them. Safe to kill at any time."""
    from hushfleet.aggregator.fleet.serve import serve

    logging.getLogger("hushfleet").setLevel(logging.INFO)
    serve(path, _stop_on_signals())


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
