"""Hundreds of real devices on one broker and one aggregator, on this machine: is anything lost, and what does it cost?

    python -m benchmarks.fleet [--quick] [--devices 500] [--rounds 5] [--tls] [--kill broker,aggregator] [--plot F.png]

Mosquitto, with the configuration that Hushfleet generates, and `hushfleet aggregator` with its durable store are the
real ones, each a process. The devices are real, too: `Agent` with its store, trainer and MQTT link, a
thread each in a few processes (`benchmarks/crowd/generator.py` says what differs from boards). Each trains on a few
handwritten digits. All of them are in each round's cohort, and a round closes when all were accepted.

Then the files of all sides are read, and every promise is checked, last of all that the fast engine comes to the same
global models, bit by bit. The exit status is 0 only if nothing was lost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from benchmarks.crowd.audit import Finding, audit, compare_with_fast, is_whole
from benchmarks.crowd.charts import draw
from benchmarks.crowd.figures import Figures, figures_of
from benchmarks.crowd.run import KILL_AT, Live, Progress, run_live
from benchmarks.crowd.tables import print_findings, print_tables
from benchmarks.machine import cores
from benchmarks.outputs import add_outputs, write_outputs
from benchmarks.versus.data import write_digits
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.errors import HushfleetError
from hushfleet.simulator.run_folder import Simulation, begin

TASK = Path(__file__).parent.parent / "tasks" / "digits-fedglp-adp.toml"
MODELS = ("digits-cnn", "mnist-cnn")
DEVICES, ROUNDS = 500, 5
QUICK_DEVICES, QUICK_ROUNDS = 50, 2
LEAST_SAMPLES = 2  # 1,437 digits to train on are 2 for each of 700 devices


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="hushfleet-crowd-") as scratch:
        folder = options.out or Path(scratch)
        try:
            simulation = _simulation(options, folder)
            live = _live(simulation, options, console)
            with console.status("reading all stores"):
                findings = audit(simulation, refusals_are_fine=bool(options.kill))
            if not options.no_fast:
                with console.status("the same rounds by the fast engine"):
                    findings.append(compare_with_fast(simulation, folder / "fast"))
            print_findings(findings, console)
            if not is_whole(findings):
                return 1
            figures = figures_of(simulation, live)
        except HushfleetError as error:
            console.print(f"error: {error}", style="red", highlight=False)
            return error.exit_code
    print_tables(figures, console)
    _write(options, simulation, live, figures, findings)
    return 0 if all(finding.kept for finding in findings) else 1


def task_of(*, model: str, devices: int, rounds: int) -> Task:
    """The example task with everybody in each round, and as little data as a device can have."""
    settings = (
        f'name="fleet-{model}"',
        f'model.name="{model}"',
        f'data.name="{"digits" if model == "digits-cnn" else "mnist"}"',
        f"data.devices={devices}",
        'data.partition="iid"',
        f"data.min_samples={LEAST_SAMPLES}",
        "data.test_fraction=0",
        f"privacy.delta={1 / devices}",
        f"round.rounds={rounds}",
    )
    return load_task(TASK, settings)


def _simulation(options: argparse.Namespace, folder: Path) -> Simulation:
    task = task_of(model=options.model, devices=options.devices, rounds=options.rounds)
    if options.model == "digits-cnn":
        return begin(task, folder / "live", data_dir=None)
    write_digits(folder / "data", "mnist", LEAST_SAMPLES * options.devices)
    return begin(task, folder / "live", data_dir=folder / "data")


def _live(simulation: Simulation, options: argparse.Namespace, console: Console) -> Live:
    began = time.monotonic()
    with console.status("starting") as status:

        def show(at: Progress) -> None:
            status.update(
                f"{min(at.present, options.devices):,} of {options.devices:,} devices present, round {at.round} of "
                f"{options.rounds}: {at.accepted:,} updates, {time.monotonic() - began:.0f} s"
            )

        return run_live(
            simulation,
            generators=options.generators,
            tls=options.tls,
            kill=options.kill,
            kill_round=min(2, options.rounds),
            show=show,
        )


def _write(
    options: argparse.Namespace, simulation: Simulation, live: Live, figures: Figures, findings: list[Finding]
) -> None:
    write_outputs(
        options,
        {
            "model": options.model,
            "parameters": simulation.prepared.spec.model.layout.size,
            "generators": options.generators,
            "tls": options.tls,
            "killed": [name for name, _ in live.killed],
            **figures.to_json(),
            "findings": [vars(finding) for finding in findings],
        },
        title=f"{options.devices:,} devices on one broker and one aggregator, {options.model}",
        draw=lambda figure: draw(figure, figures),
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, help=f"default {DEVICES}")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DEVICES} devices, {QUICK_ROUNDS} rounds")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--generators", type=int, help="generator processes (default: one a core, 2 or more)")
    parser.add_argument(
        "--kill", type=_victims, default=(), metavar="broker,aggregator", help="kill -9 these in the middle of a round"
    )
    parser.add_argument("--tls", action="store_true", help="mutual TLS, a certificate for each device")
    parser.add_argument("--no-fast", action="store_true", help="do not compare with the fast engine")
    parser.add_argument("--out", type=Path, help="keep the run's folders here")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    options.devices = options.devices or (QUICK_DEVICES if options.quick else DEVICES)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.generators = min(options.generators or max(2, cores()), options.devices)
    return options


def _victims(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(KILL_AT):
        raise argparse.ArgumentTypeError(f"{text!r}: choose among {', '.join(KILL_AT)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
