"""Compares the fast engine with a plain PyTorch loop, pfl, Flower and BlazeFL, in one run.

    python -m benchmarks.simulation [--quick] [--workloads W1,W2] [--data-dir DIR] [--peers-python PYTHON] [--check]

It measures trained samples per second, and processor time per sample, over whole rounds with local clipping and noise:
selection, training, clipping, noising, aggregation, and on our side rounding; no accuracy tests. All frameworks are
running at the same time, each in a new interpreter, and take turns, so that other load on the machine affects all
equally; the first round of each is left out, and the median of the turns is shown. Ratios are medians over pairs of the
same turn. Processor time is that of a framework with all its processes; on a busy machine it says more than the clock.

W1 to W3 are DP-FedAvg, which all of them have. W4 (Hush) and W5 (FedPer) are measured beside the plain loop alone,
which does the same arithmetic. W6 is secure aggregation, beside Flower's SecAgg+: Flower masks each update, our fast
engine leaves masks out, because they cancel (`benchmarks.secure_fleet` measures boards with all masks).

With --before, the engine of another checkout of this project is measured too; it must have this script.

pfl and Flower pin other versions: run `pip install 'hushfleet[peers]'` in a separate environment, without
constraints.txt, and give its interpreter with --peers-python. BlazeFL needs Python 3.12 or newer: `pip install torch
blazefl` in an environment of that version, and --blazefl-python. Frameworks that cannot run are listed with the reason.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Figures, cores, make_parser, names_option, table, write
from benchmarks.frameworks.ours import task_of
from benchmarks.frameworks.workload import WORKLOADS, TrainingJob, Workload, network_of
from benchmarks.gpu_usage import GpuUsage, mean_or_none
from benchmarks.processes import ROOT, ChildFailed, ReadyProcess
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.data.samples import inputs_of
from hushfleet.data.sets import load
from hushfleet.models import get_model
from hushfleet.simulator.fleet import make_fleet

PEERS = ("pfl", "flower", "blazefl")
"""The other frameworks."""
FAMILIES = ("ours", "plain", *PEERS)
RUNTIMES = ("onnx", "native", "torch", "vmap")
BEFORE = "before"
REFERENCE = "plain loop, 1 process"
QUICK = {"shrink": 10, "turns": 3}
TEST_IMAGES = 1000

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest that every glibc accepts; older ones ignore larger values
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Set for all frameworks, because glibc by default returns large blocks immediately: page faults in each step."""


@dataclass(frozen=True)
class Framework:
    """One way to run the workload: how to start it.

    :param command: arguments of the interpreter.
    :param root: the checkout whose code runs.
    """

    label: str
    family: str
    command: tuple[str, ...]
    python: str = sys.executable
    root: Path = ROOT


def frameworks_of(options: argparse.Namespace, job: TrainingJob, data_dir: Path) -> list[Framework]:
    cpu, folder, found = options.device == "cpu", str(job.folder), []
    counts = sorted({1, cores()}) if cpu else [1]

    def add(label: str, family: str, module: str, *words: object, launcher: Sequence[str] = ()) -> None:
        command = (*launcher, "-m", f"benchmarks.frameworks.{module}", folder, *map(str, words))
        python, root = options.peers_python if family in PEERS else sys.executable, ROOT
        if family == "blazefl":
            python = options.blazefl_python
        if family == BEFORE:
            root = options.before.absolute()
            python = next((str(path) for path in (root / ".venv" / "bin").glob("python")), python)
        found.append(Framework(label, family, command, python, root))

    for family in ("ours", BEFORE):
        for runtime in options.runtimes if family != BEFORE or options.before else ():
            # Also on a GPU: one process trains there, and the processes on the other cores noise and encode.
            run_folder, label = job.folder / f"{family}-{runtime}", f"{family}, {runtime}, {_counted(cores())}"
            add(label, family, "ours", runtime, cores(), run_folder, data_dir)
    for count in counts:
        add(f"plain loop, {_counted(count)}", "plain", "plain_loop", count)
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        add(f"pfl, {_counted(count)}", "pfl", "pfl_simulation", launcher=launcher if count > 1 else ())
    flower = "flower_secagg" if job.workload.secure else "flower_simulation"
    for count in counts if cpu else [1, 2]:
        add(f"Flower, {count} actor{'s' * (count > 1)}", "flower", flower, count)
    for count in counts:
        add(f"BlazeFL, {count} thread{'s' * (count > 1)}", "blazefl", "blazefl_simulation", count)
    unable = {*PEERS} - {*_able(job.workload)}
    return [each for each in found if each.family in {*options.frameworks, BEFORE} - unable]


