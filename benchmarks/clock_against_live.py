"""Compares the virtual clock with the live engine: the same small fleet on emulated boards, predicted and measured.

    python -m benchmarks.clock_against_live [--rounds 5] [--json FILE]

The live side is a real broker, a real aggregator and a real client process for each device, each as slow as its board
and behind its board's link. Both sides use the same profiles, so this checks the clock's model of the protocol and the
cost of the work, not the profiles: no board was measured. The live side runs in real time, so the machine's load before
it is recorded.

The network is `mnist-cnn` (582,026 parameters) on random images. Small networks are not useful here: on an emulated
slow board each step is followed by a wait many times as long. Then the caches are cold, the next step takes a
millisecond of CPU time more, and the emulation multiplies it. A real board does not wait between its steps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in each live process

from benchmarks.common import Figures, console, make_parser, table, write
from benchmarks.device import write_images
from benchmarks.processes import ROOT
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.simulator.boards import parse_mix
from hushfleet.simulator.engines.clock.rounds import fleet_clock
from hushfleet.simulator.engines.live.emulation import machine_speed
from hushfleet.simulator.engines.live.engine import LiveFleet
from hushfleet.simulator.run_folder import begin

IMAGES = 720
MIX = """
[[board]]
profile = "raspberry-pi-zero-2-w"
count = 2
network = { up_mbit_s = 4, down_mbit_s = 20, latency_ms = 60 }
[[board]]
profile = "raspberry-pi-4-4gb"
count = 2
[[board]]
profile = "jetson-orin-nano"
count = 2
"""
DEVICES = 6
WITHIN = 0.25


def compare(folder: Path, *, rounds: int, epochs: int, settings: Sequence[str]) -> Figures:
    """Runs both sides; returns the seconds and the number of updates of their rounds."""
    data = write_images(folder / "images", (1, 28, 28), classes=10, samples=IMAGES) | {"devices": DEVICES}
    given = (
        'model.name="mnist-cnn"',
        *(f"data.{key}={json.dumps(value)}" for key, value in data.items()),
        f"round.rounds={rounds}",
        f"method.local_epochs={epochs}",
        "method.batch_size=32",
        "round.deadline_s=300",
    )
    task = load_task(ROOT / "tasks" / "digits-fedglp-adp.toml", (*given, *settings))
    mix = parse_mix(MIX, devices=DEVICES, seed=task.seed)
    simulation = begin(task, folder / "run", data_dir=None, mix=mix)
    outcomes = fleet_clock(simulation, mix).rounds()
    predicted = [{"wall_s": outcome.wall_s, "updates": len(outcome.arrivals)} for outcome in outcomes]
    load_before = os.getloadavg()[0]
    boards = {device.name: mix[device.index].board for device in simulation.fleet.devices}
    fleet = LiveFleet(simulation, emulate=True, boards=boards)
    with fleet.running():
        fleet.wait()
    events = [event for event in iterate_events(simulation.folder.events) if event["event"] == "round_close"]
    measured = [{"wall_s": event["wall_s"], "updates": event["participants"]} for event in events]
    return {
        "machine_speed": machine_speed(),
        "load_before": load_before,
        "predicted": predicted,
        "measured": measured,
        "ratio": median(each["wall_s"] for each in predicted) / median(each["wall_s"] for each in measured),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3, help="local epochs")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hushfleet-clock-") as folder:
        figures = compare(Path(folder), rounds=options.rounds, epochs=options.epochs, settings=options.settings)
    rows = [
        {"round": number, "predicted s": one["wall_s"], "measured s": other["wall_s"]}
        for number, (one, other) in enumerate(zip(figures["predicted"], figures["measured"], strict=True), 1)
    ]
    table(f"machine at {figures['machine_speed']:.2f} of generic-x86 a core, load {figures['load_before']:.1f}", rows)
    good = abs(figures["ratio"] - 1) <= WITHIN
    console.print(f"median: {figures['ratio']:.2f} of the measured; goal 0.75 to 1.25: {'met' if good else 'MISSED'}")
    write(options, figures)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
