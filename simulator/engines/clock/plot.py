"""The plot of a forecast: how long each policy takes, against how many updates a round it uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hushfleet.errors import BadInput
from hushfleet.simulator.engines.clock.forecast import Forecast

FORMATS = (".png", ".svg", ".pdf")


def check_plot_path(path: Path) -> None:
    """Before any work is done. Raises `BadInput` for a kind of file that cannot be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise BadInput(f"--plot {path}: the name must end in {', '.join(FORMATS)}")


def plot_forecasts(forecasts: Sequence[Forecast], path: Path) -> None:
    """Draws a point a policy. Raises `BadInput` where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    longest_s = max(each.total_s for each in forecasts)
    unit, unit_s = ("days", 86400.0) if longest_s > 2 * 86400 else ("hours", 3600.0)
    for each in forecasts:
        hours = each.total_s / unit_s
        axes.plot(each.updates_per_round, hours, "o", markersize=8)
        axes.annotate(
            f"{each.policy}\n{100 * each.stragglers:.0f} % stragglers",
            (each.updates_per_round, hours),
            xytext=(8, 4),
            textcoords="offset points",
            fontsize=8,
        )
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
