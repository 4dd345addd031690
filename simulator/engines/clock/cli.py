"""`hushfleet forecast`: what a fleet would take, before a board is bought."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.publish.prepare import PreparedTask, prepare
from hushfleet.errors import BadInput
from hushfleet.simulator.boards import read_boards
from hushfleet.simulator.cli import DataDir, Devices, Rounds, Settings, overridden
from hushfleet.simulator.engines.clock.device_time import Costs
from hushfleet.simulator.engines.clock.forecast import POLICY_KEYS, Forecast, forecast, read_policies
from hushfleet.simulator.engines.clock.measure import measure_costs
from hushfleet.simulator.engines.clock.sizes import sizes_of
from hushfleet.simulator.engines.live.emulation import machine_speed
from hushfleet.simulator.fleet import device_names, make_fleet
from hushfleet.simulator.units import shown_bytes, shown_time

PLOT_FORMATS = (".png", ".svg", ".pdf")
HELP = """Forecast a fleet: time, stragglers, bytes, energy and privacy of thousands of devices, without training.

The rounds run on a virtual clock, by the aggregator's own rules for opening and closing them. What computing costs is
measured by a short trial here; boards, links and power come from the board profiles (`hushfleet boards`), whose
figures are data sheets and estimates, and so are the results. Give several policies to compare them side by side.

Examples:

`hushfleet forecast tasks/digits-fedglp-adp.toml --boards raspberry-pi-zero-2-w,jetson-orin-nano`

`hushfleet forecast TASK.toml --boards mix.toml --devices 5000 --rounds 200 --policy cohort_size=500
--policy cohort_size=500,quorum=0.8 --policy cohort_size=500,deadline_s=300 --plot policies.png`

mix.toml says how many of which board there are, and what network lies behind them:

    [[board]]
    profile = "raspberry-pi-zero-2-w"
    share = 0.6                      # or count = 3000
    network = { up_mbit_s = 2, down_mbit_s = 8, latency_ms = 60 }
    [[board]]
    profile = "jetson-orin-nano"
    share = 0.4

How many samples each device has is taken from the task file's own partition, for more devices again and again; or say
it by --samples. A [scenario] in the task file (days and nights, drop-outs, outages, crashes) is played as well.
"""


def register(app: typer.Typer) -> None:
    """Adds the command `forecast`."""

    @app.command("forecast", help=HELP)
    def forecast_command(
        task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="What would be run; see `tasks/`.")],
        boards: Annotated[
            str, typer.Option(help="A mix file, or profiles dealt to the devices in turn, with commas between.")
        ] = "generic-x86",
        devices: Devices = None,
        rounds: Rounds = None,
        policy: Annotated[
            list[str] | None,
            typer.Option(
                metavar="KEY=VALUE,...",
                help=f"A column; keys of [round]: {', '.join(POLICY_KEYS)}.",
            ),
        ] = None,
        samples: Annotated[int | None, typer.Option(min=1, help="Training samples of every device.")] = None,
        step_ms: Annotated[
            float | None,
            typer.Option(min=0, help="CPU time of a training step on one core of generic-x86, instead of a trial's."),
        ] = None,
        settings: Settings = None,
        data_dir: DataDir = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
        plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw it: .png, .svg or .pdf.")] = None,
    ) -> None:
        console = Console(stderr=as_json)
        if plot is not None and plot.suffix.lower() not in PLOT_FORMATS:  # before any work is done
            raise BadInput(f"--plot {plot}: the name must end in {', '.join(PLOT_FORMATS)}")
        written = overridden(task_file, settings)
        if devices is None and boards.strip().endswith(".toml"):
            with suppress(BadInput):  # shares, or a mistake that is told when the number is known
                devices = len(read_boards(boards))
        task = overridden(task_file, settings, {"data.devices": devices, "round.rounds": rounds})
        policies = read_policies(policy or [], task.round)
        mix = read_boards(boards, devices=task.data.devices, seed=task.seed)
        with console.status("loading data, exporting the graphs, measuring what a round costs"):
            prepared = prepare(task, data_dir=data_dir, run_id=f"seed{task.seed}")
            counts = [samples] if samples else sample_counts(written, prepared)
            costs = _costs(prepared, step_ms)
        sizes = sizes_of(prepared, name_bytes=len(device_names(len(mix))[0]))
        forecasts = []
        for text, rules in policies.items():
            with console.status(f"{rules.rounds} rounds of {len(mix)} devices: {text}"):
                forecasts.append(forecast(prepared, mix, rules, policy=text, samples=counts, costs=costs, sizes=sizes))
        if as_json:
            plain = {"costs": vars(costs), "policies": [each.to_plain() for each in forecasts]}
            typer.echo(json.dumps(plain, indent=2))
        else:
            print_forecasts(console, forecasts, costs, step_s=costs.step_s(task.method.config().batch_size))
        if plot is not None:
            plot_forecasts(forecasts, plot)
            console.print(f"plot  {plot}", highlight=False)


def sample_counts(task: Task, prepared: PreparedTask) -> list[int]:
    """How many training samples each device of the task's own partition has."""
    if prepared.dataset is None:
        raise BadInput("the task's data are in the field only; say by --samples how many a device has")
    return [len(device.train) for device in make_fleet(task, prepared.dataset).devices]


