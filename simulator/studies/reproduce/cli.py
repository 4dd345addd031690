"""`hushfleet reproduce`: run a paper's table, and show it beside the paper's own numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput
from hushfleet.simulator.studies.reproduce.options import OUT, PAGE, ReproduceOptions


@with_options
def reproduce(
    options: ReproduceOptions, paper: Annotated[str | None, typer.Argument(help="Paper, as in --list.")] = None
) -> None:
    """Run the cells of a paper's table, and show them beside the paper's own numbers.

    Finished cells are kept in OUT/cells and never run again; an interrupted one goes on where it stopped. Published
    cells in --results are taken too. The table is also in OUT/PAPER/TABLE.json, and as a figure in TABLE.svg.

    Examples:

    `hushfleet reproduce --list`

    `hushfleet reproduce fedglp-adp --table 1 --dataset fashion-mnist --seeds 1`

    `hushfleet reproduce fedglp-adp --table 1 --method fedglp-adp --column eps-2 --quick`

    `hushfleet reproduce --report`
    """
    from hushfleet.simulator.studies.reproduce.recipe import find_recipe, paper_names
    from hushfleet.user_files import checked_file, checked_folder

    if options.whole_page:
        page = checked_file(options.out or PAGE)
        from hushfleet.simulator.studies.reproduce.command import write_page

        write_page(options.published, page)
        return
    out, _ = checked_folder(options.out or OUT), checked_folder(options.runs, "--runs")
    if options.list_all or paper is None:
        of_one = ("table", "figure", "dataset", "method", "column", "reading", "runtime", "show_task")
        for option in (f"--{name.replace('_', '-')}" for name in of_one if getattr(options, name)):
            raise BadInput(f"{option} does nothing in a list: name a PAPER and its table, without --list")
        from hushfleet.simulator.studies.reproduce.listing import show_list

        show_list([paper] if paper else paper_names(), out, options)
        return
    # refuses an unknown table before PyTorch is imported
    recipe = find_recipe(paper, table=options.table, figure=options.figure)
    if recipe.open:
        claim = f" The paper says: {recipe.claim}" if recipe.claim else ""
        raise BadInput(f"{paper}, {recipe.label} ({recipe.title}) cannot be run: {recipe.open}.{claim}")
    from hushfleet.simulator.studies.reproduce.command import run_table

    run_table(recipe, out, options)
