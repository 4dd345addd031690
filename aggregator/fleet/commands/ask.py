"""`hushfleet fleet ask`: ask the boards about their data or their models, for a small epsilon and with an error."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hushfleet.aggregator.fleet.commands.options import Dir
from hushfleet.errors import BadInput

app = typer.Typer()
ASK = "Ask the boards, and test the model"
asking = typer.Typer(
    no_args_is_help=True,
    help="""Ask the boards about their data: one number or a few, with their error, for a small epsilon.

    It answers "is there enough data to begin?" before a budget is spent on training. The answer is one round of the
    fleet, which takes the place of its task and gives it back. Each board's answer is noised, charged in its ledger,
    and declined where its owner's limits do not allow it.

    Examples:

    `hushfleet fleet ask counts greenhouse --epsilon 1`

    `hushfleet fleet ask mean greenhouse 3 --low -20 --high 50`

    `hushfleet fleet ask drift greenhouse --epsilon 0.2`

    `hushfleet fleet ask histogram greenhouse 3 --low -20 --high 50 --bins 7 --dry-run`
    """,
)
app.add_typer(asking, name="ask", rich_help_panel=ASK)

Column = Annotated[str, typer.Argument(help="Number of a value of a sample, from 0; or the name of a target.")]
Low = Annotated[float, typer.Option(help="Public lower limit; smaller values count as this one.")]
High = Annotated[float, typer.Option(help="Public upper limit; larger values count as this one.")]
Epsilon = Annotated[
    float, typer.Option(min=0.01, max=100, help="What it costs each board, of its limit over all tasks.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it costs and how large the error will be.")]
Now = Annotated[
    bool, typer.Option("--now", help="Ask even if the present task is not finished; it goes on afterwards.")
]


@asking.command("counts")
def _counts(
    path: Dir,
    most: Annotated[int, typer.Option(help="Largest norm of a board's counts; larger ones are scaled down to it. The "
"error grows with it.")] = 50,
    epsilon: Epsilon = 0.5,
    dry_run: DryRun = False,
    now: Now = False,
) -> None:  # fmt: skip
    """Count the samples in each class over all boards, and those that boards left out because they cannot be read."""
    _ask(path, "counts", epsilon, dry_run=dry_run, now=now, most=most)


@asking.command("mean")
def _mean(
    path: Dir, column: Column, low: Low, high: High, epsilon: Epsilon = 0.5, dry_run: DryRun = False, now: Now = False
) -> None:
    """Mean of a sensor or a target: the mean over boards of each board's mean.

    A board without samples counts as the middle of the limits.
    """
    _ask(path, "mean", epsilon, dry_run=dry_run, now=now, column=column, low=low, high=high)


@asking.command("histogram")
def _histogram(
    path: Dir,
    column: Column,
    low: Low,
    high: High,
    bins: Annotated[int, typer.Option(help="Number of bins of equal width.")] = 10,
    epsilon: Epsilon = 0.5,
    dry_run: DryRun = False,
    now: Now = False,
) -> None:
    """Histogram of a sensor or a target: the mean over boards of the share of samples in each bin.

    A board without samples has a share of 0 in each.
    """
    _ask(path, "histogram", epsilon, dry_run=dry_run, now=now, column=column, low=low, high=high, bins=bins)


@asking.command("drift")
def _drift(path: Dir, epsilon: Epsilon = 0.5, dry_run: DryRun = False, now: Now = False) -> None:
    """Count the boards whose personalized model has become worse, among those whose owners have set
    limits.tell_drift."""
    _ask(path, "drift", epsilon, dry_run=dry_run, now=now)


def _ask(path: Dir, kind: str, epsilon: float, *, dry_run: bool, now: bool, **asked: Any) -> None:
    """:param asked: fields of the task's section `statistic`."""
    from hushfleet.aggregator.config.sections import StatisticSection
    from hushfleet.aggregator.fleet import descriptions
    from hushfleet.aggregator.fleet.tasks.ask import ask, expected_error, statistic_task
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.watching.watch import view_now
    from hushfleet.aggregator.report.readable import number, statistic_lines

    folder = FleetFolder(path)
    try:
        section = StatisticSection(kind, **asked)  # type: ignore[arg-type]  # one of four, by the commands above
    except ValueError as wrong:
        raise BadInput(str(wrong)) from wrong
    task = statistic_task(folder, section, epsilon)
    unit = "" if kind != "histogram" else " of the samples"
    error = f"{100 * expected_error(task):.1f} %{unit}" if unit else f"{expected_error(task):.3g}"
    print(
        f"each board's answer costs it epsilon {number(epsilon)} at delta {number(task.delta)}; with "
        f"{task.cohort_size} "
        f"boards each value will have an error of ± {error}, within which the truth is in 19 of 20 cases"
    )
    if dry_run:
        return
    run = view_now(folder).run
    if run is not None and not run.finished and not now:
        raise BadInput(f"{descriptions.progress(run)}; wait for the others, or say --now to ask before it goes on")
    result = ask(folder, task)
    if result.statistic is None:
        raise BadInput(
            f"there is no answer: too few boards answered, or their sum could not be opened. {path}/runs/{task.name}/"
            "report.html says who declined, and why"
        )
    for line in statistic_lines(result.statistic):
        print(line)
    spent = max((row.epsilon_server for row in result.privacy), default=0.0)
    print(f"{result.statistic.devices} boards answered, each for epsilon {number(spent)}")
