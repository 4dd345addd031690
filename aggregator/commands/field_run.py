"""The work of `hushfleet aggregator`: runs a task with the devices behind a broker."""

from __future__ import annotations

import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from hushfleet.aggregator.commands.field_options import AggregatorOptions, EnrolmentMode
from hushfleet.aggregator.commands.older_copy import refuse_older_copy
from hushfleet.aggregator.config.notes import notes_of
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.planning.evaluation_error import useless_evaluation
from hushfleet.aggregator.planning.pay import images_of, pay
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.report.progress import show_progress
from hushfleet.aggregator.results.answers import EvaluationRow
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.results.metrics import newest_evaluation
from hushfleet.aggregator.results.server_sees import SumFacts, server_sees
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.thresholds import of_task
from hushfleet.aggregator.storage.activity import FILES
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.devices_file import read_devices
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.fleet_members import Members
from hushfleet.aggregator.storage.identity_file import (
    default_path,
    epoch_file,
    last_epoch,
    load_or_create,
    next_epoch,
)
from hushfleet.aggregator.storage.list_file import ListFile, membership_list_file
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore, refuse_used
from hushfleet.errors import BadInput
from hushfleet.models.cuda import sees_cuda
from hushfleet.schema import pack, unpack
from hushfleet.secure.membership_list import MembershipList
from hushfleet.user_files import checked_folder, refuse_others
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.topics import check_name
from hushfleet.wire.link.address import BrokerAddress, without_password
from hushfleet.wire.link.interface import Link, Will
from hushfleet.wire.link.mqtt import MqttLink

if TYPE_CHECKING:
    from hushfleet.aggregator.commands.of_fleet import OfFleet

LOOK_S = 1.0
INTERRUPTED = 130
REPLACED = 75
"""Exit code of a fleet's aggregator that has to begin again, with the task that the fleet was given meanwhile."""
_OF_A_FLEET = (
    "federation",
    "devices",
    "enrolment",
    "membership_list",
    "out",
    "identity",
    "ca_file",
    "cert_file",
    "key_file",
)


def torch_device(name: str) -> str:
    """Resolves `auto`. Raises `BadInput` if cuda is asked for but not available."""
    if name == "auto":
        return "cuda" if sees_cuda() else "cpu"
    if name == "cuda" and not sees_cuda():
        raise BadInput("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
    return name


def resume_command(context: typer.Context, folder: Path) -> str:
    """Returns the command that resumes the run in `folder`, with the same options; a password is left out."""
    words = ["hushfleet", "aggregator"]
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        if name == "task_file" and value is not None:
            words.append(str(value))
        elif value is True and not parameter.default and name != "resume":
            words.append(parameter.opts[0])
        elif name not in ("out", "resume") and value is not None and value != parameter.default:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], without_password(each) if name == "broker" else str(each)]
    return shlex.join([*words, "--out", str(folder), "--resume"])


def nobody_is_known(folder: Path, *, blocked: int = 0) -> BadInput:
    """:param blocked: how many devices are known but blocked."""
    known = f"all {blocked} known devices are blocked" if blocked else "no device is known"
    return BadInput(
        f"{known}, and enrolment is closed, so nobody could take part. Give a list with --devices FILE, or "
        f"add each device: hushfleet fleet add {folder} ID --key KEY (`hushfleet-edge status DEVICE.toml` "
        f"prints a board's key), then start again with --out {folder}. In a lab: --enrolment open"
    )


def enrolment_of(
    store: AggregatorStore,
    known: Members,
    listed: list[Board],
    *,
    closed: bool,
    fleet: Path | None,
    console: Console,
) -> Enrolment:
    """Returns which devices may take part. Raises `BadInput` if none could, unless boards enrol later.

    :param fleet: the folder of these boards' fleet, if they have one.
    """
    if isinstance(known, DeviceRegister):
        known.add(listed)
    enrolment = Enrolment(store, known, closed=closed)
    if closed and not enrolment.count and fleet is None:
        raise nobody_is_known(store.folder, blocked=enrolment.blocked)
    if closed and fleet is not None:
        text = f"{enrolment.count} boards have enrolled and may take part; see: hushfleet fleet status {fleet}"
    elif closed:
        text = f"{enrolment.count} devices may take part; see: hushfleet fleet status {known.path.parent}"
    else:
        text = "[bold yellow]open enrolment[/]: whoever reaches the broker takes part and shares the noise. Labs only."
    console.print(text, highlight=False, soft_wrap=True)
    return enrolment


