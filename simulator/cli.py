"""`hushfleet simulate`: simulate a fleet on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.report.options import with_options
from hushfleet.simulator.options import RunOptions, TaskOptions


@with_options
def simulate(
    task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="Task file; see `tasks/` for examples.")],
    options: RunOptions,
    changes: TaskOptions,
) -> None:
    """Simulate a fleet: the same method, codec, ledger and round as in the field, on this machine.

    Examples:

    `hushfleet simulate tasks/digits-hush.toml`

    `hushfleet simulate tasks/digits-hush.toml --seeds 3` (mean and spread)

    `hushfleet simulate tasks/digits-hush.toml --set privacy.epsilon=8 --engine live --own-processes 8`

    `hushfleet simulate tasks/digits-rough-weather.toml --boards raspberry-pi-zero-2-w,jetson-orin-nano`

    After Ctrl-C: `hushfleet simulate tasks/digits-hush.toml --out runs/a --resume`
    """
    from hushfleet.aggregator.report.console import Console
    from hushfleet.simulator.command import run_and_show

    run_and_show(changes.load(task_file), options, Console())
