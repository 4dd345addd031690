"""`hushfleet report`: make the report of a run again, or of all runs of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|DIR", help="Run folder with `result.json`, a folder of several runs, or a fleet's folder."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="HTML file to write; default: report.html in the folder."),
    ] = None,
    departed: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Say what remains of a board that has left this fleet; departed-ID.html."),
    ] = None,
) -> None:
    """Make the report of a run again from its result.json, and print its summary; or compare the runs of a fleet.

    A run's report shows what the server could see if `hushfleet invert RUN/task.json --out RUN` has drawn it.

    A fleet's report compares its tasks that have ended, and links the report of each. Its boards, and what each has
    spent over all tasks: `hushfleet fleet status DIR`.

    Examples:

    `hushfleet report runs/demo`

    `hushfleet report greenhouse`

    `hushfleet report greenhouse --departed greenhouse-07`
    """
    from hushfleet.aggregator.fleet.trust.membership import is_fleet
    from hushfleet.aggregator.report.comparison import load_runs, run_folders, write_comparison
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.render import write_report
    from hushfleet.aggregator.report.summary import summary_table
    from hushfleet.aggregator.results.result import Result
    from hushfleet.errors import BadInput
    from hushfleet.user_files import checked_file

    if run.is_file():
        raise BadInput(f"{run} is a file; give the run's folder, which has a result.json")
    if departed is not None:
        _departed(run, departed, out)
        return
    console, path = Console(), checked_file(out or run / "report.html")
    if is_fleet(run):
        folders = sorted(file.parent for file in run.glob("runs/*/result.json"))
        if not folders:
            raise BadInput(
                f"no task of {run} has ended yet; its boards, and what they have spent: hushfleet fleet status {run}"
            )
    else:
        folders = sorted(file.parent for file in run.glob("*/result.json"))
    if (run / "result.json").exists() or not folders:
        result = Result.load(run / "result.json")
        write_report(result, path, seen=run / "invert.png")
        console.print(summary_table(result))
    else:
        runs, places = load_runs(folders), run_folders(folders)
        for name, result in runs.items():
            write_report(result, places[name] / "report.html", seen=places[name] / "invert.png")
        reports = {name: f"{place.relative_to(run).as_posix()}/report.html" for name, place in places.items()}
        write_comparison(f"{len(runs)} runs", runs, reports, path)
    console.print(f"report  {path}", highlight=False, markup=False)


def _departed(run: Path, device: str, out: Path | None) -> None:
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.trust.membership import is_fleet
    from hushfleet.aggregator.fleet.watching.departed import NOT_BOUNDED, departed
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.tables import terminal_table
    from hushfleet.aggregator.results.result import write_whole
    from hushfleet.errors import BadInput
    from hushfleet.user_files import checked_file
    from hushfleet.wire.format.topics import check_name

    if not is_fleet(run):
        raise BadInput(f"{run} is no fleet's folder; what a board of a run spent is in its report")
    found = departed(FleetFolder(run), check_name(device, "--departed"))
    path, console = checked_file(out or run / f"departed-{device}.html"), Console()
    write_whole(path, found.html())
    for line in found.sentences:
        console.print(line, highlight=False, markup=False)
    for title, table in found.parts:
        console.print(terminal_table(table, title=title))
    for line in ("This does not bound:", *NOT_BOUNDED):
        console.print(line, highlight=False, markup=False)
    console.print(f"report  {path}", highlight=False, markup=False)
