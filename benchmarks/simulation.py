"""The fast engine beside a plain PyTorch loop, pfl, Flower and the machine's own limit, in one run.

    python -m benchmarks.simulation [--quick] [--data-dir DIR] [--peers-python PYTHON] [--check] [--plot FILE.png]

Measured are samples trained on a second over whole rounds of DP-FedAvg with local clipping and noise: selection,
training, clipping, noising, coding, aggregation; no accuracy tests. All contenders are alive at the same time, each
in a fresh interpreter of its own, and take turns, so that whatever else the machine does hits all alike; the first
round of each is left out, and the median of the turns is shown. Times of one run compare with each other only.

pfl and Flower pin versions of their own: `pip install 'hushfleet[peers]'` into a separate environment, without
constraints.txt, and name its interpreter with --peers-python. What is not installed is listed as such.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.status import Status

from benchmarks.contenders.job import Job
from benchmarks.contenders.ours import AUTO
from benchmarks.versus.contest import check, measure
from benchmarks.versus.data import Data, write_job
from benchmarks.versus.field import FAMILIES, Contender, Field
from benchmarks.versus.report import Comparison, notes, plot, processor, table, to_json
from benchmarks.versus.workloads import NOISE_MULTIPLIER, WORKLOADS, Workload
from hushfleet.simulator.engines.fast.runtimes import ON_DEVICES, RUNTIMES

QUICK_SHRINK = 10
QUICK_TURNS = 3
TURNS = 5
OURS = (*RUNTIMES, AUTO)
SHOWN_SETTINGS = ("contenders", "ours", "device", "turns", "shrink", "check", "plain_malloc")


def main(arguments: Sequence[str] | None = None) -> None:
    args = _arguments(arguments)
    console = Console()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no CUDA device here; run the same command on a machine with one")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = args.out or Path(scratch)
        data = Data(args.data_dir, folder)
        field = Field(
            families=args.contenders,
            ours=args.ours,
            peers_python=args.peers_python,
            data_dir=data.data_dir,
            device=args.device,
            plain_malloc=args.plain_malloc,
        )
        subtitle = f"{processor(args.device)}; {data.text}"
        allocator = "as it is" if args.plain_malloc else "keeps freed memory"
        console.print(f"{subtitle}\nallocator, alike for all: {allocator}", highlight=False)
        comparisons = []
        for name in args.workloads:
            workload = WORKLOADS[name].shrunk(args.shrink)
            with console.status(name) as status:
                comparison = _compare(workload, field.contenders(workload.network), data, folder, args, status)
            comparisons.append(comparison)
            console.print(table(comparison))
            console.print(*notes(comparison), sep="\n", end="\n\n", highlight=False, markup=False)
            # After each workload, so that an interrupted run leaves what it has.
            _write(comparisons, args, subtitle)
    if not torch.cuda.is_available():
        command = "python -m benchmarks.simulation --device cuda --ours vmap,onnx"
        console.print(f"No GPU here; on a machine with one: {command}", highlight=False, soft_wrap=True)


def _compare(
    workload: Workload,
    contenders: list[Contender],
    data: Data,
    folder: Path,
    args: argparse.Namespace,
    status: Status,
) -> Comparison:
    def job_of(part: str, noise_multiplier: float) -> Job:
        place = folder / workload.name / part
        shutil.rmtree(place, ignore_errors=True)
        status.update(f"{workload.name}: data")
        return write_job(workload, data, place, noise_multiplier=noise_multiplier, device=args.device)

    def on_step(label: str, what: str) -> None:
        status.update(f"{workload.name}: {label} {what}")

    job = job_of("speed", NOISE_MULTIPLIER)
    records = measure(job, contenders, turns=args.turns, turn_rounds=workload.turn, on_step=on_step)
    first = None
    if args.check:
        silent = job_of("check", 0.0)
        first = check(silent, records, rounds=workload.check_rounds, on_step=on_step)
    return Comparison(workload, tuple(records), first)


def _write(comparisons: list[Comparison], args: argparse.Namespace, subtitle: str) -> None:
    if args.json:
        # Without paths, so that the file can be published.
        settings = {name: value for name, value in vars(args).items() if name in SHOWN_SETTINGS} | {"about": subtitle}
        args.json.write_text(json.dumps(to_json(comparisons, settings), indent=1))
    if args.plot:
        plot(comparisons, args.plot, subtitle=subtitle)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=_words(WORKLOADS), default=tuple(WORKLOADS), metavar="W1,W2,...")
    parser.add_argument("--contenders", type=_words(FAMILIES), default=FAMILIES, metavar="ours,plain,...")
    parser.add_argument("--ours", type=_words(OURS), default=(ON_DEVICES, AUTO), help="runtimes of the fast engine")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/ and cifar10/; without it, upscaled digits")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has pfl and Flower")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, help=f"measured turns of each (default {TURNS})")
    parser.add_argument("--shrink", type=int, help="divide each client's samples by this")
    parser.add_argument("--quick", action="store_true", help=f"--shrink {QUICK_SHRINK} --turns {QUICK_TURNS}")
    parser.add_argument("--check", action="store_true", help="also show that each contender learns")
    parser.add_argument(
        "--plain-malloc", action="store_true", help="leave the allocator as it is (our engine sets its own)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="write a bar chart to this .png")
    parser.add_argument("--out", type=Path, help="keep data, logs and run folders here")
    args = parser.parse_args(arguments)
    args.turns = args.turns or (QUICK_TURNS if args.quick else TURNS)
    args.shrink = args.shrink or (QUICK_SHRINK if args.quick else 1)
    return args


def _words(known: Sequence[str] | dict[str, Workload]) -> object:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"there is no {word!r}; choose among {', '.join(known)}")
        return words

    return parse


if __name__ == "__main__":
    # As Ctrl-C does: contexts are left, and so the contenders end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    main()
