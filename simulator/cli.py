"""`hushfleet simulate`: the fleet on one machine."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from hushfleet.aggregator.broker.process import BrokerKind
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.observe.display import summary_table
from hushfleet.aggregator.planning.advice import worth_it
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.methods import allow_file
from hushfleet.simulator.boards import FleetMix, read_boards
from hushfleet.simulator.run import Engine, RunOptions, run
from hushfleet.simulator.run_folder import Simulation, begin, go_on
from hushfleet.simulator.studies.sweep import with_wire

INTERRUPTED = 130


# What several commands take.
Out = Annotated[Path | None, typer.Option(help="Run folder; default: runs/NAME-TIME.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
BrokerOption = Annotated[BrokerKind, typer.Option("--broker", help="auto: Mosquitto if it is installed, else amqtt.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data set's files are; default: download.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any key, e.g. privacy.epsilon=8.")
]
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
        runtime: Annotated[Literal["auto", "onnx", "native", "torch", "vmap"], typer.Option(help="Gradients of the fast engine. onnx is what devices run, and ends in the live engine's model; auto: onnx for short runs; for long ones vmap on CUDA, else compiled kernels where the network has them.")] = "auto",
        evaluate_every: Annotated[int, typer.Option(min=1, help="Fast engine: test own models every so many rounds.")] = 1,
        local_only: Annotated[bool, typer.Option(help="Also train each device alone, for comparison.")] = True,
        sweep: Annotated[str, typer.Option(metavar="S,S,...", help="Repeat the run at these noise multipliers.")] = "",
        sweep_wire: Annotated[str, typer.Option(metavar="S,CODEC,...", help="Repeat the run with these quantisation steps and codecs, e.g. 0.5,1,2,one-bit,float32.")] = "",
        model: Annotated[str, typer.Option(metavar="FILE.py:NAME", help="Your own torch.nn.Module, instead of model.name.")] = "",
        method: Annotated[str, typer.Option(metavar="FILE.py:NAME", help="A method from a file, instead of method.name.")] = "",
    ) -> None:  # fmt: skip
        """Simulate a fleet: the same method, codec, ledger and round as in the field, on this machine.

        Examples:

        `hushfleet simulate tasks/digits-fedglp-adp.toml --engine live`

        `hushfleet simulate tasks/fashion-mnist-fedglp-adp.toml --rounds 5 --set privacy.epsilon=8`

        `hushfleet simulate tasks/digits-fedglp-adp.toml --engine live --emulate --boards raspberry-pi-zero-2-w,jetson-orin-nano`

        `hushfleet simulate tasks/digits-fedglp-adp.toml --out runs/a --resume` after Ctrl-C
        """
        console = Console()
        if model:
            settings = [*(settings or []), f"model.name={model}"]
        if method:
            settings = [*(settings or []), f"method.name={allow_file(method)}"]
        task = overridden(task_file, settings, {"data.devices": devices, "round.rounds": rounds, "seed": seed})
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
            local_only=local_only,
            sweep=_numbers(sweep),
            sweep_wire=_wire_choices(sweep_wire, task),
        )
        mix = None if boards is None else read_boards(boards, devices=task.data.devices, seed=task.seed)
        run_and_show(task, folder, options, console, data_dir=data_dir, mix=mix, resume=resume)


def run_and_show(
    task: Task,
    folder: Path,
    options: RunOptions,
    console: Console,
    *,
    data_dir: Path | None = None,
    mix: FleetMix | None = None,
    resume: bool,
) -> Result:
    """Runs it and prints the summary, and gives the result; on Ctrl-C says how to go on and exits with 130."""
    with console.status("loading data, exporting and checking the model's graphs"):
        simulation = open_simulation(task, folder, data_dir=data_dir, mix=mix, resume=resume)
    _warn(simulation, console)
    try:
        result = run(simulation, options, console=console)
    except KeyboardInterrupt:
        raise interrupted(console, again_command(folder)) from None
    console.print(summary_table(result))
    console.print(f"report  {simulation.folder.report}\nresult  {simulation.folder.result}", highlight=False)
    return result


def _warn(simulation: Simulation, console: Console) -> None:
    """Says so where a run of this size would not pay."""
    devices = simulation.fleet.devices
    images = max(1, round(sum(len(each.train) for each in devices) / len(devices)))
    classes = len(simulation.prepared.spec.model.class_names)
    advice = worth_it(simulation.task, classes=classes, images=images)
    if advice is not None and advice.warning is not None:
        console.print(f"[yellow]note:[/] {escape(advice.warning)}", highlight=False, soft_wrap=True)


def open_simulation(
    task: Task, folder: Path, *, data_dir: Path | None, mix: FleetMix | None, resume: bool
) -> Simulation:
    """A new run, or with `resume` the one in `folder`. Raises `BadInput`, also for a run of another task or fleet."""
    if not resume:
        return begin(task, folder, data_dir=data_dir, mix=mix)
    simulation = go_on(folder, data_dir=data_dir)
    if simulation.mix != (mix or FleetMix.in_turn((), task.data.devices)):
        raise BadInput(
            f"the run in {folder} was begun with other boards; give --resume the same --boards, or another --out"
        )
    here, there = _flat(task.to_plain()), _flat(simulation.task.to_plain())
    changed = [
        f"{key} = {there.get(key)}, not {here.get(key)}" for key in here | there if here.get(key) != there.get(key)
    ]
    if changed:
        raise BadInput(
            f"the run in {folder} was begun with {'; '.join(changed)}. Give --resume the task and the --set options "
            "that it was begun with, or choose another --out"
        )
    return simulation


def run_path(out: Path | None, name: str) -> Path:
    """The run folder: as asked for, or a new one of this name and time."""
    return out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def overridden(path: Path, settings: Sequence[str] | None, options: Mapping[str, int | None] | None = None) -> Task:
    """The task with what `--set` and other options change of it."""
    given = [f"{key}={value}" for key, value in (options or {}).items() if value is not None]
    return load_task(path, (*(settings or ()), *given))


def interrupted(console: Console, command: str) -> typer.Exit:
    """Says by which command an interrupted one goes on."""
    words = f"\n[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(command)}"
    console.print(words, highlight=False, soft_wrap=True)
    return typer.Exit(INTERRUPTED)


def again_command(folder: Path) -> str:
    """What was typed, with the words that make it go on."""
    words = ["hushfleet", *sys.argv[1:]]
    words += [] if any(word.partition("=")[0] == "--out" for word in words) else ["--out", str(folder)]
    words += [] if "--resume" in words else ["--resume"]
    return shlex.join(words)


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"round.rounds": 20, ...}`; keys that are not set are left out."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadInput(f"--sweep {text!r}: give numbers such as 0,0.3,1,3") from error


def _wire_choices(text: str, task: Task) -> tuple[str, ...]:
    """Refused before anything is begun, not after the run."""
    choices = tuple(part.strip() for part in text.split(",") if part.strip())
    for choice in choices:
        try:
            with_wire(task, choice)
        except BadInput as error:
            raise BadInput(f"--sweep-wire: {error}") from error
    return choices
