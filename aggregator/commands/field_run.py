"""The work of `hushfleet aggregator`: runs a task with the devices behind a broker."""

from __future__ import annotations

import math
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from hushfleet.aggregator.commands.second_opinion import check_in_background
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.devices.board import Board
from hushfleet.aggregator.devices.enrolment import Enrolment
from hushfleet.aggregator.devices.fleet_members import Members
from hushfleet.aggregator.devices.list_file import ListFile
from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.observe.console import Console
from hushfleet.aggregator.observe.display import FleetDisplay
from hushfleet.aggregator.publish.prepare import PreparedTask, prepare
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.thresholds import RunningThresholds
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput
from hushfleet.methods.cost import RoundTerms
from hushfleet.models.cuda import sees_cuda
from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.schema import pack, unpack
from hushfleet.secure.roster import Roster
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.link.address import without_password
from hushfleet.wire.link.interface import Link, Will

LOOK_S = 1.0


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
    identity: Identity,
    enrolment: Enrolment,
    *,
    roster: ListFile[Roster] | None = None,
    charges: ChargeBook | None = None,
    thresholds: RunningThresholds | None = None,
    seen: ChargedKeys | None = None,
    pause: Path | None = None,
    replaced: Callable[[], bool] = lambda: False,
    epoch: int,
    federation: str,
    console: Console,
) -> bool:
    """Runs the rounds with the display; returns True if the task was finished, False if it was stopped.

    :param pause: the file that pauses training.
    :param replaced: whether the fleet was given another task, for which this run is left.

    Raises `BadInput` if the task's last day has passed before its first round.
    """
    rhythm = Rhythm(engine.prepared.task.schedule, engine.store, pause=pause)
    if math.isinf(rhythm.opens()) and engine.plan is None and not engine.closed_rounds:
        raise BadInput(f"until schedule.until = {rhythm.until} no window opens any more, so no round would ever open")
    path = engine.store.folder / "events.jsonl"
    begins = not path.exists()
    display = FleetDisplay(console=console, delta=engine.spec.privacy.delta, accountant=engine.spec.privacy.accountant)
    with _ShownLog(path, display) as events, _stop_on_signals() as stop:
        coordinator = Coordinator(
            engine,
            connect,
            identity=identity,
            epoch=epoch,
            enrolment=enrolment,
            roster=roster,
            charges=charges,
            thresholds=thresholds,
            seen=seen,
            rhythm=rhythm,
            federation=federation,
            events=events,
        )
        console.print(f"aggregator key {identity.public_key.hex()}", highlight=False)
        if begins:
            _ask_for_a_second_opinion(engine, console)
        with display:
            display.replay(iterate_events(path))
            threading.Thread(target=wait_until, args=(replaced, stop), daemon=True).start()
            coordinator.run(stop)
            stop.set()
    return engine.finished


def _ask_for_a_second_opinion(engine: RoundEngine, console: Console) -> None:
    """Checks epsilon of a device that takes part in all rounds; an infinite epsilon is not checked."""
    privacy, question = engine.spec.privacy, engine.spec.question
    charge, rounds = engine.method.charge(RoundTerms(privacy.noise_split)), engine.spec.training_rounds
    steps = [Step(charge.noise_multiplier, charge.sample_rate, charge.steps * rounds)] if rounds else []
    if question is not None:
        steps.append(Step(question.noise_multiplier, 1.0, engine.spec.rounds - rounds))
    charged = math.inf if charge.raw else epsilon(steps, delta=privacy.delta, accountant=privacy.accountant)

    def tell(words: str, differs: bool) -> None:
        mark = "[yellow]warning:[/] " if differs else ""
        console.print(f"{mark}{escape(words)}", highlight=False, soft_wrap=True)

    if math.isfinite(charged):
        check_in_background(steps, delta=privacy.delta, charged=charged, accountant=privacy.accountant, tell=tell)


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


def sum_facts_of(store: AggregatorStore, fleet: SumFacts | None, roster: ListFile[Roster] | None) -> SumFacts:
    """Finds who could unmask devices in this run, now and at its earlier starts, which its store records.

    :param fleet: what is known of a fleet.
    """
    listed = None if roster is None else roster.current()
    now = fleet or SumFacts("operator" if listed is not None and listed.signature else "aggregator")
    before = store.get("sum_facts")
    facts = now.or_worse(None if before is None else unpack(SumFacts, before, what="the run's facts on secure sums"))
    store.put("sum_facts", pack(facts))
    return facts
