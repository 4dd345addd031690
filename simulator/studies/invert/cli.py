"""`hushfleet invert`: seek training images in the updates that a server sees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.report.options import with_options
from hushfleet.simulator.studies.invert.options import FIGURES, PICTURE, InvertOptions


@with_options
def invert(
    task_file: Annotated[
        Path,
        typer.Argument(
            metavar="TASK.toml", help="Task file with network, data, clip norm, delta and rounds; see `tasks/`."
        ),
    ],
    options: InvertOptions,
) -> None:
    """Seek training images in the updates that a server sees.

    The attack inverts gradients (Geiping et al. 2020) of the task's first model and its first device: a raw update
    (clipping changes nothing), one with little noise, one with the task's noise, one with the noise of epsilon_server
    8 and 2 over the task's rounds, and a sum of devices, without noise and with. It is the worst case for a device:
    one step on one image with a known label. An image counts as recognised if no other training image of its class
    is more like the found one.

    A failed attack is no proof that none succeeds; an epsilon holds against all attacks.

    Examples:

    `hushfleet invert tasks/digits-fedglp-adp.toml --out runs/invert`

    `hushfleet invert tasks/digits-fedglp-adp.toml --images 12 --seed 1 --json`

    For the report of a run: `hushfleet invert runs/a/task.json --out runs/a`

    Then the report shows it: `hushfleet report runs/a`
    """
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.simulator.studies.invert.show import table
    from hushfleet.simulator.studies.invert.study import invert
    from hushfleet.user_files import checked_folder

    console, out = Console(stderr=options.as_json), options.out
    if out is not None:
        checked_folder(out)
    task = options.load(task_file)
    with show_progress(console):
        seen = invert(task, options)
    if options.as_json:
        print(seen.json)
    else:
        console.print(table(seen.title, seen.views))
    if out is not None:
        seen.save(out)
        console.print(f"figures  {out / FIGURES}\npicture  {out / PICTURE}", highlight=False, markup=False)
