"""Provides options, a description of the machine, tables and JSON for all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
console = Console(highlight=False, width=160)


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser


def names_option(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns an option's type: names separated by commas, or `all`."""
    names = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        words = names if text == "all" else tuple(text.split(","))
        if unknown := sorted(set(words) - set(names)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose among {', '.join(names)}, or all")
        return words

    return parse


def write(options: argparse.Namespace, figures: Figures) -> None:
    """Writes the figures and the machine on which they were measured; they must not contain its file paths."""
    figures.setdefault("machine", machine())
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def table(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Prints a table: a column for each key, numbers right-aligned."""
    rows = list(rows)
    console.print(title, style="bold")
    shown = Table(box=None, padding=(0, 1))
    for name in dict.fromkeys(key for row in rows for key in row):
        text = all(isinstance(row.get(name, ""), str) for row in rows) and name == next(iter(rows[0]))
        shown.add_column(name, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(_format_value(row.get(str(column.header), "")) for column in shown.columns))
    console.print(shown)


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:,}" if type(value) is int else "-" if value is None else str(value)


def machine() -> Figures:
    """Returns a description: figures of different machines, or of a busy machine, are not comparable."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"
