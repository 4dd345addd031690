"""`hushfleet compare`: show runs side by side, in a table, a page or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders, with `result.json`.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Also write an HTML page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show runs side by side: gains, privacy given away, and differences of the tasks.

    Runs that differ by their seed alone are set together: a mean accuracy has the standard deviation over seeds, a
    mean gain its standard error. The seeds of `simulate --seeds` are found in the run's folder.

    Example: `hushfleet compare runs/a runs/b --out both.html`
    """
    from hushfleet.aggregator.report.comparison import (
        comparison_json,
        comparison_table,
        load_runs,
        run_folders,
        write_comparison,
    )
    from hushfleet.aggregator.report.console import Console
    from hushfleet.plain_json import to_json
    from hushfleet.user_files import checked_file

    if out is not None:
        checked_file(out)
    results = load_runs(runs)
    if out is not None:
        reports = {name: str(folder / "report.html") for name, folder in run_folders(runs).items()}
        write_comparison(f"{len(results)} runs", results, reports, out)
    if as_json:
        print(json.dumps(to_json(comparison_json(results)), indent=1))
        return
    console = Console()
    console.print(comparison_table(results, title="what a device gained, and what it gave away"))
    if out is not None:
        console.print(f"page  {out}", highlight=False, markup=False)
