"""`hushfleet aggregator`: run a task with the boards behind a broker."""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.errors import BadInput

if TYPE_CHECKING:
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.results.answers import EvaluationRow
    from hushfleet.wire.link.interface import Link, Will

INTERRUPTED = 130
REPLACED = 75
"""Exit code of a fleet's aggregator that has to begin again, with the task that the fleet was given meanwhile."""
_OF_A_FLEET = ("federation", "devices", "enrolment", "roster", "out", "identity", "ca_file", "cert_file", "key_file")
_FILE = {"metavar": "FILE", "exists": True, "dir_okay": False}


DeviceName = StrEnum("DeviceName", ["auto", "cpu", "cuda"])
EnrolmentMode = StrEnum("EnrolmentMode", ["closed", "open"])


@dataclass(frozen=True, kw_only=True)
class AggregatorOptions:
    """A run in the field: its broker, its devices and its files."""

    # fmt: off
    broker: Annotated[str | None, Option(metavar="URL", help="mqtt://host:1883 or mqtts://host:8883.")] = None
    fleet: Annotated[Path | None, Option(metavar="DIR", help="Folder of a fleet, with its task, broker, certificates, key and devices. An unfinished run is resumed.")] = None
    federation: Annotated[str, Option(help="Name of the federation, as in the devices' files.")] = "default"
    devices: Annotated[Path | None, Option(metavar="FILE|RUN", help="Devices that may take part: a TOML list of ids and keys, or the folder of an earlier run. `hushfleet fleet add|block|forget RUN` changes it during the run.")] = None
    roster: Annotated[Path | None, Option(help="Signed list of the devices in secure sums, from `hushfleet fleet roster sign`. Default: all accepted devices.", **_FILE)] = None
    enrolment: Annotated[EnrolmentMode, Option(help="`open`: every device that reaches the broker takes part and shares the noise; for labs only.")] = EnrolmentMode.closed
    device: Annotated[DeviceName, Option(help="Processor that holds the sums; auto: cuda where torch finds one. The result is equal bit by bit.")] = DeviceName.auto
    out: Annotated[Path | None, Option(help="Run folder; default: runs/TASK-TIME.")] = None
    resume: Annotated[bool, Option("--resume", help="Resume the run in --out, if there is one.")] = False
    data_dir: Annotated[Path | None, Option(help="Folder with the files of the test set.")] = None
    settings: Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override any key of the task file.")] = None
    identity: Annotated[Path | None, Option(help="This aggregator's key, which devices pin; default: one for each federation in the user's configuration folder.")] = None
    rounds_only: Annotated[bool, Option("--rounds-only", help="No result.json, no report, and no second opinion on the task's epsilon_server: for a program that makes its own.")] = False
    run_id: Annotated[str | None, Option(help="Last part of the task id; default: random.")] = None
    ca_file: Annotated[Path | None, Option(help="CA that signed the broker's certificate.", **_FILE)] = None
    cert_file: Annotated[Path | None, Option(help="This aggregator's certificate.", **_FILE)] = None
    key_file: Annotated[Path | None, Option(help="Private key of that certificate.", **_FILE)] = None
    username: Annotated[str | None, Option(help="User name for the broker.")] = None
    password_file: Annotated[Path | None, Option(help="File with the password for the broker.", **_FILE)] = None
    # fmt: on

    def of(self, fleet: FleetFolder) -> AggregatorOptions:
        """Returns these options for a fleet, whose folder has the broker, the certificates, the key and the run."""
        return replace(
            self,
            broker=fleet.local_broker,
            federation=fleet.config.federation,
            out=fleet.run,
            resume=True,
            identity=fleet.aggregator / "identity.key",
            ca_file=fleet.ca / "ca.pem",
            cert_file=fleet.aggregator / "cert.pem",
            key_file=fleet.aggregator / "cert.key",
        )


