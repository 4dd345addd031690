"""`python -m chaos TASK.toml --seeds 200`, with `tests` on the path: a live fleet in a storm for each seed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chaos.campaign import Campaign, parse_seeds, run_campaign
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput
from hushfleet.simulator.options import DataDir, Out, Resume, Settings
from hushfleet.simulator.run_folder import run_path

ME = "PYTHONPATH=tests python -m chaos"


@with_options
def chaos(
    task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="What the fleet trains.")],
    seeds: Annotated[str, typer.Option(help="How many (200: 0 to 199), a range (40-59), or several (3,17,40-59).")],
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one a core.")] = 0,
    data_dir: DataDir = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Runs the live fleet through kills, power cuts, full disks and liars, and audits what is left."""
    try:
        task = load_task(task_file, tuple(settings or ()))
        campaign = Campaign(run_path(out, task.name), parse_seeds(seeds), jobs=jobs)
        replay = [str(task_file), *(word for each in settings or () for word in ("--set", each))]
        again = [*replay, "--seeds", seeds, "--out", str(campaign.folder), "--resume"]
        run_campaign(
            task,
            campaign,
            Console(),
            data_dir=data_dir,
            resume=resume,
            again=f"{ME} {shlex.join(again)}",
            replay=f"{ME} {shlex.join(replay)}",
        )
    except BadInput as error:
        sys.exit(str(error))


if __name__ == "__main__":
    typer.run(chaos)
