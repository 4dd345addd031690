"""The aggregator's way from bytes to sums beside a memory copy and beside Flower's averaging, in one run.

    python -m benchmarks.aggregator [--quick] [--peers-python PYTHON] [--json FILE] [--plot FILE.png]

Each cell is a fresh process, whose memory is its own, for one part of the way and one size of cohort. In it, bursts of
work of about 50 ms and copies of 64 MB take turns, so that whatever else the machine does hits both alike: ratios are
medians over these pairs. A cell stops after --box-s seconds and says how many updates it took until then; a cohort of
--flat-model is taken whole, which shows how memory grows. What devices do (training, noise, encoding) is not counted.

Flower's path is what its server does with `Parameters` that have arrived: `parameters_to_ndarrays` on each, and
`aggregate`. It holds a cohort and its products with the weights at once; cohorts above --most-gib are not run. It needs
`pip install flwr numpy` in an environment of its own, named by --peers-python, and is listed as missing elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import cores, described, memory_copy_gb_s
from benchmarks.outputs import COLOURS, add_outputs, write_outputs
from hushfleet.models import get_model, model_names

COHORTS = (10, 100, 1_000, 10_000)
CODECS = ("float32", "quantized", "one-bit", "float16")
HALF, NEARLY = 0.5, 0.8
FLAT_MIB = 16.0
CELL_TIMEOUT_S = 300


@dataclass(frozen=True)
class Row:
    """A line of the table: one part of the way, for one codec."""

    label: str
    work: str
    codec: str
    colour: str


FLOWER = Row("Flower, float32", "flower", "float32", "other")
ROWS = (
    Row("add, float32", "add", "float32", "ours"),
    *(Row(f"decode and add, {codec}", "decode and add", codec, "second") for codec in CODECS),
    Row("worker processes, quantized", "pool", "quantized", "third"),
    Row("accept with store, quantized", "accept", "quantized", "limit"),
    Row("accept with store, float32", "accept", "float32", "limit"),
    FLOWER,
)

MOST_IN_A_PLAN = 2000
"""About how many devices a round plan can name; larger fleets take turns."""

FLAT_ROWS = tuple(row for row in ROWS if row.codec == "quantized")
"""What is shown with whole cohorts of the largest size."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    print(f"{described()}; memory copy {memory_copy_gb_s():.1f} GB/s")
    cells: list[dict[str, Any]] = []
    for model, rows, cohorts, box_s in (
        (options.model, ROWS, options.cohorts, options.box_s),
        (options.flat_model, FLAT_ROWS, sorted({min(options.cohorts), max(options.cohorts)}), CELL_TIMEOUT_S),
    ):
        print(f"\n{model}, {get_model(model).layout.size:,} parameters\n{_HEAD}")
        for cohort in cohorts:
            for row in rows:
                taken = min(cohort, MOST_IN_A_PLAN) if row.work == "accept" else cohort
                cell = {"model": model, "row": row.label, "cohort": taken, **_run(row, model, taken, box_s, options)}
                cells.append(cell)
                print(_line(cell))
    goals = _goals([cell for cell in cells if cell["model"] == options.model])
    goals.append(_flat([cell for cell in cells if cell["model"] == options.flat_model]))
    print("\ngoals")
    for goal in goals:
        print(f"  {'met' if goal['met'] else 'MISSED':7} {goal['text']}")
    figures = {"cells": cells, "goals": goals, "box_s": options.box_s}
    write_outputs(
        options, figures, title="Aggregation", draw=lambda figure: _draw(figure, cells, options), size=(11, 5)
    )


