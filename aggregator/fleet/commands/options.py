"""Arguments and options that several commands of a fleet have, and the fleet's folder as they open it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.report.options import Option

if TYPE_CHECKING:
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.trust.registry import FleetRegistry

RUN_IT = "Make it and let it learn"
FILE = {"exists": True, "dir_okay": False}
FOLDER = {"exists": True, "file_okay": False}
# fmt: off
Dir = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")]
DirOrRun = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder, or that of a run without a fleet.")]
FleetDir = Annotated[Path, Option(metavar="DIR", help="The fleet's folder.")]
ImagesFolder = Annotated[Path | None, Option(metavar="FOLDER", help="Photographs to begin with: a folder for each "
"board, named by its id, with a folder for each class.", **FOLDER)]
WheelsFolder = Annotated[Path | None, Option(metavar="FOLDER", help="Folder with the wheels for the release; default: "
"the package index.", **FOLDER)]
IdsFile = Annotated[Path | None, Option("--file", metavar="IDS.txt", help="File with the ids of boards, one a line.", **FILE)]
Yes = Annotated[bool, Option("--yes", help="Sign without asking.")]
# fmt: on


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[FleetFolder, FleetRegistry]]:
    """Yields the fleet's folder and its registry."""
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.trust.registry import FleetRegistry

    folder = FleetFolder(path)
    with FleetRegistry(folder.path) as registry:
        yield folder, registry
