"""The virtual clock beside the live engine: the same small fleet on emulated boards, predicted and waited for.

    python -m benchmarks.clock_against_live [--rounds 6] [--json FILE] [--plot FILE.png]

The live side is a real broker, a real aggregator and a real client process for each device, each as slow as its board
and behind its board's link. Both sides use the same profiles, so this checks the clock's model of the protocol and
the cost of the work, not the profiles: no board was measured. The live side waits for real, so the machine's load is
printed with it.

The task: handwritten digits (scikit-learn's, enlarged to 28 x 28) and the 582,026-parameter network. Small networks
say little here: on an emulated slow board each step is followed by a wait many times as long, the next one finds its
caches cold and takes a millisecond of CPU time more than it does in a row, and the emulation multiplies that. A real
board does not wait between its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as every live process has

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.outputs import COLOURS, add_outputs, write_outputs
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.observe.events import read_events
from hushfleet.simulator.boards import FleetMix, parse_mix
from hushfleet.simulator.engines.clock.rounds import fleet_clock
from hushfleet.simulator.engines.live.emulation import machine_speed
from hushfleet.simulator.engines.live.engine import LiveFleet
from hushfleet.simulator.run_folder import begin

TASK = Path(__file__).parent.parent / "tasks" / "digits-fedglp-adp.toml"
CLASSES = tuple("0123456789")
TRAIN_IMAGES, TEST_IMAGES = 720, 100
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
_WITHIN = 0.25


def compare(folder: Path, *, rounds: int, epochs: int, settings: list[str]) -> dict[str, Any]:
    """Runs both sides; their rounds' seconds, and what became of them."""
    _write_images(folder / "images")
    given = (
        'model.name="mnist-cnn"',
        'data.name="folder"',
        f"data.path={json.dumps(str(folder / 'images'))}",
        f"data.class_names={json.dumps(CLASSES)}",
        "data.input_shape=[1, 28, 28]",
        f"data.devices={DEVICES}",
        f"round.rounds={rounds}",
        f"method.local_epochs={epochs}",
        "method.batch_size=32",
        "round.deadline_s=300",
    )
    task = load_task(TASK, (*given, *settings))
    mix = parse_mix(MIX, devices=DEVICES, seed=task.seed)
    simulation = begin(task, folder / "run", data_dir=None, mix=mix)
    predicted = [
        {"wall_s": outcome.wall_s, "updates": len(outcome.arrivals)}
        for outcome in fleet_clock(simulation, mix).rounds()
    ]
    boards = {device.name: mix[device.index].board for device in simulation.fleet.devices}
    load_before = os.getloadavg()[0]
    began = time.monotonic()
    fleet = LiveFleet(simulation, emulate=True, boards=boards)
    with fleet.running():
        fleet.wait()
    events, _ = read_events(simulation.folder.events)
    measured = [
        {"wall_s": event["wall_s"], "updates": event["participants"]}
        for event in events
        if event["event"] == "round_close"
    ]
    return {
        "boards": _shares(mix),
        "machine_speed": machine_speed(),
        "load_before": load_before,
        "live_s": time.monotonic() - began,
        "predicted": predicted,
        "measured": measured,
        "ratio": median(each["wall_s"] for each in predicted) / median(each["wall_s"] for each in measured),
    }


def _write_images(folder: Path) -> None:
    """A class folder for each digit, below `train` and `test`."""
    digits = load_digits()
    for index in range(TRAIN_IMAGES + TEST_IMAGES):
        part = folder / ("train" if index < TRAIN_IMAGES else "test") / str(digits.target[index])
        part.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[index] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((28, 28)).save(part / f"{index}.png")


def _shares(mix: FleetMix) -> dict[str, int]:
    return {label: mix.dealt.count(number) for number, label in enumerate(mix.labels)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3, help="local epochs")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    add_outputs(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hushfleet-clock-") as folder:
        result = compare(Path(folder), rounds=options.rounds, epochs=options.epochs, settings=options.settings)
    print("boards    " + ", ".join(f"{count} {board}" for board, count in result["boards"].items()))
    print(f"machine   {result['machine_speed']:.2f} of generic-x86 a core, load {result['load_before']:.1f} before")
    print("round     predicted   measured   predicted / measured   updates predicted, measured")
    for number, (one, other) in enumerate(zip(result["predicted"], result["measured"], strict=True), 1):
        print(
            f"{number:5}    {one['wall_s']:8.2f} s {other['wall_s']:8.2f} s {one['wall_s'] / other['wall_s']:14.2f}"
            f"{one['updates']:24}, {other['updates']}"
        )
    good = abs(result["ratio"] - 1) <= _WITHIN
    print(f"median    {result['ratio']:.2f} of the measured round; goal 0.75 to 1.25: {'met' if good else 'NOT met'}")
    title = "A round on the virtual clock and on emulated boards"
    write_outputs(options, result, title=title, draw=lambda figure: draw(figure, result))
    return 0 if good else 1


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Two bars a round."""
    axes = figure.subplots()
    for side, shift, colour in (("predicted", -0.2, "ours"), ("measured", 0.2, "other")):
        seconds = [each["wall_s"] for each in result[side]]
        places = [number + shift for number in range(1, len(seconds) + 1)]
        axes.bar(places, seconds, width=0.4, color=COLOURS[colour], label=side)
    axes.set_xlabel(f"round; the median one is predicted at {result['ratio']:.2f} of the measured")
    axes.set_ylabel("seconds")
    axes.set_xticks(range(1, len(result["measured"]) + 1))
    axes.legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main())
