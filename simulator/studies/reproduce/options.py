"""The options of `hushfleet reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hushfleet.aggregator.report.options import Option
from hushfleet.schema import AtLeast1, Count
from hushfleet.simulator.options import DataDir

OUT, RUNS = Path("runs/reproduce"), Path("runs/reproduce-cells")
PAGE = Path("docs/reproduction.md")
RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Which cells of a paper are run, and how."""

    # fmt: off
    list_all: Annotated[bool, Option("--list", help="List all tables and figures with their cells, run times and gaps.")] = False
    table: Annotated[str | None, Option(help="Number of the table in the paper.")] = None
    figure: Annotated[str | None, Option(help="Number of a figure instead.")] = None
    dataset: Annotated[list[str] | None, Option(help="Only this row group; may be repeated.")] = None
    method: Annotated[list[str] | None, Option(help="Only this row; may be repeated.")] = None
    column: Annotated[list[str] | None, Option(help="Only this column; may be repeated.")] = None
    reading: Annotated[list[str] | None, Option(help="Only this reading of the paper; may be repeated.")] = None
    seeds: Annotated[AtLeast1, Option(help="Number of seeds: 0, 1, ...")] = 3
    quick: Annotated[bool, Option("--quick", help="Fewer rounds and less data; labelled so, and never mixed with the "
"others.")] = False
    data_dir: DataDir = None
    whole_page: Annotated[bool, Option("--report", help="Write the page of all published cells: --out, by default "
"docs/reproduction.md.")] = False
    out: Annotated[Path | None, Option(help="Folder of cells and reports; default: runs/reproduce.")] = None
    results: Annotated[Path | None, Option(help="Folder of published cells, which count as finished; default: "
"docs/results beside this program's source.")] = None
    runs: Annotated[Path, Option(help="Folder of running cells.")] = RUNS
    jobs: Annotated[Count, Option(help="Number of parallel cells; 0: by cores and free memory.")] = 0
    max_cells: Annotated[Count | None, Option(help="Largest number of cells to run; 0 only makes the report.")] = None
    runtime: Annotated[str, Option(help="Runtime that computes gradients; default: the quickest here.")] = ""
    show_task: Annotated[bool, Option("--show-task", help="Print the first cell's task file and stop.")] = False
    # fmt: on

    @property
    def published(self) -> Path:
        """The folder of published cells."""
        return self.results or RESULTS
