"""What each method's ledger claims for one round, beside what an audit of its code measures.

    python -m benchmarks.audit_methods [--trials 300] [--canaries 2000] [--seed 0] [--methods A,B] [--json F]
    python -m benchmarks.audit_methods --show docs/figures/audit.json

All methods run on the digits' network with the same privacy section, as `hushfleet audit`
runs a task file. The noise is chosen so that one round costs an epsilon of 1 to 3: with some hundred trials more
cannot be told apart, whatever a mechanism does. Prints the table of docs/privacy.md; exit code 1 where a claim is
violated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hushfleet.config.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec
from hushfleet.methods import METHODS
from hushfleet.models import get_model
from hushfleet.simulator.studies.audit.finding import Finding
from hushfleet.simulator.studies.audit.games import Effort, findings
from hushfleet.simulator.studies.audit.show import shown
from hushfleet.simulator.studies.audit.subject import Subject

NETWORK, CLASSES, DEVICES, ROUNDS = "digits-cnn", 10, 8, 10
DELTA = 1e-3
CLIP_NORM = 0.5
DEVICE_NOISE = 1.5
RECORD = {"noise_multiplier": 0.8, "sample_rate": 0.1, "batches": 10}
TRAINING = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 16}


def subject_of(method: str, *, unit: str, accounting: str, seed: int) -> Subject:
    """The task package, without the graphs that an audit does not need."""
    model = get_model(NETWORK, classes=CLASSES)
    graph = BlobRef(bytes(32), 1)
    noise = RECORD if unit == "record" else {"noise_multiplier": DEVICE_NOISE}
    split = DEVICES if accounting == "as-published" else 1
    spec = TaskSpec(
        task="audit-00000000",
        rounds=ROUNDS,
        method=method,
        method_config=TRAINING,
        privacy=PrivacySpec(
            unit=unit, accounting=accounting, clip_norm=CLIP_NORM, delta=DELTA, noise_split=split, **noise
        ),
        wire=WireSpec(),
        model=ModelSpec(
            name=model.name,
            layout=model.layout,
            input_shape=model.input_shape,
            class_names=tuple(str(number) for number in range(CLASSES)),
            mean=(0.0,) * model.input_shape[0],
            std=(1.0,) * model.input_shape[0],
            dropout=(),
            gradient=graph,
            inference=graph,
        ),
        memory_mib=1,
    )
    return Subject(spec, model.init(seed), DEVICES, seed)


def audited(method: str, *, trials: int, canaries: int, seed: int) -> Iterator[tuple[str, Finding]]:
    """The findings of a method, each with the name of its column."""
    for accounting in ("strict", "as-published"):
        subject = subject_of(method, unit="device", accounting=accounting, seed=seed)
        for finding in findings(subject, Effort(trials)):
            alone = accounting == "as-published" and finding.adversary.endswith("alone")
            yield f"device, {accounting}" + (", noised values alone" if alone else ""), finding
    subject = subject_of(method, unit="record", accounting="strict", seed=seed)
    yield "record, strict", next(findings(subject, Effort(canaries)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300, help="rounds in each world, unit device")
    parser.add_argument("--canaries", type=int, default=2000, help="canaries in each world, unit record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, metavar="F", help="print the table of an earlier run's JSON")
    options = parser.parse_args(arguments)
    if options.show is not None:
        print(table(json.loads(options.show.read_text("utf-8"))))
        return 0
    began = time.monotonic()
    figures: dict[str, Any] = {
        "network": NETWORK,
        "delta": DELTA,
        "trials": options.trials,
        "canaries": options.canaries,
        "seed": options.seed,
        "noise": {"device": DEVICE_NOISE, "devices": DEVICES, "record": RECORD},
        "methods": {},
    }
    for name in options.methods.split(","):
        found = audited(name, trials=options.trials, canaries=options.canaries, seed=options.seed)
        figures["methods"][name] = {column: finding.to_dict() for column, finding in found}
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", "utf-8")
    print(table(figures))
    violated = [
        f"{name}, {column}"
        for name, columns in figures["methods"].items()
        for column, finding in columns.items()
        if finding["verdict"] == "VIOLATED"
    ]
    if violated:
        print(f"VIOLATED: {'; '.join(violated)}", file=sys.stderr)
    return 1 if violated else 0


def table(figures: dict[str, Any]) -> str:
    """For docs/privacy.md: of each game epsilon of one round as claimed, and as measured at least."""
    columns = ("device, strict", "device, as-published", "record, strict")
    lines = [
        "| method | " + " | ".join(f"{column}: claimed | measured" for column in columns) + " |",
        "|---|" + "---|" * 2 * len(columns),
    ]
    for name, found in figures["methods"].items():
        cells = []
        for column in columns:
            finding = found[column]
            if finding["claimed_round"] is None:
                cells += ["infinite", shown(finding["measured_round"])]
            else:
                cells += [shown(finding["claimed_round"]), shown(finding["measured_round_of_form"])]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
