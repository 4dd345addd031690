"""`hushfleet forecast`: forecast a fleet's time, bytes and energy, before a board is bought."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.errors import BadInput
from hushfleet.schema import AtLeast1
from hushfleet.simulator.options import DataDir, Json, TaskOptions

PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """Options of a forecast."""

    # fmt: off
    boards: Annotated[str, Option(help="Board profiles, separated by commas and dealt to the devices in turn, or a "
"mix file.")] = "generic-x86"
    policy: Annotated[list[str] | None, Option(metavar="KEY=VALUE,...", help="Policy to compare, with keys of "
"[round]: cohort_size, min_devices, quorum, min_updates, deadline_s, mode, buffer_size, max_staleness; may be "
"repeated.")] = None
    samples: Annotated[AtLeast1 | None, Option(help="Number of training samples of every device.")] = None
    days: Annotated[Annotated[int, Meta(ge=4)] | None, Option(help="So many days of the task's [schedule], with "
"epsilon by quarter, hours awake, and when a budget ends.")] = None
    limits: Annotated[Path | None, Option(metavar="FILE.toml", help="With --days: the owner's limits, from a "
"DEVICE.toml or fleet.toml.")] = None
    step_ms: Annotated[Annotated[float, Meta(ge=0)] | None, Option(help="CPU time of a training step on one core of "
"generic-x86; default: measured by a trial.")] = None
    data_dir: DataDir = None
    as_json: Json = False
    plot: Annotated[Path | None, Option(metavar="FILE.png", help="Also write a figure: .png, .svg or .pdf.")] = None
    # fmt: on


@with_options
def forecast(
    task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="Task file; see `tasks/` for examples.")],
    options: ForecastOptions,
    changes: TaskOptions,
) -> None:
    """Forecast a fleet: time, stragglers, bytes, energy and privacy of its devices, without training.

    The aggregator and the boards' client run on a virtual clock, and train with zeros. What computing costs is
    measured by a short trial here; boards, links and power come from the board profiles (`hushfleet boards`). Their
    figures are from data sheets or estimated, so the results are estimates. Give several policies to compare them side
    by side.

    Examples:

    `hushfleet forecast tasks/digits-fedglp-adp.toml --boards raspberry-pi-zero-2-w,jetson-orin-nano`

    `hushfleet forecast tasks/digits-hush.toml --boards mix.toml --devices 500 --rounds 200 --policy cohort_size=50
    --policy cohort_size=50,quorum=0.8 --policy cohort_size=50,deadline_s=300 --plot policies.png`

    `hushfleet forecast task.toml --boards raspberry-pi-4-4gb --days 365 --limits greenhouse/fleet.toml`

    mix.toml sets the number of each board and its network:

        [[board]]
        profile = "raspberry-pi-zero-2-w"
        share = 0.6                      # or count = 3000
        network = { up_mbit_s = 2, down_mbit_s = 8, latency_ms = 60 }
        [[board]]
        profile = "jetson-orin-nano"
        share = 0.4

    The number of samples of each device comes from the task file's partition, repeated for more devices, or from
    --samples. A [scenario] in the task file (days and nights, drop-outs, outages, crashes) is played as well, and its
    [schedule] from today, 00:00.
    """
    import json

    from hushfleet.aggregator.payloads.prepare import prepare
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.schema import read_file
    from hushfleet.simulator.boards import read_boards
    from hushfleet.simulator.fleet import device_names
    from hushfleet.simulator.forecast.days import read_budget
    from hushfleet.simulator.forecast.forecast import forecast, read_policies
    from hushfleet.simulator.forecast.show import costs_of, plot_forecasts, print_forecasts, sample_counts
    from hushfleet.simulator.world.sizes import sizes_of
    from hushfleet.user_files import checked_file

    console, plot = Console(stderr=options.as_json), options.plot
    if plot is not None and checked_file(plot, "--plot").suffix.lower() not in PLOT_FORMATS:  # before any work
        raise BadInput(f"--plot {plot}: the name must end in {', '.join(PLOT_FORMATS)}")
    written = replace(changes, devices=None, rounds=None).load(task_file)
    if changes.devices is None and options.boards.strip().endswith(".toml"):
        with suppress(BadInput):  # shares, or a mistake that is reported when the number is known
            changes = replace(changes, devices=len(read_boards(options.boards)))
    task = changes.load(task_file)
    policies = read_policies(options.policy or [], task)
    if options.limits is not None and options.days is None:
        raise BadInput(f"--limits {options.limits} is for --days: give the number of days, such as --days 365")
    budget = None if options.limits is None else read_budget(read_file(options.limits))
    mix = read_boards(options.boards, devices=task.data.devices, seed=task.seed)
    with show_progress(console):
        prepared = prepare(task, data_dir=options.data_dir, run_id=f"seed{task.seed}")
        counts = [options.samples] if options.samples else sample_counts(written, prepared)
        costs = costs_of(prepared, options.step_ms)
    sizes = sizes_of(prepared, name_bytes=len(device_names(len(mix))[0]))
    forecasts, today = [], datetime.combine(date.today(), time())
    for text, rules in policies.items():
        with show_progress(console):
            forecasts.append(
                forecast(
                    prepared,
                    mix,
                    rules,
                    policy=text,
                    samples=counts,
                    costs=costs,
                    sizes=sizes,
                    starts=today,
                    days=options.days,
                    budget=budget,
                )
            )
    if options.as_json:
        plain = {"costs": vars(costs), "policies": [each.to_plain() for each in forecasts]}
        typer.echo(json.dumps(plain, indent=2))
    else:
        step_s, given = costs.step_s(task.method.config().batch_size), options.step_ms is not None
        print_forecasts(console, forecasts, costs, step_s=step_s, given=given)
    if plot is not None:
        plot_forecasts(forecasts, plot)
        console.print(f"plot  {plot}", highlight=False, markup=False)
