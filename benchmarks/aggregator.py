"""Compares the aggregator's path from bytes to sums with a memory copy, a plain loop and Flower's averaging.

    python -m benchmarks.aggregator [--quick] [--peers-python PYTHON] [--json FILE]

Each cell is a new process with its own memory, for one part of the path and one cohort size. In it, bursts of work of
about 50 ms and copies of 64 MB alternate, so that other load on the machine affects both equally: ratios are medians
over these pairs. A cell stops after --box-s seconds and reports how many updates it took until then; a cohort of
--flat-model is taken completely, which shows how memory grows. Work of devices (training, noise, encoding) is not
counted.

The plain loop adds the float32 values of received bytes to a running sum and checks nothing. Flower's path is the work
of its server on received `Parameters`; it holds a whole cohort in memory, and cohorts above --most-gib are not run. It
needs `pip install flwr numpy` in a separate environment, given by --peers-python.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.bursts import copy_gb_s, growth, in_turns
from benchmarks.common import Figures, console, make_parser, table, write
from benchmarks.device import write_images
from benchmarks.processes import figures_of
from benchmarks.updates import IDENTITY, train_update
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.ingest.checked_update import CheckedUpdate
from hushfleet.aggregator.ingest.decoding import decode
from hushfleet.aggregator.ingest.exact_sum import ExactSum
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.config.spec import WireSpec
from hushfleet.models import get_model, model_names
from hushfleet.wire.format.update import read_header

COHORTS = (10, 100, 1_000, 10_000)
CODECS = ("float32", "quantized", "one-bit", "float16")
FLOWER = "Flower, float32"
ROWS = {
    "add, float32": ("add", "float32"),
    **{f"decode and add, {codec}": ("decode and add", codec) for codec in CODECS},
    "accept with store, quantized": ("accept", "quantized"),
    "accept with store, float32": ("accept", "float32"),
    "plain loop, float32": ("plain loop", "float32"),
    FLOWER: ("flower", "float32"),
}
"""Label: the part of the path, the codec."""
MOST_IN_A_PLAN = 2000  # approximate number of devices that a round plan can name; larger fleets take turns
DISTINCT = 16  # updates that take turns: for a network of a million parameters, more than the caches hold
CELL_TIMEOUT_S = 300


TimedWork = Callable[[int, int], float]
"""Arguments: first update and number of updates. Takes these updates and returns the measured seconds."""


class RenamedUpdates:
    """The updates that devices send: one real update with its values shifted, with each device's name.

    :param folder: folder for the federation of two devices that makes the update.
    """

    def __init__(self, model_name: str, codec: str, folder: Path) -> None:
        model = get_model(model_name)
        data = write_images(folder / "images", model.input_shape, classes=model.classes, samples=2 * model.classes)
        task = {
            "name": "benchmark",
            "model": {"name": model_name},
            "method": {"name": "dp-fedavg"},
            "privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "accounting": "strict"},
            "data": {**data, "devices": 2, "test_fraction": 0.0, "min_samples": 2},
            "round": {"rounds": 1},
            "wire": {"codec": "float32"},
        }
        simulation, self._update = train_update(parse_task(task), folder / "run", data_dir=None)
        self.wire = WireSpec(codec=codec)  # type: ignore[arg-type]
        self.prepared = replace(simulation.prepared, spec=replace(simulation.prepared.spec, wire=self.wire))
        self.counts, self.size = self._update.counts, self._update.size

    def values(self, index: int) -> np.ndarray:
        return np.roll(self._update.values, index % DISTINCT)

    def blob(self, index: int) -> bytes:
        return replace(self._update, values=self.values(index)).encoded(self.wire, device=f"device-{index}").data


def timed(take: Callable[[int], object]) -> TimedWork:
    def work(first: int, count: int) -> float:
        began = time.perf_counter()
        for index in range(first, first + count):
            take(index % DISTINCT)
        return time.perf_counter() - began

    return work


def decoder_of(updates: RenamedUpdates) -> Callable[[int], CheckedUpdate]:
    blobs = [updates.blob(index) for index in range(DISTINCT)]
    shared = np.ones(sum(updates.counts), bool)

    def decoded(index: int) -> CheckedUpdate:
        update = CheckedUpdate(f"device-{index}", blobs[index], counts=tuple(updates.counts))
        update.header, update.shared = read_header(update.data), shared
        decode(update)
        return update

    return decoded


def acceptance_of(updates: RenamedUpdates, cohort: int, store: AggregatorStore) -> TimedWork:
    with store.transaction():
        for index in range(cohort):
            store.add_device(f"device-{index}", public_key=IDENTITY.public_key, board="benchmark")
    engine = RoundEngine(store, updates.prepared)
    engine.open_round([f"device-{index}" for index in range(cohort)])

    def work(first: int, count: int) -> float:
        taken_s = 0.0
        for index in range(first, first + count):
            data = updates.blob(index)  # not measured: it is the device's work
            began = time.perf_counter()
            verdict = engine.accept(f"device-{index}", data)
            taken_s += time.perf_counter() - began
            if verdict.code != "accepted":
                raise SystemExit(f"{verdict.code}: {verdict.reason}")
        return taken_s

    return work


def measure_cell(work: str, model: str, codec: str, cohort: int, box_s: float) -> Figures:
    """Measures a cell in this process; memory counts from `growth` on."""
    torch.set_num_threads(1)
    figures: Figures = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        updates = RenamedUpdates(model, codec, folder)
        sums, plain, rates = ExactSum(updates.size), np.zeros(updates.size), list[float]()
        values = [updates.values(index) for index in range(DISTINCT)]
        if work == "add":
            run = timed(lambda index: sums.add(values[index]))
        elif work == "plain loop":
            bodies = [each.tobytes() for each in values]
            run = timed(lambda index: np.add(plain, np.frombuffer(bodies[index], np.float32), out=plain))
        elif work == "decode and add":
            decoded = decoder_of(updates)
            alone = timed(decoded)
            whole = timed(lambda index: sums.add((one := decoded(index)).values, largest=max(one.peaks)))

            def run(first: int, count: int) -> float:
                rates.append(count / alone(first, count))
                return whole(first, count)

        else:
            run = acceptance_of(updates, cohort, stack.enter_context(AggregatorStore(folder / "store")))
        copy = copy_gb_s()
        with growth(figures):
            found = in_turns(run, copy, updates=cohort, value_bytes=4 * updates.size, box_s=box_s)
    if rates:  # rates of the decoder alone, measured in turns with the whole work
        figures["of_decoder"] = found["updates_per_s"] / float(np.median(rates))
    return found | figures


def run_cell(label: str, model: str, cohort: int, box_s: float, options: argparse.Namespace) -> Figures:
    """Returns the figures of one cell from a new process, or the reason why there are none."""
    work, codec = ROWS[label]
    if label == FLOWER:
        layers = [layer.size for layer in get_model(model).layout.layers]
        needed_gib = 3 * 4 * sum(layers) * cohort / 2**30  # as received, as arrays, and times the weights
        if needed_gib > options.most_gib:
            return {"missing": f"would hold {needed_gib:.0f} GiB"}
        job = {"layers": layers, "cohort": cohort, "box_s": min(box_s, options.box_s)}
        command = [options.peers_python, "-m", "benchmarks.frameworks.flower_average", json.dumps(job)]
    else:
        job = {"work": work, "model": model, "codec": codec, "cohort": cohort, "box_s": box_s}
        command = [sys.executable, "-m", "benchmarks.aggregator", "--cell", json.dumps(job)]
    return figures_of(command, timeout_s=CELL_TIMEOUT_S)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=model_names(), default="fashion-mnist-cnn")
    parser.add_argument("--flat-model", choices=model_names(), default="digits-cnn", help="for whole cohorts")
    parser.add_argument("--cohorts", type=lambda text: tuple(map(int, text.split(","))), default=COHORTS)
    parser.add_argument("--box-s", type=float, default=2.0, help="seconds of measuring in each cell, at most")
    parser.add_argument("--most-gib", type=float, default=4.0, help="memory that Flower may take")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has flwr")
    parser.add_argument("--quick", action="store_true", help="cohorts of 10 and 100, half a second a cell")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        print(json.dumps(measure_cell(**options.cell)))
        return
    if options.quick:
        options.cohorts, options.box_s = (10, 100), 0.5
    flat_rows = [label for label, (_, codec) in ROWS.items() if codec == "quantized"]
    plans = [(options.model, label, cohort, options.box_s) for cohort in options.cohorts for label in ROWS]
    plans += [(options.flat_model, label, max(options.cohorts), float(CELL_TIMEOUT_S)) for label in flat_rows]
    cells: list[Figures] = []
    for model, label, cohort, box_s in plans:
        taken = min(cohort, MOST_IN_A_PLAN) if ROWS[label][0] == "accept" else cohort
        cells.append({"model": model, "row": label, "cohort": taken, **run_cell(label, model, taken, box_s, options)})
        console.print(cells[-1])
    peers = {cell["cohort"]: cell.get("of_copy") for cell in cells if cell["row"] == FLOWER}
    shown = ("model", "row", "cohort", "updates", "updates_per_s", "float32_gb_s", "of_copy", "of_decoder", "grown_mib")
    rows = []
    for cell in cells:
        peer = peers.get(cell["cohort"])
        # each relative to its own memory copy, because the machine's load was not the same for both
        times = cell["of_copy"] / peer if peer and "of_copy" in cell else ""
        rows.append({key: cell.get(key, "") for key in shown} | {"x Flower": times, "missing": cell.get("missing", "")})
    table("Aggregation: float32 bytes a second, of a memory copy and of the decoder alone", rows)
    write(options, {"cells": cells, "box_s": options.box_s})


if __name__ == "__main__":
    main()
