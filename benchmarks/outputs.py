"""What every benchmark leaves behind: its figures as JSON with the machine they were measured on, and a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine

COLOURS = {"ours": "#1b7f5c", "limit": "#333333", "other": "#8a8a8a", "second": "#c8782a", "third": "#4a6fb5"}


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them into this file")


def write_outputs(
    options: argparse.Namespace,
    figures: dict[str, Any],
    *,
    title: str,
    draw: Callable[[Any], None],
    size: tuple[float, float] = (9.0, 4.5),
) -> None:
    """:param figures: everything that was measured, without paths of this machine.
    :param draw: draws into the matplotlib figure that it is given.
    """
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
    if options.plot is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        figure.suptitle(f"{title}\n{described()}", fontsize=11)
        figure.savefig(options.plot, dpi=130)
        pyplot.close(figure)
