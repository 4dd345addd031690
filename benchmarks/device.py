"""Compares a board's work without PyTorch to PyTorch on the same CPU: steps, rounds, memory.

    python -m benchmarks.device [--models fashion-mnist-cnn,...] [--methods all] [--runtimes native,torch] [--quick]

Everything runs on one thread. A step is drawing the batch, gradient, the method's own part and the optimizer, by the
loop of a board, on ONNX Runtime and on other runtimes. It is compared with a plain PyTorch loop with its own Adam, and
no method. A round is the real client's round without its broker: training, clipping, noise from the secure source,
encoding, signature, and commits that are synced to the disk. Times are CPU times, because load on the machine makes all
others longer. All sides run in several turns, and the fastest turn counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.board import DEVICE
from benchmarks.common import Figures, make_parser, names_option, table, write
from benchmarks.processes import ReadyProcess
from hushfleet.aggregator.config.task import parse_task
from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.methods import METHODS
from hushfleet.models import get_model, model_names
from hushfleet.models.features.pretrained import TORCHVISION
from hushfleet.simulator.run_folder import begin

MODELS = ("digits-cnn", "mnist-cnn", "fashion-mnist-cnn", "svhn-cnn", "cifar10-cnn", "emnist-cnn")
FEATURES = {
    "filters-8": ("filters", (1, 8, 8)),
    "scattering-28": ("scattering", (1, 28, 28)),
    "scattering-32-colour": ("scattering", (3, 32, 32)),
    **{f"mobilenet-{side}": ("torchvision:mobilenet_v3_small", (3, side, side)) for side in (96, 128, 160, 224)},
}
SHOWN_METHODS = ("dp-fedavg", "fedglp-adp", "perfreezeclip", "acdp-pfsd")
OURS, PLAIN = "ours", "plain PyTorch"

CONFIG = f"""\
[device]
id = "{DEVICE}"
state_dir = "state"
board = "raspberry-pi-4-4gb"
[broker]
url = "mqtt://localhost"
[data]
kind = "arrays"
path = "devices/{DEVICE}/train.npz"
[limits]
epsilon_server = inf
accounting = "as-published"
"""


def write_images(folder: Path, shape: Sequence[int], *, classes: int, samples: int) -> Figures:
    """Writes random images into a folder for each class; returns the keys of `[data]` for them."""
    rng = np.random.default_rng(0)
    for part, count in (("train", samples), ("test", classes)):
        for index in range(count):
            place = folder / part / f"class-{index % classes}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(np.squeeze(np.moveaxis(pixels, 0, -1))).save(place / f"{index}.png")
    names = [f"class-{index}" for index in range(classes)]
    return {"name": "folder", "path": str(folder), "class_names": names, "input_shape": list(shape)}


def random_weights(name: str, folder: Path) -> Path:
    """Writes a file of torchvision's network with random weights: neither time nor memory depends on the values."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pth"
    torch.manual_seed(0)
    torch.save(import_torchvision().models.get_model(name).state_dict(), path)
    return path


def write_task(folder: Path, model_name: str, method: str, *, batch: int, samples: int) -> Path:
    """Writes a run folder with one device, which trains for two epochs per round.

    :param model_name: name of a network, or a key of `FEATURES`.
    """
    network: dict[str, str] = {"name": model_name}
    if model_name in FEATURES:
        kind, shape = FEATURES[model_name]
        network, classes = {"name": "linear", "features": kind}, 10
        if kind.startswith(TORCHVISION):
            network["weights"] = str(random_weights(kind.removeprefix(TORCHVISION), folder))
    else:
        model = get_model(model_name)
        shape, classes = model.input_shape, model.classes
    data = write_images(folder / "images", shape, classes=classes, samples=samples)
    noised = {"accounting": "as-published", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-5}
    task = parse_task(
        {
            "name": f"board-{model_name}",
            "model": network,
            "method": {"name": method, "batch_size": batch, "local_epochs": 2},
            "privacy": {"noise_multiplier": 0.0} if method == "fedavg" else noised,
            "data": {**data, "devices": 1, "test_fraction": 0.0, "min_samples": 2},
            "round": {"rounds": 1000},
        }
    )
    run = folder / "run"
    simulation = begin(task, run, data_dir=None)
    np.save(run / "initial.npy", simulation.prepared.initial)
    (run / "device.toml").write_text(CONFIG)
    return run


