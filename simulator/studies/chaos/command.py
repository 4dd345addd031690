"""`hushfleet simulate --chaos`: the campaign on a screen."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hushfleet.aggregator.config.task import Task
from hushfleet.simulator.studies.chaos.campaign import Campaign, table

INTERRUPTED = 130


def run_campaign(
    task: Task,
    campaign: Campaign,
    console: Console,
    *,
    data_dir: Path | None,
    resume: bool,
    again: str,
    replay: list[str],
) -> None:
    """Runs it, prints the table and how to replay what failed; exits with 1 if anything did, with 130 on Ctrl-C.

    :param again: what to type to go on; :param replay: what to type for single seeds, without them.
    """
    began = time.monotonic()
    with console.status("loading data, exporting and checking the model's graphs"):
        simulation = campaign.prepare(task, data_dir=data_dir, resume=resume)
    if missing := campaign.library()[1]:
        console.print(missing, style="yellow", highlight=False)
    outcomes = campaign.done()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            bar = progress.add_task("", total=len(campaign.seeds), completed=len(outcomes))
            for outcome in campaign.run(simulation):
                outcomes.append(outcome)
                failed = sum(not each.passed for each in outcomes)
                progress.update(bar, advance=1, description=f"{len(outcomes) - failed} passed, {failed} failed")
                if not outcome.passed:
                    console.print(f"seed {outcome.seed}: {escape(outcome.wrong[0])}", style="red", highlight=False)
    except KeyboardInterrupt:
        console.print(f"\n[bold]interrupted[/]; go on with:\n  {escape(again)}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        campaign.save(outcomes, seconds=time.monotonic() - began)
    console.print(table(outcomes))
    console.print(f"summary  {campaign.summary_path}", highlight=False)
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in wrong:
        command = shlex.join([*replay, "--chaos", f"{outcome.seed}-{outcome.seed}"])
        console.print(
            f"seed {outcome.seed} failed; its files are in {campaign.folder / f'seed-{outcome.seed}'}; replay it with\n"
            f"  {escape(command)}",
            highlight=False,
            soft_wrap=True,
        )
    if wrong:
        raise typer.Exit(1)