@with_options
def aggregator(
    context: typer.Context,
    options: AggregatorOptions,
    task_file: Annotated[
        Path | None, typer.Argument(metavar="TASK.toml", help="Task file; see `tasks/` for examples.")
    ] = None,
) -> None:
    """Run a task with the devices behind a broker. Safe to kill at any time; `--resume` goes on.

    Examples:

    `hushfleet aggregator tasks/digits-fedglp-adp.toml --broker mqtt://localhost:1883 --enrolment open`

    `hushfleet aggregator task.toml --broker mqtts://broker:8883 --ca-file ca.pem --devices devices.toml --out runs/a --resume`

    `hushfleet aggregator --fleet greenhouse`
    """
    from rich.markup import escape

    from hushfleet.aggregator.commands.field_run import (
        enrolment_of,
        members_of,
        nobody_is_known,
        prepared_under_its_id,
        resume_command,
        run_rounds,
        sum_facts_of,
        torch_device,
        wait_until,
        write_results,
    )
    from hushfleet.aggregator.commands.older_copy import refuse_older_copy
    from hushfleet.aggregator.config.notes import notes_of
    from hushfleet.aggregator.config.task import load_task
    from hushfleet.aggregator.fleet.tasks.pay import pay_of_fleet
    from hushfleet.aggregator.fleet.tasks.seasons import Seasons
    from hushfleet.aggregator.fleet.tasks.spending import Spending
    from hushfleet.aggregator.fleet.tasks.task_check import useless_for
    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.watching.ended import noted_end
    from hushfleet.aggregator.planning.pay import pay
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.aggregator.results.record import newest_evaluation
    from hushfleet.aggregator.results.server_sees import server_sees
    from hushfleet.aggregator.rounds.budgets import Budgets
    from hushfleet.aggregator.rounds.charge_book import ChargeBook
    from hushfleet.aggregator.rounds.engine import RoundEngine
    from hushfleet.aggregator.rounds.thresholds import RunningThresholds, of_task
    from hushfleet.aggregator.storage.activity import FILES
    from hushfleet.aggregator.storage.charged_keys import ChargedKeys
    from hushfleet.aggregator.storage.devices_file import read_devices
    from hushfleet.aggregator.storage.fleet_members import Members
    from hushfleet.aggregator.storage.identity_file import (
        default_path,
        epoch_file,
        last_epoch,
        load_or_create,
        next_epoch,
    )
    from hushfleet.aggregator.storage.list_file import roster_file
    from hushfleet.aggregator.storage.register import DeviceRegister
    from hushfleet.aggregator.storage.store import AggregatorStore, refuse_used
    from hushfleet.privacy.budget import Budget
    from hushfleet.user_files import checked_folder, refuse_others
    from hushfleet.wire.format.topics import check_name
    from hushfleet.wire.link.address import BrokerAddress
    from hushfleet.wire.link.mqtt import MqttLink

    of_fleet = None if options.fleet is None else FleetFolder(options.fleet)
    if of_fleet is not None:
        for name in ("task_file", "broker", *_OF_A_FLEET):
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                word = "TASK.toml" if name == "task_file" else f"--{name.replace('_', '-')}"
                raise BadInput(f"{word} cannot be combined with --fleet, whose folder sets it: remove {word}")
        task_file, options = of_fleet.task, options.of(of_fleet)
    began_in = options.out

    def replaced() -> bool:
        with contextlib.suppress(BadInput):  # a task file that is being written by hand
            return of_fleet is not None and of_fleet.run != began_in
        return False

    if task_file is None or options.broker is None:
        raise BadInput("give TASK.toml and --broker URL, or --fleet DIR")
    if options.resume and options.out is None:
        raise BadInput("--resume goes on with the run in --out: give its folder, or leave --resume out for a new run")
    with noted_end(of_fleet):
        task = load_task(task_file, tuple(options.settings or ()))
    if options.roster is not None and task.privacy.accounting != "secure":
        raise BadInput(
            f"--roster needs secure sums, and the task has accounting = {task.privacy.accounting!r}: remove --roster"
        )
    folder = checked_folder(options.out or Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    check_name(options.federation, "the federation's name")
    address = BrokerAddress.parse(
        options.broker, username=options.username, password_file=options.password_file,
        ca_file=options.ca_file, cert_file=options.cert_file, key_file=options.key_file,
    )  # fmt: skip
    if of_fleet is None and not (options.resume and AggregatorStore.exists(folder)):
        refuse_used(folder)
        refuse_others(folder, FILES)  # which `hushfleet fleet add` makes, also before the first start
    console = Console()
    closed = options.enrolment is EnrolmentMode.closed
    listed = [] if options.devices is None else read_devices(options.devices)
    if of_fleet is None and closed and not (listed or AggregatorStore.exists(folder) or DeviceRegister.exists(folder)):
        raise nobody_is_known(folder)
    with ExitStack() as opened:
        opened.enter_context(noted_end(of_fleet))
        store = opened.enter_context(AggregatorStore(folder))
        known: Members = DeviceRegister(folder) if of_fleet is None else members_of(of_fleet)
        opened.enter_context(known)
        policy = enrolment_of(store, known, listed, closed=closed, fleet=of_fleet, console=console)
        with show_progress(console):
            prepared = prepared_under_its_id(task, store, data_dir=options.data_dir, run_id=options.run_id)
        for note in notes_of(task):
            console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)

        def pays(newest: EvaluationRow | None) -> str:
            if of_fleet is None:
                found = pay(task, evaluation=newest)
            else:
                seasons, now = Seasons.of(of_fleet), time.time()
                lasts_s = None if seasons is None else seasons.view(now).lasts_s(now)
                found = pay_of_fleet(task, of_fleet, boards=policy.count, evaluation=newest, lasts_s=lasts_s)
            return "" if found is None else found.in_words

        if said := pays(newest_evaluation(store)):
            console.print(f"{escape(said)}. See: hushfleet plan --help", highlight=False, soft_wrap=True)
        engine = RoundEngine(store, prepared, device=torch_device(options.device.value))
        needed = of_task(task, blocked=policy.blocked).devices
        begun = engine.plan is not None or engine.closed_rounds
        if not begun and (useless := useless_for(task, of_fleet, boards=policy.count, needed=needed)) is not None:
            if of_fleet is not None:
                raise BadInput(useless)
            console.print(f"[yellow]note:[/] {escape(useless)}", highlight=False, soft_wrap=True)
        if of_fleet is None and closed and policy.count < needed:  # `fleet up` says so of a fleet
            few = f"a round opens with {needed} devices, and {policy.count} may take part"
            more = f"it waits until you add more (hushfleet fleet add {folder} ID --key KEY)"
            console.print(f"[yellow]note:[/] {escape(f'{few}: {more}')}", highlight=False, soft_wrap=True)
        key_path = options.identity or default_path(options.federation)
        key = load_or_create(key_path)
        seen = opened.enter_context(ChargedKeys(key_path))

        def connect(will: Will | None) -> Link:
            return MqttLink(address, client_id=key.client_id(f"aggregator-{options.federation}"), will=will)

        if last := last_epoch(key_path):
            counter = epoch_file(key_path)
            refuse_older_copy(connect(None), key, federation=options.federation, last=last, counter=counter)
        epoch = next_epoch(key_path)
        listed_in = of_fleet.roster if of_fleet else options.roster
        roster = None if listed_in is None else roster_file(listed_in)
        facts, secure = sum_facts_of(store, of_fleet, roster), engine.spec.privacy.secure
        if secure is not None:
            said = server_sees(facts, min_devices=secure.min_devices)
            console.print(escape(said), highlight=False, soft_wrap=True)
        limits = of_fleet.config.device.get("limits", {}) if of_fleet else {}
        budget, charges = Budget.of(limits), None
        if of_fleet is not None:
            charges = ChargeBook(known, engine, None if budget is None else Budgets(known, budget))
        finished = run_rounds(
            engine,
            connect,
            key,
            policy,
            roster=roster,
            charges=charges,
            thresholds=RunningThresholds(task, of_fleet.round, task_file) if of_fleet else None,
            seen=seen,
            pause=of_fleet.paused if of_fleet else None,
            replaced=replaced,
            epoch=epoch,
            federation=options.federation,
            console=console,
            checks=not options.rounds_only,
        )
        if finished and not options.rounds_only:
            name, window_s = engine.spec.task, engine.spec.data_window_s
            lifetimes = Spending(limits).lifetimes(known, name, window_s=window_s) if of_fleet else None
            write_results(
                store, prepared, console, sums=facts, federation=options.federation, lifetimes=lifetimes, pays=pays
            )
    if finished and task.season is not None and of_fleet is not None:
        console.print("[bold]waits[/] for the next season, which the fleet service begins")
        wait_until(replaced)
    if replaced():
        console.print("the fleet has another task; the aggregator begins again")
        raise typer.Exit(REPLACED)
    if not finished:
        if of_fleet is not None:
            words = f"[bold]stopped[/]; the run goes on when the fleet does: hushfleet fleet up {escape(str(of_fleet.path))}"
        else:
            words = f"[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(resume_command(context, folder))}"
        console.print(f"\n{words}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
