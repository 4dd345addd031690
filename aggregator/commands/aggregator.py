"""`hushfleet aggregator`: run a task with the boards behind a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.commands.field_options import AggregatorOptions
from hushfleet.aggregator.report.options import with_options


@with_options
def aggregator(
    context: typer.Context,
    options: AggregatorOptions,
    task_file: Annotated[
        Path | None, typer.Argument(metavar="TASK.toml", help="Task file; see `tasks/` for examples.")
    ] = None,
) -> None:
    """Run a task with the devices behind a broker. Safe to kill at any time; `--resume` goes on.

    Examples:

    `hushfleet aggregator tasks/digits-fedglp-adp.toml --broker mqtt://localhost:1883 --enrolment open`

    `hushfleet aggregator task.toml --broker mqtts://broker:8883 --ca-file ca.pem --devices devices.toml --out runs/a
    --resume`

    `hushfleet aggregator --fleet greenhouse`
    """
    from hushfleet.aggregator.commands.field_run import run_in_field

    run_in_field(context, options, task_file)