def measure_model(name: str, methods: Sequence[str], runtimes: Sequence[str], folder: Path, **work: int) -> Figures:
    """Measures all sides of each method in turns, with all processes running; the fastest turn counts."""
    turns = work.pop("turns")
    by_method: dict[str, Figures] = {}
    for method in methods:
        run = write_task(folder / name / method, name, method, **work)
        with ExitStack() as stack:
            sides = {PLAIN: stack.enter_context(ReadyProcess("-m", "benchmarks.board", "plain", str(run), name))}
            for label, runtime in {OURS: "onnx", **{f"ours on {each}": each for each in runtimes}}.items():
                sides[label] = stack.enter_context(ReadyProcess("-m", "benchmarks.board", "client", str(run), runtime))
            ours, plain = sides[OURS], sides[PLAIN]
            rounds: dict[str, list[Figures]] = {side: [] for side in sides}
            trained_mib = 0.0
            for turn in range(1 + turns):  # the first has no state yet
                for side, child in sides.items():
                    answer = child.ask("round")
                    if turn:
                        rounds[side].append(answer)
                trained_mib = trained_mib or ours.ask("peak")["mib"]
            best = {side: min(each, key=lambda answer: answer["cpu_ms"]) for side, each in rounds.items()}
            steps = {side: min((a["step"] for a in each), key=lambda a: a["cpu_ms"]) for side, each in rounds.items()}
            by_method[method] = {
                "processes": measure_processes(run),
                "start": {"start_s": ours.start_s, **ours.ready},
                "step": steps,
                "round": best[OURS],
                "trained_peak_mib": trained_mib,
                "round_peak_mib": ours.ask("peak")["mib"],
            }
            torch = {"round": best[PLAIN], "peak_mib": plain.ask("peak")["mib"], "import_mib": plain.ready["mib"]}
    return {"model": name, "parameters": get_model(name).layout.size, PLAIN: torch, "methods": by_method}


def measure_processes(run: Path) -> Figures:
    """Measures guardian and worker in processes of their own: what a start costs, and both peaks over three rounds."""
    with ReadyProcess("-m", "benchmarks.guardian", str(run)) as guardian:
        first, kept, last = (guardian.ask("round") for _ in range(3))
    round_ms = last["worker_cpu_ms"] - kept["worker_cpu_ms"]
    return {
        "idle_mib": guardian.ready["mib"],
        "guardian_mib": last["guardian_mib"],
        "first_mib": first["worker_mib"],
        "worker_mib": last["worker_mib"],
        "start_ms": first["worker_cpu_ms"] - round_ms,
        "round_ms": round_ms,
    }


def measure_features(name: str, folder: Path, **work: int) -> Figures:
    """Measures a linear head on features: time per image, a client's memory in rounds, and then for its personalized
    head."""
    run = write_task(folder / name, name, "dp-fedavg", batch=work["batch"], samples=work["samples"])
    with ReadyProcess("-m", "benchmarks.board", "client", str(run), "onnx") as ours:
        read = ours.ask("read")
        made_mib = ours.ask("peak")["mib"]
        rounds = [ours.ask("round")["cpu_ms"] for _ in range(2)]
        peak = ours.ask("peak")["mib"]
        personalized_head_ms = ours.ask("own_head")["cpu_ms"]
        chosen_mib = ours.ask("peak")["mib"]
    processes = measure_processes(run)
    return {
        "features": name,
        "image_ms": read["cpu_ms"] / read["images"],
        "round_ms": min(rounds),
        "own_head_ms": personalized_head_ms,
        "ready_mib": ours.ready["mib"],
        "features_peak_mib": made_mib,
        "round_peak_mib": peak,
        "own_head_peak_mib": chosen_mib,
        "guardian_peak_mib": processes["guardian_mib"],
        "worker_peak_mib": processes["worker_mib"],
    }


def show(figures: Figures) -> None:
    steps, rounds, memory, processes = [], [], [], []
    for model in figures["models"]:
        torch = model[PLAIN]
        for method, case in model["methods"].items():
            place = {"case": f"{model['model']}, {method}"}
            ms = {side: step["cpu_ms"] for side, step in case["step"].items()}
            ratios = {f"of {side}": ms[OURS] / spent for side, spent in ms.items() if side != OURS}
            steps.append({**place, **ms, **ratios})
            rounds.append({**place, OURS: case["round"]["cpu_ms"], PLAIN: torch["round"]["cpu_ms"]})
            own = {"ready": case["start"]["mib"], "trained": case["trained_peak_mib"]}
            own["after rounds"] = case["round_peak_mib"]
            processes.append({**place, **case["processes"]})
            memory.append({**place, **own, PLAIN: torch["peak_mib"], "its imports": torch["import_mib"]})
    table("A step of local training, CPU ms on one thread", steps)
    table("A whole round, CPU ms", rounds)
    table("Peak memory of one process, MiB resident", memory)
    table("Guardian and worker: MiB resident (idle, and peaks), CPU ms of a worker's start and of its round", processes)
    table("A linear head on features: CPU ms an image and a round, peak MiB resident", figures["features"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=names_option(model_names()), default=MODELS, metavar="A,B")
    parser.add_argument("--features", type=names_option(FEATURES), default=tuple(FEATURES), metavar="A,B")
    parser.add_argument("--methods", type=names_option(METHODS), default=SHOWN_METHODS, metavar="A,B", help="or all")
    parser.add_argument("--runtimes", type=names_option(("native", "torch")), default=("torch",), help="beside onnx")
    parser.add_argument("--batch", type=int, default=16, help="samples a step (default %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of the device; trained on twice a round")
    parser.add_argument("--turns", type=int, default=3, help="of which the quickest counts (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one turn")
    options = parser.parse_args(arguments)
    work = {"batch": options.batch, "samples": options.samples, "turns": 1 if options.quick else options.turns}
    with tempfile.TemporaryDirectory(prefix="hushfleet-board-") as folder:
        models = [
            measure_model(name, options.methods, options.runtimes, Path(folder), **work) for name in options.models
        ]
        features = [measure_features(name, Path(folder), **work) for name in options.features]
    figures = {**work, "models": models, "features": features}
    show(figures)
    write(options, figures)


if __name__ == "__main__":
    main()
