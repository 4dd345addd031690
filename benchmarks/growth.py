"""Measures whether a round of the fast engine takes the same processor time however many rounds were before it.

    python -m benchmarks.growth [--rounds 1000] [--devices 20]

It prints milliseconds of processor time per client, in rounds 3 to 22 and in the last 20 rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.models.native import unavailable
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.runtimes import NATIVE, ON_DEVICES
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin

FEW = 20


def measured(rounds: int, devices: int) -> list[float]:
    """Returns the processor time of each round, in milliseconds per client; nothing is tested."""
    plain = {
        "name": "growth",
        "model": {"name": "digits-cnn"},
        "method": {"name": "dp-fedavg", "local_epochs": 1},
        "privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0},
        "data": {"name": "digits", "devices": devices, "limit": 10 * devices, "min_samples": 2},
        "round": {"rounds": rounds},
    }
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        simulation = begin(parse_task(plain), Path(folder) / "run", data_dir=None)
        simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
        with Workers(1) as workers, EventLog(simulation.folder.events) as events:
            run_rounds(
                simulation,
                workers,
                events,
                runtime=NATIVE if unavailable() is None else ON_DEVICES,
                evaluate_every=rounds + 1,
                evaluate_last=0,
                on_closed=lambda round: times.append(1000 * time.process_time() / devices),
            )
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    """Prints the two figures and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000, help="number of rounds (1000)")
    parser.add_argument("--devices", type=int, default=20, help="number of devices; all take part in each round (20)")
    given = parser.parse_args()
    each = measured(given.rounds, given.devices)
    first, last = median(each[2 : 2 + FEW]), median(each[-FEW:])
    print(f"rounds 3 to {2 + FEW}: {first:.2f} ms of processor time a client")
    print(f"rounds {given.rounds - FEW + 1} to {given.rounds}: {last:.2f} ms; {last / first:.2f} times as much")


if __name__ == "__main__":
    main()