def _run(row: Row, model: str, cohort: int, box_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one cell, or why there are none."""
    layers = [layer.size for layer in get_model(model).layout.layers]
    if row is FLOWER:
        # as received, as arrays, and times the weights
        needed_gib = 3 * 4 * sum(layers) * cohort / 2**30
        if needed_gib > options.most_gib:
            return {"missing": f"would hold {needed_gib:.0f} GiB"}
        interpreter, module = options.peers_python, "benchmarks.contenders.flower_average"
        job: dict[str, Any] = {"layers": layers, "cohort": cohort, "box_s": min(box_s, options.box_s)}
    else:
        interpreter, module = sys.executable, "benchmarks.contenders.aggregation"
        job = {"work": row.work, "model": model, "codec": row.codec, "cohort": cohort, "box_s": box_s}
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [interpreter, "-m", module, json.dumps(job)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=CELL_TIMEOUT_S,
            check=False,
        )
    except OSError:
        return {"missing": "no such interpreter"}
    except subprocess.TimeoutExpired:
        return {"missing": f"no answer after {CELL_TIMEOUT_S} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"missing": "not installed" if "No module named" in last else last}
    return json.loads(done.stdout.splitlines()[-1])


_HEAD = (
    f"{'':34}{'cohort':>7}{'taken':>7}{'updates/s':>11}{'GB/s':>7}{'of copy':>9}{'of decoder':>12}{'memory MiB':>12}"
)


def _line(cell: dict[str, Any]) -> str:
    start = f"{cell['row']:34}{cell['cohort']:7}"
    if "missing" in cell:
        return f"{start}  {cell['missing']}"
    of_decoder = f"{cell['of_decoder']:12.2f}" if "of_decoder" in cell else f"{'':12}"
    return (
        f"{start}{cell['updates']:7}{cell['updates_per_s']:11.1f}{cell['float32_gb_s']:7.2f}"
        f"{cell['of_copy']:9.3f}{of_decoder}{cell['grown_mib']:12.1f}"
    )


def _goals(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each at the largest cohort up to 1,000, where a cell has many bursts."""
    there = [cell for cell in cells if "missing" not in cell]

    def best(label: str) -> dict[str, Any]:
        mine = [cell for cell in there if cell["row"] == label]
        return max(mine, key=lambda cell: (cell["cohort"] <= 1000, cell["cohort"]))

    goals = []
    for label in ("add, float32", "decode and add, float32"):
        share = best(label)["of_copy"]
        goals.append({"text": f"{label}: {share:.2f} of a memory copy, at least {HALF}", "met": share >= HALF})
    for codec in CODECS[1:]:
        share = best(f"decode and add, {codec}")["of_decoder"]
        text = f"decode and add, {codec}: {share:.2f} of the decoder alone, at least {NEARLY}"
        goals.append({"text": text, "met": share >= NEARLY})
    peers = {cell["cohort"]: cell for cell in there if cell["row"] == FLOWER.label}
    if peers:
        peer = peers[max(peers)]
        for label in ("decode and add, float32", "decode and add, quantized", "accept with store, quantized"):
            (ours,) = (cell for cell in there if (cell["row"], cell["cohort"]) == (label, peer["cohort"]))
            # of a copy each, since the machine was not the same for both
            times = ours["of_copy"] / peer["of_copy"]
            text = f"{label}: {times:.2f} times Flower's updates a second, cohort of {peer['cohort']}"
            goals.append({"text": text, "met": times >= 1, "times_flower": times})
    single, pool = best("decode and add, quantized"), best("worker processes, quantized")
    gain = pool["of_copy"] / single["of_copy"]
    start = pool["start_s"] * single["updates_per_s"]
    text = f"{pool['workers']} worker processes on {cores()} cores: {gain:.2f} times one process; {start:.0f} to start"
    return [*goals, {"text": text, "met": gain > 1}]


def _flat(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What the largest cohort takes above the smallest, in each of our ways."""
    ours = [cell for cell in cells if "missing" not in cell and cell["row"] != FLOWER.label]
    by_cohort = {
        row: {c["cohort"]: c["grown_mib"] for c in ours if c["row"] == row} for row in {c["row"] for c in ours}
    }
    most = max(grown[max(grown)] - grown[min(grown)] for grown in by_cohort.values())
    cohorts = sorted({cell["cohort"] for cell in ours})
    text = f"memory of {cohorts[-1]:,} updates: {most:.1f} MiB above that of {cohorts[0]}, at most {FLAT_MIB}"
    return {"text": text, "met": most <= FLAT_MIB}


def _draw(figure: Any, cells: list[dict[str, Any]], options: argparse.Namespace) -> None:
    styles = ("-", "--", ":", "-.")
    speed, memory = figure.subplots(1, 2)
    for row in ROWS:
        mine = [c for c in cells if c["row"] == row.label and c["model"] == options.model and "missing" not in c]
        same = [other.label for other in ROWS if other.colour == row.colour]
        style = {"color": COLOURS[row.colour], "linestyle": styles[same.index(row.label)], "marker": "o"}
        speed.plot([c["cohort"] for c in mine], [c["updates_per_s"] for c in mine], label=row.label, **style)
        memory.plot([c["cohort"] for c in mine], [c["grown_mib"] for c in mine], label=row.label, **style)
    for axes, text in ((speed, "updates a second"), (memory, "memory for the cohort, MiB")):
        axes.set(xscale="log", yscale="log", xlabel=f"updates of a cohort, {options.model}", ylabel=text)
        axes.grid(alpha=0.3)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=model_names(), default="fashion-mnist-cnn")
    parser.add_argument("--flat-model", choices=model_names(), default="digits-cnn", help="for whole cohorts")
    parser.add_argument("--cohorts", type=lambda text: tuple(map(int, text.split(","))), default=COHORTS)
    parser.add_argument("--box-s", type=float, default=2.0, help="seconds of measuring in each cell, at most")
    parser.add_argument("--most-gib", type=float, default=4.0, help="memory that Flower may take")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has flwr")
    parser.add_argument("--quick", action="store_true", help="cohorts of 10 and 100, half a second a cell")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.cohorts, options.box_s = (10, 100), 0.5
    return options


if __name__ == "__main__":
    main()
