"""Shows a forecast as tables and a plot, and reads the inputs of a forecast from a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.readable import format_seconds, size
from hushfleet.errors import BadInput
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.forecast.forecast import Forecast
from hushfleet.simulator.world.measure import machine_speed, measure_costs
from hushfleet.simulator.world.times import Costs


def sample_counts(task: Task, prepared: PreparedTask) -> list[int]:
    """Counts the training samples of each device of the task's own partition."""
    if prepared.dataset is None:
        raise BadInput("the task's data are in the field only; give the number of samples of a device by --samples")
    return [len(device.train) for device in make_fleet(task, prepared.dataset).devices]


def costs_of(prepared: PreparedTask, step_ms: float | None) -> Costs:
    costs = measure_costs(prepared, machine_speed=machine_speed())
    if step_ms is None:
        return costs
    # keeps the trial's ratio between the cost of a batch and the cost of its samples
    scale = step_ms / 1000 / max(costs.step_s(prepared.method.config.batch_size), 1e-12)
    return replace(costs, batch_s=scale * costs.batch_s, sample_s=scale * costs.sample_s)


_FIGURES: dict[str, Callable[[Forecast], str]] = {
    "time to the end": lambda f: format_seconds(f.total_s),
    "a round, median": lambda f: format_seconds(f.round_median_s),
    "a round, 95 % within": lambda f: format_seconds(f.round_p95_s),
    "updates used a round": lambda f: f"{f.updates_per_round:.1f}",
    "stragglers": lambda f: f"{100 * f.stragglers:.1f} %",
    "up a device": lambda f: size(f.up_bytes / f.devices),
    "down a device": lambda f: size(f.down_bytes / f.devices),
    "up in all": lambda f: size(f.up_bytes),
    "down in all": lambda f: size(f.down_bytes),
    "energy a device": lambda f: f"{f.energy_wh / f.devices:.3g} Wh",
    "energy in all": lambda f: f"{f.energy_wh / 1000:.3g} kWh",
    "epsilon, worst": lambda f: f"{f.epsilon:.3g}",
    "epsilon, unused": lambda f: f"{f.epsilon_unused:.3g}",
}


def print_forecasts(
    console: Console, forecasts: Sequence[Forecast], costs: Costs, *, step_s: float, given: bool = False
) -> None:
    """Prints a table with a column for each policy, then the stragglers with a row for each board.

    :param step_s: CPU seconds of a batch on one core of generic-x86.
    :param given: True if the user has set `step_s`, False if it was measured.
    """
    first, rounds = forecasts[0], _same_rounds(forecasts)
    told = "" if rounds is None else f", {rounds} rounds"
    table = Table(title=f"{first.devices:,} devices{told}, on the virtual clock", title_justify="left")
    table.add_column("")
    for each in forecasts:
        table.add_column(each.policy, justify="right", overflow="fold")
    if rounds is None:
        table.add_row("rounds", *(f"{each.rounds:,}" for each in forecasts))
    for heading, figure in _FIGURES.items():
        table.add_row(heading, *map(figure, forecasts))
    for heading in dict.fromkeys(name for each in forecasts if each.days for name in each.days.rows()):
        table.add_row(
            heading, *(each.days.rows().get(heading, "not reached") if each.days else "" for each in forecasts)
        )
    console.print(table)
    _print_boards(console, forecasts)
    for each in forecasts:
        if each.simulated < each.devices:
            console.print(
                f"{each.policy}: {each.simulated} of {each.devices:,} devices were simulated, each for "
                f"{each.devices / each.simulated:.3g} of its kind; epsilon is that of the worst of these.",
                highlight=False,
            )
    step, measured = f"a step {1000 * step_s:.3g} ms", "measured here, scaled to one core of generic-x86"
    told = f"given: {step}; {measured}: the" if given else f"{measured}: {step}, the"
    console.print(
        f"{told} rest of a round {1000 * costs.release_s:.3g} ms. Energy, links and speeds are estimates from data "
        "sheets. epsilon is what the device that was charged most has spent against the server; unused, what of it "
        "went into no model where that is most.",
        highlight=False,
    )


def _same_rounds(forecasts: Sequence[Forecast]) -> int | None:
    """Returns the number of rounds; None if it differs between policies, for example at the end of a schedule."""
    found = {each.rounds for each in forecasts}
    return found.pop() if len(found) == 1 else None


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
    """Plots the duration of each policy against the updates it uses per round: one point per policy.

    Raises `BadInput` if the file cannot be written.
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
    rounds = _same_rounds(forecasts)
    axes.set_xlabel("updates used a round")
    axes.set_ylabel(f"{unit} to the last round" if rounds is None else f"{unit} for {rounds} rounds")
    axes.set_title(f"{forecasts[0].devices:,} devices on the virtual clock")
    axes.margins(0.2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInput(f"--plot {path}: it cannot be written: {error.strerror}") from error
