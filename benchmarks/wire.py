"""What an update costs on the wire: bytes beside the alternatives and the entropy, speed, and accuracy.

    python -m benchmarks.wire [--data-dir DIR] [--part sizes,speed,accuracy] [--seeds 3] [--quick] [--json F] [--plot F]

sizes     Real updates of each compact network, of the first round and of the last, from small federations by the
          product's own trainer: DP-FedAvg, FedGLP-ADP (which keeps parameters back by masks) and FedAvg (no noise).
          Bits a parameter of the coded values against the empirical entropy of the quantised values, layer by layer;
          bytes of whole signed updates against Eq. (20) of the FedGLP-ADP paper, float32, float16, zlib, zstd, JSON
          and QSGD with 8 bits.
speed     Whole updates coded and decoded on one core, in turns with a memory copy and the others; peak memory.
accuracy  The same noisy federation with each codec over several seeds. Noise is the same for all codecs at one seed.

zstd is measured where the module `zstandard` can be imported, and listed as missing elsewhere. Without --data-dir all
images are the digits of scikit-learn, upscaled.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from benchmarks.coding import pictures, tables
from benchmarks.coding.accuracy import CASES, CHOICES, accuracy_against_bytes
from benchmarks.coding.sizes import bits_against_entropy, payloads
from benchmarks.coding.speed import speeds
from benchmarks.coding.updates import METHODS, NETWORKS, Update, find_images, task_of, train_updates
from benchmarks.machine import memory_copy_gb_s
from benchmarks.outputs import add_outputs, write_outputs
from hushfleet.config.spec import WireSpec

PARTS = ("sizes", "speed", "accuracy")
SPEED_NETWORK = "fashion-mnist-cnn"
ROUNDS, DEVICES, SAMPLES = 6, 3, 160


def main(arguments: Sequence[str] | None = None) -> None:
    options = _arguments(arguments)
    console = Console()
    figures: dict[str, Any] = {"default_step": WireSpec().step, "quick": options.quick}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = Path(scratch)
        for part in options.part:
            began = time.monotonic()
            figures[part] = _PART_OF[part](options, folder / part, console)
            figures[f"{part}_s"] = time.monotonic() - began
            console.print(f"{part}: {figures[f'{part}_s']:.0f} s", style="bright_black", highlight=False)
    write_outputs(
        options, figures, title="Updates on the wire", draw=lambda canvas: pictures.draw(canvas, figures), size=(13, 10)
    )


def _sizes(options: argparse.Namespace, folder: Path, console: Console) -> list[dict[str, Any]]:
    rows = []
    for network in options.networks:
        for method in METHODS:
            with console.status(f"{network}, {method}"):
                words, updates = _updates(options, network, method, folder / network / method)
                for update in updates:
                    rows.append(
                        {
                            "network": network,
                            "images": words,
                            "method": method,
                            "round": update.round,
                            "parameters": update.size,
                            "values": update.values.size,
                            "bits": list(bits_against_entropy(update)),
                            # JSON takes seconds, and its size hardly depends on the update
                            "payloads": payloads(update, json=update is updates[0]),
                        }
                    )
    console.print(*tables.entropy(rows), tables.payload(rows), sep="\n")
    for line in tables.goals(rows):
        console.print(line, highlight=False)
    return rows


def _speed(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    network = SPEED_NETWORK if SPEED_NETWORK in options.networks else options.networks[-1]
    with console.status(f"speed on an update of {network}"):
        _, updates = _updates(options, network, "dp-fedavg", folder, rounds=1)
        rows = speeds(updates[0], turns=3 if options.quick else 15)
        copy_mb_s = 1e3 * memory_copy_gb_s(turns=3)
    console.print(tables.speed(rows, network=network, values=updates[0].values.size))
    console.print(tables.speed_goal(rows), highlight=False)
    return {
        "network": network,
        "values": updates[0].values.size,
        "memory_copy_mb_s": copy_mb_s,
        "rows": rows,
    }


def _accuracy(options: argparse.Namespace, folder: Path, console: Console) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(CASES):
        if case.network not in options.networks:
            continue
        with console.status(f"accuracy of {case.name}") as status:
            result = accuracy_against_bytes(
                replace(case, rounds=2, samples=400) if options.quick else case,
                folder / str(number),
                data_dir=options.data_dir,
                seeds=range(options.seeds),
                choices=options.choices,
                processes=options.processes,
                told=status.update,
            )
        results.append(result)
        console.print(tables.accuracy(result))
    return results


_PART_OF = {"sizes": _sizes, "speed": _speed, "accuracy": _accuracy}


def _updates(
    options: argparse.Namespace, network: str, method: str, folder: Path, *, rounds: int | None = None
) -> tuple[str, list[Update]]:
    """What the images are, and the updates of the first and of the last round."""
    folder.mkdir(parents=True, exist_ok=True)
    images = find_images(network, options.data_dir, folder)
    rounds = rounds or (2 if options.quick else ROUNDS)
    samples = 40 if options.quick else SAMPLES
    task = task_of(network, images, method, rounds=rounds, devices=DEVICES, samples=samples)
    updates = train_updates(task, images, folder / "run", at=(1, rounds))
    return images.words or images.name, updates


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=_names(PARTS), default=PARTS, metavar="PART,...", help=",".join(PARTS))
    parser.add_argument(
        "--networks", type=_names(tuple(NETWORKS)), default=tuple(NETWORKS), metavar="NAME,...", help="default: all"
    )
    parser.add_argument("--choices", type=_choices, default=CHOICES, metavar="S,CODEC,...", help="codecs of `accuracy`")
    parser.add_argument("--seeds", type=int, default=3, help="of the part `accuracy` (default %(default)s)")
    parser.add_argument("--processes", type=int, default=0, help="of the part `accuracy` (default: one a core)")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument("--quick", action="store_true", help="two rounds, few samples: shows that it runs")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds: at least 1")
    return options


def _names(known: tuple[str, ...]) -> Any:
    def parsed(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parsed


def _choices(text: str) -> tuple[str, ...]:
    return (CHOICES[0], *(name for name in text.split(",") if name != CHOICES[0]))


if __name__ == "__main__":
    main()
