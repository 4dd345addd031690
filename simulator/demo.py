"""`hushfleet demo`: the main job in one command, on real images, with a report worth looking at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.cli import BrokerOption, Out, Resume, overridden, run_and_show, run_path
from hushfleet.simulator.run import RunOptions

BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-5-8gb", "jetson-orin-nano")
SWEEP = (0.0, 0.1, 0.35, 1.5)


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        out: Out = None,
        short: Annotated[bool, typer.Option("--short", help="3 rounds and no sweep: a smoke test.")] = False,
        broker: BrokerOption = "auto",
        resume: Resume = False,
    ) -> None:
        """Run a fleet of 8 devices on this machine: broker, aggregator, clients, real images, a report.

        Eight client processes with the profiles of three boards train FedGLP-ADP on scanned digits over MQTT. The
        report says by how much federating beat each device alone, and what privacy it had.

        Example:  hushfleet demo --out runs/demo
        """
        task = overridden(Path(__file__).with_name("demo.toml"), ("round.rounds=3",) if short else ())
        options = RunOptions(engine="live", broker=broker, sweep=() if short else SWEEP)
        mix = FleetMix.in_turn(BOARDS, task.data.devices)
        run_and_show(task, run_path(out, "demo"), options, Console(), mix=mix, resume=resume)
