"""`hushfleet simulate`: a fleet on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.broker import BrokerKind
from hushfleet.simulator.options import Engine, RunOptions, Runtime

# What several commands take.
Out = Annotated[Path | None, typer.Option(help="Run folder; default: runs/NAME-TIME.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
BrokerOption = Annotated[BrokerKind, typer.Option("--broker", help="auto: Mosquitto if it is installed, else amqtt.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data set's files are; default: download.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any key, e.g. privacy.epsilon=8.")
]
MethodFile = Annotated[str, typer.Option("--method", metavar="FILE.py:NAME", help="A method from a file, instead of method.name.")]  # fmt: skip
Devices = Annotated[int | None, typer.Option(min=1, help="Instead of data.devices.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Instead of round.rounds.")]


def register(app: typer.Typer) -> None:
    @app.command()
    def simulate(
        task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="What to run; see `tasks/`.")],
        engine: Annotated[Engine, typer.Option(help="fast: no network. live: real broker and processes. ray: fast, on a Ray cluster.")] = "fast",
        devices: Devices = None,
        rounds: Rounds = None,
        seed: Annotated[int | None, typer.Option(min=0, help="Instead of the task's seed.")] = None,
        data_dir: DataDir = None,
        out: Out = None,
        settings: Settings = None,
        resume: Resume = False,
        broker: BrokerOption = "auto",
        boards: Annotated[str | None, typer.Option(metavar="A,B,...|MIX.toml", help="Board profiles, dealt to the devices in turn, or a file of shares. With fast, rounds run on a virtual clock: the time, stragglers and energy of that fleet.")] = None,
        emulate: Annotated[bool, typer.Option("--emulate", help="Live engine: each device has its board's speed, memory and network.")] = False,
        own_processes: Annotated[int, typer.Option(min=0, help="Live engine: so many devices have a process of their own, the others share one for each core; 0: all have their own.")] = 0,
        workers: Annotated[int, typer.Option(min=0, help="Processes of the fast engine, or jobs at a time on Ray; 0: one a core.")] = 0,
        ray_address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of a Ray cluster's head, or 'auto'; default: a Ray on this machine.")] = "",
        runtime: Annotated[Runtime, typer.Option(help="Gradients of the fast engine. onnx is what devices run, and ends in the live engine's model; auto: onnx for short runs; for long ones vmap on CUDA, else compiled kernels where the network has them.")] = "auto",
        evaluate_every: Annotated[int, typer.Option(min=1, help="Fast engine: test own models every so many rounds.")] = 1,
        lean: Annotated[bool, typer.Option("--lean", help="Fast engine: leave out what only a field needs. Updates are neither coded nor signed, and bytes are not counted; models are the same, bit for bit.")] = False,
        local_only: Annotated[bool, typer.Option(help="Also train each device alone, for comparison.")] = True,
        seeds: Annotated[int, typer.Option(min=1, help="So many runs in all, with the task's seed and the next ones; shows the mean and the spread.")] = 1,
        sweep: Annotated[str, typer.Option(metavar="S,S,...", help="Repeat the run at these noise multipliers.")] = "",
        sweep_wire: Annotated[str, typer.Option(metavar="S,CODEC,...", help="Repeat the run with these quantisation steps and codecs, e.g. 0.5,1,2,one-bit,float32.")] = "",
        model: Annotated[str, typer.Option(metavar="FILE.py:NAME", help="Your own torch.nn.Module, instead of model.name.")] = "",
        method: MethodFile = "",
    ) -> None:  # fmt: skip
        """Simulate a fleet: the same method, codec, ledger and round as in the field, on this machine.

        Examples:

        `hushfleet simulate tasks/digits-hush.toml`

        `hushfleet simulate tasks/digits-hush.toml --seeds 3` (mean and spread)

        `hushfleet simulate tasks/digits-hush.toml --set privacy.epsilon=8 --engine live --own-processes 8`

        `hushfleet simulate simulator/demo_paper.toml --engine live --emulate --boards raspberry-pi-zero-2-w,jetson-orin-nano`

        After Ctrl-C: `hushfleet simulate tasks/digits-hush.toml --out runs/a --resume`
        """
        from rich.console import Console

        from hushfleet.simulator.boards import read_boards
        from hushfleet.simulator.command import numbers, overridden, run_and_show, wire_choices
        from hushfleet.simulator.run_folder import run_path

        console = Console()
        changed = {"data.devices": devices, "round.rounds": rounds, "seed": seed, "model.name": model or None}
        task = overridden(task_file, settings, changed, method=method)
        folder = run_path(out, task.name)
        options = RunOptions(
            engine=engine,
            broker=broker,
            emulate=emulate,
            own_processes=own_processes,
            clocked=boards is not None and engine != "live",
            workers=workers,
            ray_address=ray_address,
            runtime=runtime,
            evaluate_every=evaluate_every,
            lean=lean,
            local_only=local_only,
            seeds=seeds,
            sweep=numbers(sweep),
            sweep_wire=wire_choices(sweep_wire, task),
        )
        mix = None if boards is None else read_boards(boards, devices=task.data.devices, seed=task.seed)
        run_and_show(task, folder, options, console, data_dir=data_dir, mix=mix, resume=resume)
