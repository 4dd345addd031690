"""What is shown of a contest: a table, a JSON file and a bar chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.contenders.network import multiply_adds_per_sample
from benchmarks.machine import cores, cpu_model, machine
from benchmarks.versus.contest import Record
from benchmarks.versus.field import PLAIN, counted
from benchmarks.versus.workloads import Workload

PEERS = ("pfl", "flower")
COLOURS = {"ours": "#1b7f5c", "plain": "#8a8a8a", "pfl": "#c8782a", "flower": "#4a6fb5"}


@dataclass(frozen=True)
class Comparison:
    """One workload's records.

    :param first_accuracy: of the first global model; None without a check.
    """

    workload: Workload
    records: tuple[Record, ...]
    first_accuracy: float | None = None

    @property
    def contenders(self) -> list[Record]:
        return [record for record in self.records if record.contender.family != "ceiling"]

    @property
    def flop_per_sample(self) -> int:
        return 2 * multiply_adds_per_sample(self.workload.network)

    @property
    def gflop_s(self) -> float | None:
        """Of the machine's matrix products."""
        return next((record.rate for record in self.records if record.contender.family == "ceiling"), None)

    @property
    def ceiling(self) -> float | None:
        """Samples a second, if training were nothing but matrix products at the machine's best rate."""
        return self.gflop_s * 1e9 / self.flop_per_sample if self.gflop_s else None

    @property
    def plain(self) -> Record | None:
        found = (record for record in self.records if record.contender.label == PLAIN)
        return next((record for record in found if record.rate is not None), None)

    @property
    def best_peer(self) -> Record | None:
        """The quickest of the frameworks, in whichever form."""
        return self._best(PEERS)

    @property
    def best_ours(self) -> Record | None:
        return self._best(("ours",))

    def _best(self, families: Sequence[str]) -> Record | None:
        found = [r for r in self.records if r.contender.family in families and r.rate is not None]
        return max(found, key=lambda record: record.rate or 0.0, default=None)


def times(record: Record, base: Record | None) -> float | None:
    """How many times as fast: the median over the turns, since what slows a turn down slows both of its sides."""
    if record.rate is None or base is None:
        return None
    return statistics.median(own / other for own, other in zip(record.rates, base.rates, strict=True))


def share_of(record: Record, ceiling: float | None) -> float | None:
    return record.rate / ceiling if record.rate and ceiling else None


def table(comparison: Comparison) -> Table:
    """Rich, for the terminal."""
    # Fits 80 columns, with the check's.
    made = Table(
        title=comparison.workload.text, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
    )
    made.add_column("contender", no_wrap=True)
    checked = comparison.first_accuracy is not None
    headings = ["samples/s", "spread", "x plain", "x peer", "ceiling"]
    for heading in headings + ["accuracy"] * checked:
        made.add_column(heading, justify="right", no_wrap=True)
    best_peer = comparison.best_peer
    for record in comparison.contenders:
        rate, name = record.rate, record.contender.label
        share = share_of(record, comparison.ceiling)
        if rate is None:
            made.add_row(name, (record.failure or "not measured").split(";")[0].split(":")[0], style="dim")
            continue
        made.add_row(
            name,
            f"{rate:,.0f}",
            f"{(max(record.rates) - min(record.rates)) / rate:.0%}",
            _number(times(record, comparison.plain)),
            _number(times(record, best_peer)),
            f"{share:.1%}" if share else "-",
            *[f"{record.accuracy:.1%}" if record.accuracy is not None else "-"] * checked,
            style="bold" if record.contender.family == "ours" else "",
        )
    return made


def notes(comparison: Comparison) -> list[str]:
    """Sentences under the table."""
    said = ["medians of the turns; spread: highest less lowest; x peer: against the best of pfl and Flower"]
    if comparison.ceiling and comparison.gflop_s:
        said.append(
            f"ceiling {comparison.ceiling:,.0f} samples/s: {comparison.gflop_s:,.0f} GFLOP/s of float32 matrix "
            f"products on the whole processor in its best turn, {comparison.flop_per_sample / 1e6:.1f} MFLOP a sample"
        )
    ours, peer = comparison.best_ours, comparison.best_peer
    if ours and peer:
        label = ours.contender.label
        said.append(f"{label} is {times(ours, peer):.2f} times the best peer ({peer.contender.label})")
    if comparison.first_accuracy is not None:
        rounds = comparison.workload.check_rounds
        first = f"{comparison.first_accuracy:.1%}"
        said.append(f"accuracy: of the global model after {rounds} rounds without noise; it begins at {first}")
    said += [f"{r.contender.label}: {r.versions['trial']}" for r in comparison.records if "trial" in r.versions]
    said += [f"{record.contender.label}: {record.failure}" for record in comparison.records if record.failure]
    return said