def _costs(prepared: PreparedTask, step_ms: float | None) -> Costs:
    costs = measure_costs(prepared, machine_speed=machine_speed())
    if step_ms is None:
        return costs
    # the trial's division between what a batch and what its samples cost is kept
    scale = step_ms / 1000 / max(costs.step_s(prepared.method.config.batch_size), 1e-12)
    return replace(costs, batch_s=scale * costs.batch_s, sample_s=scale * costs.sample_s)


_FIGURES: dict[str, Callable[[Forecast], str]] = {
    "time to the end": lambda f: shown_time(f.total_s),
    "a round, median": lambda f: shown_time(f.round_median_s),
    "a round, 95 % within": lambda f: shown_time(f.round_p95_s),
    "updates used a round": lambda f: f"{f.updates_per_round:.1f}",
    "stragglers": lambda f: f"{100 * f.stragglers:.1f} %",
    "up a device": lambda f: shown_bytes(f.up_bytes / f.devices),
    "down a device": lambda f: shown_bytes(f.down_bytes / f.devices),
    "up in all": lambda f: shown_bytes(f.up_bytes),
    "down in all": lambda f: shown_bytes(f.down_bytes),
    "energy a device": lambda f: f"{f.energy_wh / f.devices:.3g} Wh",
    "energy in all": lambda f: f"{f.energy_wh / 1000:.3g} kWh",
    "epsilon, worst": lambda f: f"{f.epsilon:.3g}",
    "epsilon, unused": lambda f: f"{f.epsilon_unused:.3g}",
}


def print_forecasts(console: Console, forecasts: Sequence[Forecast], costs: Costs, *, step_s: float) -> None:
    """For people: a column a policy; then the stragglers, a row a board.

    :param step_s: of a batch on one core of generic-x86.
    """
    first = forecasts[0]
    table = Table(title=f"{first.devices:,} devices, {first.rounds} rounds, on the virtual clock", title_justify="left")
    table.add_column("")
    for each in forecasts:
        table.add_column(each.policy, justify="right", overflow="fold")
    for heading, figure in _FIGURES.items():
        table.add_row(heading, *map(figure, forecasts))
    console.print(table)
    _print_boards(console, forecasts)
    console.print(
        f"measured here, scaled to one core of generic-x86: a step {1000 * step_s:.3g} ms, the rest of a round "
        f"{1000 * costs.release_s:.3g} ms. Energy, links and speeds are estimates from data sheets. epsilon is what "
        "the device that was charged most has spent against the server; unused, what of it went into no model where "
        "that is most.",
        highlight=False,
    )


def _print_boards(console: Console, forecasts: Sequence[Forecast]) -> None:
    table = Table(title="stragglers by board: late (charged) + given up (not charged)", title_justify="left")
    table.add_column("board")
    table.add_column("devices", justify="right")
    for each in forecasts:
        table.add_column(each.policy, justify="right")
    for number, board in enumerate(forecasts[0].boards):
        cells = []
        for each in forecasts:
            share = each.boards[number]
            lost = share.lost + share.declined
            more = f"; {100 * lost:.1f} % lost" if lost else ""
            cells.append(f"{100 * share.late:.1f} + {100 * share.given_up:.1f} %{more}")
        table.add_row(board.board, f"{board.devices:,}", *cells)
    console.print(table)


def plot_forecasts(forecasts: Sequence[Forecast], path: Path) -> None:
    """How long each policy takes, against how many updates a round it uses: a point a policy.

    Raises `BadInput` where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    longest_s = max(each.total_s for each in forecasts)
    unit, unit_s = ("days", 86400.0) if longest_s > 2 * 86400 else ("hours", 3600.0)
    for each in forecasts:
        point = (each.updates_per_round, each.total_s / unit_s)
        axes.plot(*point, "o", markersize=8)
        label = f"{each.policy}\n{100 * each.stragglers:.0f} % stragglers"
        axes.annotate(label, point, xytext=(8, 4), textcoords="offset points", fontsize=8)
    first = forecasts[0]
    axes.set_xlabel("updates used a round")
    axes.set_ylabel(f"{unit} for {first.rounds} rounds")
    axes.set_title(f"{first.devices:,} devices on the virtual clock")
    axes.margins(0.2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInput(f"--plot {path}: it cannot be written: {error.strerror}") from error