def _able(workload: Workload) -> tuple[str, ...]:
    """Returns the other frameworks that have the workload's method."""
    if workload.secure:
        return ("flower",)
    return PEERS if workload.method == "dp-fedavg" else ()


def _counted(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def measure(
    job: TrainingJob,
    frameworks: Sequence[Framework],
    *,
    turns: int,
    check: bool,
    keep: Callable[[list[Figures]], None] = lambda rows: None,
) -> list[Figures]:
    """Runs the warm-up round and first turn of each framework, then the other turns, in another order each time.

    A framework that fails is left out from then on.

    :param keep: called with all rows whenever one of them has changed.
    """
    workload = job.workload
    variables = KEEP_FREED_MEMORY | {
        "PFL_PYTORCH_DEVICE": workload.device,
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **({"CUDA_VISIBLE_DEVICES": ""} if workload.device == "cpu" else {}),
    }
    rows: list[Figures] = []
    alive: list[tuple[Figures, ReadyProcess]] = []

    @contextmanager
    def noted(row: Figures) -> Iterator[None]:
        try:
            yield
        except (ChildFailed, OSError) as error:
            row["failure"] = str(error)

    def round_of(row: Figures, child: ReadyProcess) -> Figures:
        answer, expected = child.ask("round"), workload.samples_per_round
        if answer["samples"] != expected:
            raise ChildFailed(f"it trained on {answer['samples']} samples in a round, not on {expected}")
        row["rounds"].append(answer)
        return answer

    with ExitStack() as stack:
        usage = stack.enter_context(GpuUsage()) if workload.device == "cuda" else None
        busy: dict[str, list[float]] = {}
        starting = ThreadPoolExecutor(max(1, len(frameworks)))
        begun = [
            starting.submit(ReadyProcess, *each.command, python=each.python, root=each.root, variables=variables)
            for each in frameworks
        ]
        for each, future in zip(frameworks, begun, strict=True):
            row: Figures = {"label": each.label, "family": each.family, "failure": None}
            row |= {"rates": [], "rounds": [], "processor_us": []}
            rows.append(row)
            with noted(row):
                child = stack.enter_context(future.result())
                row["versions"] = child.ready
                print(f"{each.label}: ready after {child.start_s:.0f} s", file=sys.stderr, flush=True)

        def turn_of(row: Figures, child: ReadyProcess) -> None:
            began, used_s = time.monotonic(), child.processor_s()
            answers = [round_of(row, child) for _ in range(workload.turn)]
            row["rates"].append(_rate(answers))
            row["processor_us"].append(
                (child.processor_s() - used_s) / workload.turn / workload.samples_per_round * 1e6
            )
            if usage is not None:
                busy.setdefault(row["label"], []).extend(usage.between(began, time.monotonic()))
                row["gpu_busy"] = mean_or_none(busy[row["label"]])
            print(f"{row['label']}: {row['rates'][-1]:,.0f} samples/s", file=sys.stderr, flush=True)

        for row, future in zip(rows, begun, strict=True):
            with noted(row):
                warm_up = round_of(row, future.result())
                alive.append((row, future.result()))
                print(f"{row['label']}: warm after {warm_up['seconds']:.0f} s", file=sys.stderr, flush=True)
                turn_of(row, future.result())  # now, so that an interrupted run has a turn of each
            keep(rows)
        for turn in range(1, turns):
            first = turn % max(len(alive), 1)
            for row, child in alive[first:] + alive[:first]:
                if row["failure"] is None:
                    with noted(row):
                        turn_of(row, child)
                    keep(rows)
        for row, child in alive:
            if check and row["failure"] is None:
                with noted(row):
                    model = job.folder / f"{row['label']}.npy"
                    child.ask("save", str(model))
                    row["accuracy"] = accuracy(job, np.load(model))
    return rows


def _rate(answers: Sequence[Figures]) -> float:
    """Returns the samples per second of a turn."""
    return sum(answer["samples"] for answer in answers) / sum(answer["seconds"] for answer in answers)


@torch.no_grad()
def accuracy(job: TrainingJob, params: np.ndarray) -> float:
    """Returns the accuracy of the flat global model on the test images, in 0..1."""
    network = network_of(params, job.workload).eval()
    x, y = (torch.from_numpy(job.array(name)).split(TEST_IMAGES) for name in ("test_x", "test_y"))
    right = [network(images).argmax(1) == labels for images, labels in zip(x, y, strict=True)]
    return torch.cat(right).float().mean().item()


def compared(rows: list[Figures]) -> Figures:
    """Adds medians of the turns, and their ratios to the plain loop and to the best peer, by the clock and by processor
    time."""
    for row in rows:
        row["rate"] = statistics.median(row["rates"]) if row["rates"] and row["failure"] is None else None
    there = {row["label"]: row for row in rows if row["rate"] is not None}
    peers = [row for row in there.values() if row["family"] in PEERS]
    peer = max(peers, key=lambda row: row["rate"], default=None)
    thrifty = min(peers, key=lambda row: statistics.median(row["processor_us"]), default=None)
    for row in there.values():
        row["times_plain"] = times("rates", row, there.get(REFERENCE))
        row["times_best_peer"] = times("rates", row, peer)
        row["times_processor"] = times("processor_us", thrifty, row)
    return {"best_peer": peer["label"] if peer else None, "frameworks": rows}


def times(what: str, row: Figures | None, base: Figures | None) -> float | None:
    """Returns the ratio: the median over the turns, because load in a turn slows both of its sides."""
    if row is None or base is None:
        return None
    pairs = zip(row[what], base[what], strict=False)  # one may be a turn ahead
    ratios = [own / other for own, other in pairs]
    return statistics.median(ratios) if ratios else None


def write_job(workload: Workload, data_dir: Path | None, folder: Path) -> tuple[TrainingJob, Path]:
    """Divides the data among the clients as the product does, and writes it; without `data_dir`, uses digits."""
    if data_dir is None:
        data_dir = write_digits(folder / "digits", workload.clients * workload.samples)
    dataset = load(workload.data, data_dir=data_dir)
    clients = [device.train.samples for device in make_fleet(task_of(workload), dataset).devices]
    test = dataset.test if workload.central else dataset.test.take(slice(0, TEST_IMAGES))
    initial = get_model(workload.network).init(workload.seed)
    if workload.method == "hush":
        features = prepare(task_of(workload), data_dir=data_dir).features
        *clients, test = (inputs_of(each, features) for each in (*clients, test))
        initial = np.zeros(len(dataset.class_names) * (test.x.shape[1] + 1), np.float32)
    job = TrainingJob(folder, workload)
    job.save(
        {
            "x": np.concatenate([client.x for client in clients]),
            "y": np.concatenate([client.y for client in clients]),
            "test_x": test.x,
            "test_y": test.y,
            "initial": initial,
        }
    )
    return job, data_dir


def write_digits(folder: Path, samples: int, *, name: str = "mnist") -> Path:
    """Writes the digits of scikit-learn as IDX files of 28 x 28 pixels, repeated to `samples` for training."""
    digits = load("digits")
    parts = {"train": (digits.train, max(samples, len(digits.train))), "t10k": (digits.test, len(digits.test))}
    (folder / name).mkdir(parents=True, exist_ok=True)
    for prefix, (part, count) in parts.items():
        chosen = np.resize(np.arange(len(part)), count)
        images = np.pad(part.images[:, 0].repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))[chosen]
        write_idx(folder / name, prefix, images, part.labels[chosen])
    return folder


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray) -> None:
    """:param images: uint8 `[n, 28, 28]`."""
    for kind, array in (("images-idx3", images), ("labels-idx1", labels.astype(np.uint8))):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())