def prepared_under_its_id(
    task: Task, store: AggregatorStore, *, data_dir: Path | None, run_id: str | None
) -> PreparedTask:
    """Prepares the task under the id with which the run began, because devices know it by this id."""
    stored = store.get("run_id")
    known = None if stored is None else stored.decode()
    if known is not None and run_id not in (None, known):
        raise BadInput(f"--run-id {run_id!r}: the run in {store.folder} has the id {known!r}")
    chosen = known or run_id or os.urandom(4).hex()
    prepared = prepare(task, data_dir=data_dir, run_id=chosen)
    store.put("run_id", chosen.encode())
    return prepared


def run_rounds(
    engine: RoundEngine,
    connect: Callable[[Will], Link],
    *,
    identity: Identity,
    pause: Path | None = None,
    replaced: Callable[[], bool] = lambda: False,
    console: Console,
    **how: Any,
) -> bool:
    """Runs the rounds with the display; returns True if the task was finished, False if it was stopped.

    :param pause: the file that pauses training.
    :param replaced: whether the fleet was given another task, for which this run is left.
    :param how: the other parameters of `Coordinator`.

    Raises `BadInput` if the task's last day has passed before its first round.
    """
    rhythm = Rhythm(engine.prepared.task.schedule, engine.store, pause=pause)
    if math.isinf(rhythm.opens()) and engine.plan is None and not engine.closed_rounds:
        raise BadInput(f"until schedule.until = {rhythm.until} no window opens any more, so no round would ever open")
    path = engine.store.folder / "events.jsonl"
    display = FleetDisplay(console=console, delta=engine.spec.privacy.delta, accountant=engine.spec.privacy.accountant)
    with _ShownLog(path, display) as events, _stop_on_signals() as stop:
        coordinator = Coordinator(engine, connect, identity=identity, rhythm=rhythm, events=events, **how)
        console.print(f"aggregator key {identity.public_key.hex()}", highlight=False)
        with display:
            display.replay(iterate_events(path))
            threading.Thread(target=wait_until, args=(replaced, stop), daemon=True).start()
            coordinator.run(stop)
            stop.set()
    return engine.finished


class _ShownLog(EventLog):
    """An event log that shows each event when it is written."""

    def __init__(self, path: Path, display: FleetDisplay) -> None:
        super().__init__(path)
        self._display = display

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = super().write(kind, **fields)
        self._display.apply(event)
        return event


