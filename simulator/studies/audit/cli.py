"""`hushfleet audit`: measure a lower bound on epsilon, beside the ledger's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Meta

from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.privacy.terms import Unit
from hushfleet.schema import Count
from hushfleet.simulator.options import DataDir, TaskSettings

if TYPE_CHECKING:
    from hushfleet.aggregator.payloads.prepare import PreparedTask
    from hushfleet.aggregator.report.console import Console
    from hushfleet.simulator.studies.audit.finding import Finding

VIOLATED = 1


@dataclass(frozen=True, kw_only=True)
class AuditOptions(TaskSettings):
    """Options of an audit."""

    # fmt: off
    unit: Annotated[Unit | None, Option(help="Unit of privacy; replaces privacy.unit.")] = None
    trials: Annotated[int, Meta(ge=60, le=10_000_000), Option(help="Number of rounds, or of canaries, in each world.")] = 1000
    seconds: Annotated[float, Meta(ge=1), Option(help="Longest time of a game; it ends with the trials that it has.")] = 120
    seed: Annotated[Count, Option(help="Seed of canaries and noise.")] = 0
    field_noise: Annotated[bool, Option("--field-noise", help="Use the noise source of real devices, which no seed "
"repeats.")] = False
    one_run: Annotated[bool | None, Option(hidden=True)] = None
    data_dir: DataDir = None
    out: Annotated[Path | None, Option(help="Folder for audit.json and audit.html, the trade-off curve.")] = None
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table; an unbounded number is null.")] = False
    # fmt: on


@with_options
def audit(
    task_file: Annotated[
        Path, typer.Argument(metavar="TASK.toml", help="Task file to audit; see `tasks/` for examples.")
    ],
    options: AuditOptions,
) -> None:
    """Measure a lower bound on epsilon, and compare it with the ledger's.

    The audit plays against the code that devices run. It inserts a canary, the worst update or record that clipping
    lets through, in half of the trials, looks at what the adversary sees, and guesses: was it in? How often that
    goes wrong bounds epsilon from below, with 95 % confidence. Exit code 1 if the bound is above the claim: then
    something adds less noise than it charges for.

    Rounds with different noise, as of `hush`, are audited with their own claims, and rounds that ask in a game of
    their own. The claim about all rounds is what a device's ledger says after them.

    A bound far below the claim is no proof that the claim is loose. N trials show at most about log(N / 4): with
    1000 trials, audit a noise that makes one round cost 1 to 3.

    Examples:

    `hushfleet audit tasks/digits-fedglp-adp.toml --set privacy.accounting=strict --set privacy.delta=0.01`

    `hushfleet audit tasks/digits-record.toml --trials 4000 --out runs/audit`

    `hushfleet audit tasks/digits-record.toml --unit device --set privacy.noise_multiplier=1.5 --json`
    """
    from hushfleet.aggregator.payloads.prepare import prepare
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.aggregator.results.result import write_whole
    from hushfleet.errors import BadInput
    from hushfleet.methods import title_of
    from hushfleet.simulator.studies.audit.show import print_findings, render_page, to_json
    from hushfleet.user_files import checked_folder

    if options.one_run is not None:
        raise BadInput(
            "--one-run: the game of one run is gone, as its bound was the loosest; every audit plays two worlds"
        )
    console, out = Console(stderr=options.as_json), options.out
    if out is not None:
        checked_folder(out)
    task = options.load(task_file, privacy__unit=options.unit)
    with show_progress(console):
        prepared = prepare(task, data_dir=options.data_dir, run_id="audit")
    if task.statistic is None and not task.targets.are_classes:
        raise BadInput(
            f"model.loss = {task.model.loss!r}: an audit's canaries are samples of a class; the mechanism is the "
            "same with any loss, so audit the task with the cross-entropy and data of classes"
        )
    found = list(_played(prepared, options, console))
    name = title_of(task.method.name)
    title = f"{name} on {task.data.name}, {task.privacy.accounting}"
    text = to_json(task.name, name, task.privacy.accounting, found)
    if options.as_json:
        print(text)
    else:
        print_findings(console, title, found)
    if out is not None:
        write_whole(out / "audit.json", text + "\n")
        write_whole(out / "audit.html", render_page(title, found))
        console.print(f"figures  {out / 'audit.json'}\npage     {out / 'audit.html'}", highlight=False, markup=False)
    if any(each.verdict == "VIOLATED" for each in found):
        raise typer.Exit(VIOLATED)


def _played(prepared: PreparedTask, options: AuditOptions, console: Console) -> Iterator[Finding]:
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.progress import doing
    from hushfleet.simulator.studies.audit.games import Effort, findings, games_of, subject_of

    effort = Effort(options.trials, options.seconds)
    with show_progress(console):
        subject = subject_of(prepared, seed=options.seed, field_noise=options.field_noise, data_dir=options.data_dir)
    total = effort.trials * len(games_of(subject))
    with show_progress(console), doing("trials", total=total) as work:

        def show(done: int) -> bool:
            work.count(min(done, total) - work.done)
            return True

        yield from findings(subject, effort, show)
