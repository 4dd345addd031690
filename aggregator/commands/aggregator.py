"""`hushfleet aggregator`: the side beside the GPU, until the task is finished or it is stopped."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.devices.charge_book import ChargeBook
from hushfleet.aggregator.devices.devices_file import read_devices
from hushfleet.aggregator.devices.enrolment import Enrolment
from hushfleet.aggregator.devices.register import DeviceRegister, KnownDevice
from hushfleet.aggregator.devices.roster_file import RosterFile
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.observe.display import FleetDisplay, summary_table
from hushfleet.aggregator.observe.events import EventLog, read_events
from hushfleet.aggregator.planning.advice import worth_it
from hushfleet.aggregator.publish.prepare import PreparedTask, prepare
from hushfleet.aggregator.results.record import record
from hushfleet.aggregator.results.report import write_report
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.identity_file import default_path, load_or_create, next_epoch
from hushfleet.aggregator.storage.store import AggregatorStore, refuse_used
from hushfleet.errors import BadInput
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.topics import check_name
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Link, Will
from hushfleet.wire.link.mqtt import MqttLink

INTERRUPTED = 130
_FILE = {"exists": True, "dir_okay": False}


DeviceName = StrEnum("DeviceName", ["auto", "cpu", "cuda"])
EnrolmentMode = StrEnum("EnrolmentMode", ["closed", "open"])


def register(app: typer.Typer) -> None:
    """Adds the command `aggregator` to the application."""

    @app.command("aggregator")
    def aggregator(
        context: typer.Context,
        task_file: Annotated[Path | None, typer.Argument(metavar="TASK.toml", help="What to run; see `tasks/`.")] = None,
        broker: Annotated[str | None, typer.Option(metavar="URL", help="mqtt://host:1883 or mqtts://host:8883.")] = None,
        fleet: Annotated[Path | None, typer.Option(metavar="DIR", help="A fleet's folder, which has task, broker, certificates, key and devices; goes on with its run, if there is one.")] = None,
        federation: Annotated[str, typer.Option(help="As in the devices' files.")] = "default",
        devices: Annotated[Path | None, typer.Option(metavar="FILE|RUN", help="Who may take part: a TOML list of ids and keys, or an earlier run's folder. `hushfleet devices` changes it while this runs.")] = None,
        roster: Annotated[Path | None, typer.Option(help="Of secure sums: who may be in them, as `hushfleet devices roster --sign` wrote it. Default: all accepted devices.", **_FILE)] = None,
        enrolment: Annotated[EnrolmentMode, typer.Option(help="`open`: whoever reaches the broker takes part and shares the noise; for labs only.")] = EnrolmentMode.closed,
        device: Annotated[DeviceName, typer.Option(help="Where sums are held; auto is cuda where torch sees one. The result has the same bits on either.")] = DeviceName.auto,
        out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/TASK-TIME.")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")] = False,
        data_dir: Annotated[Path | None, typer.Option(help="Where the test set's files are.")] = None,
        settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any key.")] = None,
        identity: Annotated[Path | None, typer.Option(help="This aggregator's key, which devices pin; default: one for each federation in the user's configuration folder.")] = None,
        run_id: Annotated[str | None, typer.Option(help="Last part of the task's id; default: random.")] = None,
        ca_file: Annotated[Path | None, typer.Option(help="CA that signed the broker's certificate.", **_FILE)] = None,
        cert_file: Annotated[Path | None, typer.Option(help="This aggregator's certificate.", **_FILE)] = None,
        key_file: Annotated[Path | None, typer.Option(help="Its key.", **_FILE)] = None,
        username: Annotated[str | None, typer.Option(help="For the broker.")] = None,
        password_file: Annotated[Path | None, typer.Option(help="A file with the password.", **_FILE)] = None,
    ) -> None:  # fmt: skip
        """Run a task with the devices behind a broker. Safe to kill at any time; `--resume` goes on.

        Examples:

        `hushfleet aggregator tasks/digits-fedglp-adp.toml --broker mqtt://localhost:1883 --enrolment open`

        `hushfleet aggregator task.toml --broker mqtts://broker:8883 --ca-file ca.pem --devices devices.toml --out runs/a --resume`

        `hushfleet aggregator --fleet greenhouse`
        """
        of_fleet = None if fleet is None else FleetFolder(fleet)
        if of_fleet is not None:
            if task_file or broker:
                raise BadInput("--fleet DIR has its own task and broker; leave TASK.toml and --broker away")
            task_file, broker, federation = of_fleet.task, of_fleet.local_broker, of_fleet.config.federation
            out, resume, identity = of_fleet.run, True, of_fleet.aggregator / "identity.key"
            ca_file = of_fleet.ca / "ca.pem"
            cert_file, key_file = of_fleet.aggregator / "cert.pem", of_fleet.aggregator / "cert.key"
        if task_file is None or broker is None:
            raise BadInput("give TASK.toml and --broker URL, or --fleet DIR")
        task = load_task(task_file, tuple(settings or ()))
        folder = out or Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        check_name(federation, "the federation's name")
        address = BrokerAddress.parse(
            broker, username=username, password_file=password_file,
            ca_file=ca_file, cert_file=cert_file, key_file=key_file,
        )  # fmt: skip
        if not resume:
            refuse_used(folder)
        console = Console()
        closed = enrolment is EnrolmentMode.closed
        listed = [] if devices is None else read_devices(devices)
        if (
            of_fleet is None
            and closed
            and not (listed or AggregatorStore.exists(folder) or DeviceRegister.exists(folder))
        ):
            raise _nobody_is_known(folder)
        with AggregatorStore(folder) as store, DeviceRegister(of_fleet.path if of_fleet else folder) as known:
            policy = _enrolment(store, known, listed, closed=closed, may_be_empty=of_fleet is not None, console=console)
            with console.status("loading data, exporting and checking the model's graphs"):
                prepared = _prepared(task, store, data_dir=data_dir, run_id=run_id)
            advice = worth_it(task, classes=len(prepared.spec.model.class_names))
            if advice is not None and advice.warning is not None:
                console.print(f"[yellow]note:[/] {escape(advice.warning)}", highlight=False, soft_wrap=True)
            engine = RoundEngine(store, prepared, device=torch_device(device.value))
            key_path = identity or default_path(federation)
            key = load_or_create(key_path)
            epoch = next_epoch(key_path)

            def connect(will: Will) -> Link:
                return MqttLink(address, client_id=key.client_id(f"aggregator-{federation}"), will=will)

            roster_file = of_fleet.roster if of_fleet else roster
            finished = _run(
                engine,
                connect,
                key,
                policy,
                roster=None if roster_file is None else RosterFile(roster_file),
                charges=ChargeBook(known, engine) if of_fleet else None,
                epoch=epoch,
                federation=federation,
                console=console,
            )
            if finished:
                _write_results(store, prepared, console)
        if not finished:
            again = f"[bold]interrupted[/]; nothing is lost. Go on with:\n  {resume_command(context, folder)}"
            console.print(f"\n{again}", highlight=False, soft_wrap=True)
            raise typer.Exit(INTERRUPTED)


def torch_device(name: str) -> str:
    """`auto` resolved. Raises `BadInput` where cuda is asked for and not there."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
    return name


