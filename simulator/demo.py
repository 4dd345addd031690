"""`hushfleet demo`: the main job in one command, on real images, with a report worth looking at."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hushfleet.aggregator.config.task import load_task
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.cli import BrokerName, again_command, open_simulation, run_and_show
from hushfleet.simulator.run import RunOptions

BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-5-8gb", "jetson-orin-nano")
SWEEP = (0.0, 0.1, 0.35, 1.5)


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/demo-TIME.")] = None,
        short: Annotated[bool, typer.Option("--short", help="3 rounds and no sweep: a smoke test.")] = False,
        broker: Annotated[BrokerName, typer.Option(help="auto: Mosquitto if installed, else amqtt.")] = BrokerName.auto,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    ) -> None:  # fmt: skip
        """Run a fleet of 8 devices on this machine: broker, aggregator, clients, real images, a report.

        Eight client processes with the profiles of three boards train FedGLP-ADP on scanned digits over MQTT. The
        report says by how much federating beat each device alone, and what privacy it had.

        Example:  hushfleet demo --out runs/demo
        """
        console = Console()
        task = load_task(Path(str(files("hushfleet.simulator") / "demo.toml")), ("round.rounds=3",) if short else ())
        mix = FleetMix.in_turn(BOARDS, task.data.devices)
        folder = out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        with console.status("exporting and checking the model's graphs"):
            simulation = open_simulation(task, folder, data_dir=None, mix=mix, resume=resume)
        options = RunOptions(engine="live", broker=broker.value, sweep=() if short else SWEEP)
        run_and_show(simulation, options, console, again=again_command(folder, out=out, resume=resume))