def to_json(comparisons: Sequence[Comparison], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, all turns and rounds."""
    return {"machine": machine(), "settings": settings, "workloads": [_comparison_json(c) for c in comparisons]}


def processor(device: str) -> str:
    """What computes, in words."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{cpu_model()}, {counted(cores(), 'core')}"


def plot(comparisons: Sequence[Comparison], path: Path, *, subtitle: str) -> None:
    """A panel a workload, a bar a contender: the median turn, and a line from the slowest to the quickest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(comparisons))
    rows = -(-len(comparisons) // columns)
    most = max(len(comparison.contenders) for comparison in comparisons)
    size = (5.2 * columns + 1.4, (0.34 * most + 1.5) * rows + 0.8)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, comparison in zip(grid.flat, comparisons, strict=False):
        _panel(axes, comparison)
    for axes in grid.flat[len(comparisons) :]:
        axes.set_visible(False)
    figure.suptitle(f"Training in simulation, higher is better\n{subtitle}", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Any, comparison: Comparison) -> None:
    records = [record for record in comparison.contenders if record.rate is not None][::-1]
    values = [record.rate or 0.0 for record in records]
    errors = [
        [value - min(record.rates) for value, record in zip(values, records, strict=True)],
        [max(record.rates) - value for value, record in zip(values, records, strict=True)],
    ]
    colours = [COLOURS[record.contender.family] for record in records]
    axes.barh(range(len(records)), values, color=colours, xerr=errors, error_kw={"elinewidth": 1, "ecolor": "#333333"})
    axes.set_yticks(range(len(records)), [record.contender.label for record in records], fontsize=9)
    widest = max((max(record.rates) for record in records), default=1.0)
    for place, (value, record) in enumerate(zip(values, records, strict=True)):
        compared = times(record, comparison.plain)
        text = f"{value:,.0f}" + (f"  ({compared:.2f} x)" if compared else "")
        axes.text(max(record.rates) + 0.02 * widest, place, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.4 * widest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    ceiling = comparison.ceiling
    limit = f"; matrix products alone: {ceiling:,.0f}" if ceiling else ""
    axes.set_xlabel(f"samples/s (times the plain loop){limit}", fontsize=9)
    workload = comparison.workload
    clients = f"{workload.clients:,} clients x {workload.samples:,}"
    shape = f"{clients}, {workload.cohort} a round, batch {workload.batch_size}"
    training = f"{workload.epochs} ep., {workload.optimizer}"
    axes.set_title(f"{workload.name} {workload.network}\n{shape}, {training}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    peer = comparison.best_peer
    return {
        "workload": asdict(comparison.workload),
        "flop_per_sample": comparison.flop_per_sample,
        "ceiling_gflop_s": comparison.gflop_s,
        "ceiling_samples_per_s": comparison.ceiling,
        "first_accuracy": comparison.first_accuracy,
        "best_peer": peer.contender.label if peer else None,
        "contenders": [
            {
                "label": record.contender.label,
                "family": record.contender.family,
                "versions": record.versions,
                "rate": record.rate,
                "unit": "GFLOP/s" if record.contender.family == "ceiling" else "samples/s",
                "rates": record.rates,
                "rounds": record.rounds,
                **_ratios(record, comparison),
                "accuracy": record.accuracy,
                "failure": record.failure,
            }
            for record in comparison.records
        ],
    }


def _ratios(record: Record, comparison: Comparison) -> dict[str, float | None]:
    if record.contender.family == "ceiling":
        return {}
    return {
        "times_plain": times(record, comparison.plain),
        "times_best_peer": times(record, comparison.best_peer),
        "share_of_ceiling": share_of(record, comparison.ceiling),
    }