def resume_command(context: typer.Context, folder: Path) -> str:
    """What to type to go on with the run in `folder`: the options that were given, once more."""
    words = ["hushfleet", "aggregator"]
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        if name == "task_file" and value is not None:
            words.append(str(value))
        elif name not in ("out", "resume") and value is not None and value != parameter.default:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(each)]
    return shlex.join(words if context.params.get("fleet") else [*words, "--out", str(folder), "--resume"])


def _nobody_is_known(folder: Path) -> BadInput:
    return BadInput(
        "no device is known, and enrolment is closed, so nobody could take part. Give a list with --devices FILE, or "
        f"add each device: hushfleet devices add {folder} ID --key KEY (`hushfleet-edge status DEVICE.toml` "
        f"prints a board's key), then start again with --out {folder}. In a lab: --enrolment open"
    )


def _enrolment(
    store: AggregatorStore,
    known: DeviceRegister,
    listed: list[KnownDevice],
    *,
    closed: bool,
    may_be_empty: bool,
    console: Console,
) -> Enrolment:
    """Says who may take part. Raises `BadInput` where nobody could, unless boards enrol later."""
    known.add(listed)
    enrolment = Enrolment(store, known, closed=closed)
    if closed and not enrolment.count and not may_be_empty:
        raise _nobody_is_known(store.folder)
    if closed:
        text = f"{enrolment.count} devices may take part; see: hushfleet devices list {known.path.parent}"
    else:
        text = "[bold yellow]open enrolment[/]: whoever reaches the broker takes part and shares the noise. Labs only."
    console.print(text, highlight=False, soft_wrap=True)
    return enrolment


def _prepared(task: Task, store: AggregatorStore, *, data_dir: Path | None, run_id: str | None) -> PreparedTask:
    """The task under the id that the run began with, since devices know it by that."""
    stored = store.get("run_id")
    known = None if stored is None else stored.decode()
    if known is not None and run_id not in (None, known):
        raise BadInput(f"--run-id {run_id!r}: the run in {store.folder} has the id {known!r}")
    chosen = known or run_id or os.urandom(4).hex()
    prepared = prepare(task, data_dir=data_dir, run_id=chosen)
    store.put("run_id", chosen.encode())
    return prepared


def _run(
    engine: RoundEngine,
    connect: Callable[[Will], Link],
    identity: Identity,
    enrolment: Enrolment,
    *,
    roster: RosterFile | None = None,
    charges: ChargeBook | None = None,
    epoch: int,
    federation: str,
    console: Console,
) -> bool:
    """Runs the rounds under the display; True if the task was finished, False if it was stopped."""
    path = engine.store.folder / "events.jsonl"
    display = FleetDisplay(console=console, delta=engine.spec.privacy.delta, accountant=engine.spec.privacy.accountant)
    earlier, _ = read_events(path)
    with _ShownLog(path, display) as events, _stop_on_signals() as stop:
        coordinator = Coordinator(
            engine,
            connect,
            identity=identity,
            epoch=epoch,
            enrolment=enrolment,
            roster=roster,
            charges=charges,
            federation=federation,
            events=events,
        )
        console.print(f"aggregator key {identity.public_key.hex()}", highlight=False)
        with display:
            for event in earlier:
                display.state.apply(event)
            coordinator.run(stop)
    return engine.finished


class _ShownLog(EventLog):
    """The event log, shown as it is written."""

    def __init__(self, path: Path, display: FleetDisplay) -> None:
        super().__init__(path)
        self._display = display

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = super().write(kind, **fields)
        self._display.apply(event)
        return event


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the loop between two steps; a second one ends it at once."""
    stop = threading.Event()

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_results(store: AggregatorStore, prepared: PreparedTask, console: Console) -> None:
    result = record(store, prepared, engine="field", seed=None)
    result.save(store.folder / "result.json")
    write_report(result, store.folder / "report.html")
    console.print(summary_table(result))
    console.print(f"report  {store.folder / 'report.html'}\nresult  {store.folder / 'result.json'}", highlight=False)