def show(comparison: Figures) -> None:
    rows = []
    for row in comparison["frameworks"]:
        if row["rate"] is None:
            rows.append({"framework": row["label"], "samples/s": row["failure"].splitlines()[0][:40]})
        else:
            spread = (max(row["rates"]) - min(row["rates"])) / row["rate"]
            rows.append(
                {
                    "framework": row["label"],
                    "samples/s": f"{row['rate']:,.0f}",
                    "spread": f"{spread:.0%}",
                    "x plain": row["times_plain"],
                    "x best peer": row["times_best_peer"],
                    "CPU us/sample": statistics.median(row["processor_us"]),
                    "x best peer, CPU": row["times_processor"],
                    **({"GPU busy": f"{row['gpu_busy']:.0%}"} if row.get("gpu_busy") is not None else {}),
                    **({"accuracy": row["accuracy"]} if row.get("accuracy") is not None else {}),
                }
            )
    table(comparison["text"], rows)
    failed = [row for row in comparison["frameworks"] if row["failure"]]
    print(*(f"{row['label']}: {row['failure']}" for row in failed), sep="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workloads", type=names_option(WORKLOADS), default=tuple(WORKLOADS), metavar="W1,W2,...")
    parser.add_argument("--frameworks", type=names_option(FAMILIES), default=FAMILIES, metavar="ours,plain,...")
    parser.add_argument("--runtimes", type=names_option(RUNTIMES), default=("onnx", "native"), help="of our engine")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/; without it, upscaled digits")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has pfl and Flower")
    parser.add_argument("--blazefl-python", default=sys.executable, help="interpreter that has BlazeFL")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout of this project, for comparison")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each (default %(default)s)")
    parser.add_argument("--shrink", type=int, default=1, help="divide each client's samples by this")
    parser.add_argument("--quick", action="store_true", help="--shrink 10 --turns 3")
    parser.add_argument("--check", action="store_true", help="no noise; show the accuracy after the turns")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    kept = ("frameworks", "runtimes", "device", "turns", "shrink", "check")
    settings = {name: getattr(options, name) for name in kept}
    settings["images"] = "MNIST" if options.data_dir else "digits, upscaled"
    figures: Figures = {"workloads": [], "settings": settings}
    for name in options.workloads:
        workload = replace(WORKLOADS[name].shrunk(options.shrink), device=options.device)
        workload = replace(workload, noise_multiplier=0.0) if options.check else workload
        comparison: Figures = {"workload": asdict(workload), "text": workload.text}
        figures["workloads"].append(comparison)

        def keep(rows: list[Figures], comparison: Figures = comparison) -> None:
            """Writes the rows so far, so that an interrupted run keeps them."""
            comparison.update(compared(rows))
            write(options, figures)

        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            job, data_dir = write_job(workload, options.data_dir, Path(folder))
            comparison["first_accuracy"] = accuracy(job, job.array("initial"))
            frameworks = frameworks_of(options, job, data_dir)
            keep(measure(job, frameworks, turns=options.turns, check=options.check, keep=keep))
        show(comparison)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # leaves the contexts, so that children end
    main()
