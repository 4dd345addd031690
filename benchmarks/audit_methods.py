"""Compares the epsilon that each method's ledger claims for its costliest round with the one that an audit measures.

    python -m benchmarks.audit_methods [--trials 300] [--canaries 2000] [--seed 0] [--methods A,B] [--json F]

All methods run on the digits' network with the same privacy section. The noise is chosen so that one round costs an
epsilon of 1 to 3: some hundred trials cannot measure more, for any mechanism. Prints the figures of docs/privacy.md;
exit code 1 if a claim is violated.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Figures, console, make_parser, names_option, table, write
from benchmarks.processes import ROOT, environment
from hushfleet.methods import METHODS
from hushfleet.methods.heads import HeadFirstConfig

DEVICES, DELTA = 8, 1e-3
DEVICE_NOISE = 1.5
RECORD = {"noise_multiplier": 0.8, "sample_rate": 0.1}
BATCHES = 10
"""Batches of a round at record level. Methods that train in whole epochs use two epochs, twice as many batches."""
COMMAND = (sys.executable, "-c", "from hushfleet.aggregator.commands.main import main; main()", "audit")
COLUMNS = ("device, strict", "device, as-published", "record, strict")


def audited(method: str, *, trials: int, canaries: int, seed: int) -> dict[str, Figures]:
    """Returns the findings of a method, by the name of the column."""
    found: dict[str, Figures] = {}
    for column in COLUMNS:
        unit, accounting = column.split(", ")
        noise = RECORD if unit == "record" else {"noise_multiplier": 0.0 if method == "fedavg" else DEVICE_NOISE}
        length = _length(method) if unit == "record" else {}
        training = {"name": method, "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 16, **length}
        privacy = {"unit": unit, "accounting": accounting, "clip_norm": 0.5, "delta": DELTA, **noise}
        task = {
            "name": "audit",
            "seed": seed,
            "model": {"name": "digits-cnn"},
            "method": training,
            "privacy": privacy,
            "data": {"name": "digits", "devices": DEVICES},
            "round": {"rounds": 10},
        }
        count = canaries if unit == "record" else trials
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "task.json"
            path.write_text(json.dumps(task))
            options = ("--trials", str(count), "--seed", str(seed), "--no-one-run", "--seconds", "3600", "--json")
            command = [*COMMAND, str(path), *options]
            done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
        if not done.stdout:
            raise SystemExit(f"{method}, {column}: {done.stderr[-2000:]}")
        findings = json.loads(done.stdout)["findings"]
        for finding in findings if unit == "device" else findings[:1]:
            alone = accounting == "as-published" and finding["adversary"].endswith("alone")
            found[column + (", noised values alone" if alone else "")] = finding
    return found


def _length(method: str) -> dict[str, int]:
    """Returns the training length of a device at record level: an epoch is 1 / `sample_rate` batches."""
    return {"local_epochs": 2} if issubclass(METHODS[method].config, HeadFirstConfig) else {"local_steps": BATCHES}


def show(figures: Figures) -> None:
    rows = []
    for name, found in figures["methods"].items():
        row = {"method": name}
        for column in COLUMNS:
            claimed = found[column]["claimed_round"]
            measured = found[column]["measured_round" if claimed is None else "measured_round_of_form"]
            row[column] = " / ".join(f"{math.inf if each is None else each:.3g}" for each in (claimed, measured))
        rows.append(row)
    table("Epsilon of one round: claimed / measured at least", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=300, help="rounds in each world, unit device")
    parser.add_argument("--canaries", type=int, default=2000, help="canaries in each world, unit record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", type=names_option(METHODS), default=tuple(METHODS))
    options = parser.parse_args(arguments)
    effort = {"trials": options.trials, "canaries": options.canaries, "seed": options.seed}
    noise = {"device": DEVICE_NOISE, "devices": DEVICES, "record": {**RECORD, "batches": BATCHES}}
    figures: Figures = {"network": "digits-cnn", "delta": DELTA, **effort, "noise": noise, "methods": {}}
    for name in options.methods:
        figures["methods"][name] = audited(name, **effort)
        write(options, figures)  # after each method, so that an interrupted run keeps its results
    show(figures)
    violated = [
        f"{name}, {column}"
        for name, columns in figures["methods"].items()
        for column, finding in columns.items()
        if finding["verdict"] == "VIOLATED"
    ]
    if violated:
        console.print(f"VIOLATED: {'; '.join(violated)}")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
