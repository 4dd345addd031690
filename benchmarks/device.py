"""A board's work, torch-free, beside PyTorch on the same CPU: steps, rounds, memory, start, installed size.

    python -m benchmarks.device [--models fashion-mnist-cnn,...] [--methods all] [--quick]

All on one thread. A step is drawing the batch, gradient, the method's own part and the optimizer, by the loop that a
board runs: on ONNX Runtime, and the same loop with PyTorch's gradients; beside both a plain PyTorch loop with its own
Adam, and no method. A round is the real client's (`hushfleet-edge`) with its broker cut off: training, clipping,
noise from the secure source, coding, signature, and commits that are synced to the disk. Times are CPU times, since a
busy machine stretches all others; of some turns, in which all sides take part, the quickest counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from benchmarks.board.installed import edge_mib, torch_mib
from benchmarks.board.measure import measure_model
from benchmarks.board.report import Figures, draw, goals, show
from benchmarks.board.starting import measure_imports
from benchmarks.outputs import add_outputs, write_outputs
from hushfleet.methods import METHODS
from hushfleet.models import model_names

MODELS = ("digits-cnn", "mnist-cnn", "fashion-mnist-cnn", "svhn-cnn", "cifar10-cnn", "emnist-cnn")
_WIDTH = 160  # columns of the widest table
TELLING = ("dp-fedavg", "fedglp-adp", "perfreezeclip", "acdp-pfsd")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_names(model_names()), default=MODELS, metavar="A,B")
    parser.add_argument("--methods", type=_names(METHODS), default=TELLING, metavar="A,B", help="or all")
    parser.add_argument("--batch", type=int, default=16, help="samples a step (default %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of the device; trained on twice a round")
    parser.add_argument("--turns", type=int, default=3, help="of which the quickest counts (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one turn")
    add_outputs(parser)
    options = parser.parse_args(words)
    turns = 1 if options.quick else options.turns
    console = Console(width=max(Console().width, _WIDTH))
    work = {"batch": options.batch, "samples": options.samples, "turns": turns}
    with tempfile.TemporaryDirectory(prefix="hushfleet-board-") as folder, console.status("...") as status:
        status.update("imports")
        starting = measure_imports(turns=turns)
        models = [
            measure_model(name, options.methods, Path(folder), say=status.update, **work) for name in options.models
        ]
    figures: Figures = {
        **work,
        "models": models,
        "starting": starting,
        "installed_mib": {"edge": edge_mib(), "torch": torch_mib()},
    }
    figures["goals"] = [{**goal._asdict(), "met": goal.met} for goal in goals(figures)]
    show(figures, console)
    rows = sum(len(model["methods"]) for model in models)
    write_outputs(
        options,
        figures,
        title="A board's work beside PyTorch's",
        draw=lambda canvas: draw(figures, canvas),
        size=(14.0, 2.5 + 0.4 * rows),
    )


def _names(known: Sequence[str]) -> object:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(known) if text == "all" else tuple(text.split(","))
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose among {', '.join(known)}, or all")
        return names

    return parse


if __name__ == "__main__":
    main()