def wait_until(replaced: Callable[[], bool], stop: threading.Event | None = None) -> None:
    """Waits until the fleet was given another task, and sets `stop`; or until `stop` is set."""
    stop = stop or threading.Event()
    while not (replaced() or stop.wait(LOOK_S)):
        pass
    stop.set()


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Ends the loop between two steps on Ctrl-C or SIGTERM; a second signal ends it immediately."""
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


def sum_facts_of(
    store: AggregatorStore, fleet: SumFacts | None, membership_list: ListFile[MembershipList] | None
) -> SumFacts:
    """Finds who could unmask devices in this run, now and at its earlier starts, which its store records.

    :param fleet: what is known of a fleet.
    """
    listed = None if membership_list is None else membership_list.current()
    now = fleet or SumFacts("operator" if listed is not None and listed.signature else "aggregator")
    before = store.get("sum_facts")
    facts = now.or_worse(
        None if before is None else unpack(SumFacts, before, what="the run's facts on secure aggregation")
    )
    store.put("sum_facts", pack(facts))
    return facts


def run_in_field(context: typer.Context, options: AggregatorOptions, task_file: Path | None) -> None:
    """Runs the task that the options name, or the present one of their fleet; exits with a code if it stops before."""
    fleet: OfFleet | None = None
    if options.fleet is not None:
        for name in ("task_file", "broker", *_OF_A_FLEET):
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                word = "TASK.toml" if name == "task_file" else f"--{name.replace('_', '-')}"
                raise BadInput(f"{word} cannot be combined with --fleet, whose folder sets it: remove {word}")
        from hushfleet.aggregator.commands.of_fleet import OfFleet

        fleet = OfFleet(options.fleet)
        task_file, options = fleet.folder.task, fleet.options(options)

    def replaced() -> bool:
        return fleet is not None and fleet.is_replaced

    def note(words: str) -> None:
        console.print(f"[yellow]note:[/] {escape(words)}", highlight=False, soft_wrap=True)

    if task_file is None or options.broker is None:
        raise BadInput("give TASK.toml and --broker URL, or --fleet DIR")
    if options.resume and options.out is None:
        raise BadInput("--resume goes on with the run in --out: give its folder, or leave --resume out for a new run")
    noted = nullcontext if fleet is None else fleet.noted_end
    with noted():
        task = load_task(task_file, tuple(options.settings or ()))
    if options.membership_list is not None and fleet is None and task.privacy.accounting != "secure":
        raise BadInput(
            f"--roster needs secure aggregation, and the task has accounting = {task.privacy.accounting!r}: remove "
            "--roster"
        )
    folder = checked_folder(options.out or Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    check_name(options.federation, "the federation's name")
    address = BrokerAddress.parse(
        options.broker, username=options.username, password_file=options.password_file,
        ca_file=options.ca_file, cert_file=options.cert_file, key_file=options.key_file,
    )  # fmt: skip
    if fleet is None and not (options.resume and AggregatorStore.exists(folder)):
        refuse_used(folder)
        refuse_others(folder, FILES)  # which `hushfleet fleet add` makes, also before the first start
    console = Console()
    closed = options.enrolment is EnrolmentMode.closed
    listed = [] if options.devices is None else read_devices(options.devices)
    if fleet is None and closed and not (listed or AggregatorStore.exists(folder) or DeviceRegister.exists(folder)):
        raise nobody_is_known(folder)
    with ExitStack() as opened:
        opened.enter_context(noted())
        store = opened.enter_context(AggregatorStore(folder))
        known: Members = DeviceRegister(folder) if fleet is None else fleet.members
        opened.enter_context(known)
        policy = enrolment_of(store, known, listed, closed=closed, fleet=options.fleet, console=console)
        with show_progress(console):
            prepared = prepared_under_its_id(task, store, data_dir=options.data_dir, run_id=options.run_id)
        for words in notes_of(task):
            note(words)

        def pays(newest: EvaluationRow | None) -> str:
            if fleet is None:
                found = pay(task, evaluation=newest)
            else:
                found = fleet.pay(task, boards=policy.count, evaluation=newest)
            return "" if found is None else found.in_words

        if said := pays(newest_evaluation(store)):
            console.print(f"{escape(said)}. See: hushfleet plan --help", highlight=False, soft_wrap=True)
        engine = RoundEngine(store, prepared, device=torch_device(options.device.value))
        needed = of_task(task, blocked=policy.blocked).devices
        begun = engine.plan is not None or engine.closed_rounds
        if fleet is not None and not begun:
            fleet.check_use(task, boards=policy.count, needed=needed)
        useless = useless_evaluation(task, devices=task.cohort_size, images=images_of(task))
        if fleet is None and not begun and useless is not None:
            note(useless)
        if fleet is None and closed and policy.count < needed:  # `fleet up` says so of a fleet
            few = f"a round opens with {needed} devices, and {policy.count} may take part"
            note(f"{few}: it waits until you add more (hushfleet fleet add {folder} ID --key KEY)")
        key_path = options.identity or default_path(options.federation)
        key = load_or_create(key_path)
        seen = opened.enter_context(ChargedKeys(key_path))

        def connect(will: Will | None) -> Link:
            return MqttLink(address, client_id=key.client_id(f"aggregator-{options.federation}"), will=will)

        if last := last_epoch(key_path):
            counter = epoch_file(key_path)
            refuse_older_copy(connect(None), key, federation=options.federation, last=last, counter=counter)
        epoch = next_epoch(key_path)
        membership_list = None if options.membership_list is None else membership_list_file(options.membership_list)
        facts, secure = (
            sum_facts_of(store, None if fleet is None else fleet.sums, membership_list),
            engine.spec.privacy.secure,
        )
        if secure is not None:
            said = server_sees(facts, min_devices=secure.min_devices)
            console.print(escape(said), highlight=False, soft_wrap=True)
        finished = run_rounds(
            engine,
            connect,
            identity=key,
            enrolment=policy,
            membership_list=membership_list,
            charges=fleet and fleet.charges(engine),
            thresholds=fleet and fleet.thresholds(task),
            seen=seen,
            pause=None if fleet is None else fleet.folder.paused,
            replaced=replaced,
            epoch=epoch,
            federation=options.federation,
            console=console,
        )
        if finished and not options.rounds_only:
            from hushfleet.aggregator.commands.field_results import (
                write_results,  # with the plots: a run may last months
            )

            lifetimes = None if fleet is None else fleet.lifetimes(engine)
            write_results(
                store, prepared, console, sums=facts, federation=options.federation, lifetimes=lifetimes, pays=pays
            )
    if finished and task.season is not None and fleet is not None:
        console.print("[bold]waits[/] for the next season, which the fleet service begins")
        wait_until(replaced)
    if replaced():
        console.print("the fleet has another task; the aggregator begins again")
        raise typer.Exit(REPLACED)
    if not finished:
        if fleet is not None:
            path = escape(str(fleet.folder.path))
            words = f"[bold]stopped[/]; the run goes on when the fleet does: hushfleet fleet up {path}"
        else:
            words = f"[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(resume_command(context, folder))}"
        console.print(f"\n{words}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
