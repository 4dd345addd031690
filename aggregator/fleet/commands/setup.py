"""`hushfleet fleet init|add`: make a fleet and name its boards."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from hushfleet.aggregator.fleet.commands.options import FILE, RUN_IT, Dir, opened
from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.errors import BadInput
from hushfleet.privacy.terms import HONEST_FRACTION, MIN_DEVICES
from hushfleet.schema import Port

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options of a new fleet."""

    # fmt: off
    broker_name: Annotated[list[str], Option(help="Host name or address of the broker for the boards. May be "
"repeated: the certificate has all names, boards use the first.")]
    task: Annotated[Path, Option(metavar="TASK.toml", help="Task file that the fleet trains.", **FILE)]
    federation: Annotated[str | None, Option(help="Name of the federation on the broker. Default: the folder's name.")] = None
    port: Annotated[Port, Option(help="Port of the broker for boards with a certificate.")] = 8883
    enrolment_port: Annotated[Port, Option(help="Port for boards that enrol, without a certificate yet.")] = 8884
    page_port: Annotated[Port, Option(help="Port of the status page.")] = 8443
    classes: Annotated[str | None, Option(metavar="A,B,...", help="Class names, for data.class_names of the task.")] = None
    honest_fraction: Annotated[float, Meta(ge=0.01, le=1), Option(help="Least share of honest boards, for secure "
"aggregation. Boards decline a task that assumes more.")] = HONEST_FRACTION
    min_devices: Annotated[int, Meta(ge=2), Option(help="Fewest boards in secure aggregation. Boards decline a task "
"that opens smaller sums.")] = MIN_DEVICES
    operator_key: Annotated[str | None, Option(metavar="FILE|PUBLIC", help="Operator's key, which signs the list of "
"boards in secure aggregation: its file, read once and kept elsewhere, or its public half, 64 hex digits. Default: a "
"new key in DIR.")] = None
    root_key: Annotated[str | None, Option(metavar="FILE|PUBLIC", help="Root's key, which signs the list of release "
"keys: its file, read once and kept elsewhere, or its public half, 64 hex digits. Default: a new key in DIR.")] = None
    # fmt: on


@app.command("init", rich_help_panel=RUN_IT)
@with_options
def _init(
    path: Dir,
    options: FleetOptions,
) -> None:
    """Make a fleet: its authority, keys, broker configuration and registry, in a new folder.

    Keep DIR safe, and a copy of it: `ca/ca.key` admits boards, `operator.key` says who may take part in secure
    aggregation.

    Secure aggregation protects boards against whoever runs the server only if he does not hold the operator's key. So
    make it on another machine (`hushfleet fleet key operator.key`), and give its public half here. Each change of the
    boards is then signed there: `hushfleet fleet roster`.

    Examples:

    `hushfleet fleet init greenhouse --broker-name broker.example --task task.toml`

    `hushfleet fleet init greenhouse --broker-name broker.example --task task.toml --operator-key 64-HEX-DIGITS`
    """
    from hushfleet.aggregator.config.task import load_task
    from hushfleet.aggregator.fleet.create import create_fleet
    from hushfleet.aggregator.fleet.software.releases import UNSIGNED_FILE
    from hushfleet.aggregator.fleet.tasks.next_task import check_sums
    from hushfleet.aggregator.fleet.tasks.task_check import obstacles, thresholds
    from hushfleet.aggregator.fleet.trust import keys
    from hushfleet.aggregator.fleet.trust.access import apply
    from hushfleet.aggregator.fleet.trust.device_file import kind_of
    from hushfleet.aggregator.fleet.trust.folder import (
        BrokerPart,
        FleetConfig,
        PagePart,
        SecureAggregationPart,
        check_ports,
    )
    from hushfleet.aggregator.fleet.trust.keys import sum_facts
    from hushfleet.aggregator.fleet.units import write_units
    from hushfleet.aggregator.results.server_sees import server_sees
    from hushfleet.data.form import FOLDERS
    from hushfleet.toml_text import toml_value
    from hushfleet.wire.format.topics import check_new_name

    name = check_new_name(options.federation or path.resolve().name, "the federation's name (--federation)")
    names = [] if options.classes is None else [each.strip() for each in options.classes.split(",")]
    checked = load_task(options.task, (f"data.class_names={toml_value(names)}",) if names else ())
    try:
        broker = BrokerPart(tuple(options.broker_name), options.port, options.enrolment_port)
    except ValueError as error:
        raise BadInput(f"--broker-name: {error}") from error
    operator = None if options.operator_key is None else keys.read_public(options.operator_key, "--operator-key")
    sums = SecureAggregationPart(options.honest_fraction, options.min_devices)
    check_sums(checked, sums)
    page = PagePart(port=options.page_port)
    check_ports(broker, page)
    config = FleetConfig(name, broker, page=page, secure_sums=sums)
    made = create_fleet(path, config, options.task, classes=names, operator=operator, root=options.root_key)
    try:
        with opened(path) as (folder, registry):
            apply(folder, registry)
        units, notes = write_units(folder), obstacles(checked, folder)
    except BaseException:  # for example a full disk: the same command could not continue with a partial folder
        shutil.rmtree(made.path, ignore_errors=True)  # `path` may be a link, which `rmtree` leaves
        raise
    named, intro = ", ".join(checked.data.class_names), "secure aggregation: "
    kind = kind_of(checked.data)
    of = "sound" if kind == "sound" else "images"
    holds = f"folders of {of}, one for each class" if kind in FOLDERS else f"data, of kind {kind!r}, with the labels"
    if checked.privacy.accounting != "secure":
        intro = "this task has no secure aggregation: server and broker see each board's update. In a task with it: "
    whose = (
        f"the operator's key is operator.key in {path}; to keep it elsewhere: hushfleet fleet init --help"
        if operator is None
        else f"the operator's key is not in {path}: changes of the boards wait for it, see hushfleet fleet roster "
        "--help"
    )
    if folder.root_key.exists():
        offline = f"move {folder.root_key} to a medium that is offline: it says who signs what boards run\n"
    elif (folder.path / UNSIGNED_FILE).exists():
        offline = f"{folder.path / UNSIGNED_FILE} waits for root's signature: hushfleet release keys --help\n"
    else:
        offline = ""
    print(
        f"the fleet {name} is in {path}: boards will reach its broker at {folder.broker_url}\n"
        + f"each board's {holds}: {named}\n" * bool(named)
        + f"{intro}{server_sees(sum_facts(folder), min_devices=folder.config.secure_sums.min_devices)}\n{whose}\n"
        + f"its services: sudo cp {units[0].parent}/*.service /etc/systemd/system/; or in one terminal: hushfleet "
        f"fleet up {path}\n"
        + "".join(f"note: {why}\n" for why in notes)
        + f"{offline}a round opens with {thresholds(checked, folder, boards=0, blocked=0, begun=False).needed} boards; "
        f"for a smaller fleet lower data.devices = {checked.data.devices} (and round.min_devices) in the task\n"
        f"next: hushfleet fleet add {path} --count N --board BOARD   (`hushfleet boards` lists them)"
    )


@app.command("add", rich_help_panel=RUN_IT)
def _add(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder, or that of a run without a fleet, "
"also before its first start.")],
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of new boards.")] = None,
    key: Annotated[str | None, typer.Option(help="Public key of one board, 64 hex digits. Default: the first key that "
"it shows.")] = None,
    count: Annotated[int | None, typer.Option(help="Number of boards; they are named PREFIX-01, PREFIX-02, ...")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="CSV file with the columns id, board, place, wifi, "
"labels (name=value;...), key.", **FILE)] = None,
    board: Annotated[str | None, typer.Option(help="Board profile; `hushfleet boards` lists them.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Prefix of the boards' names. Default: the federation's name.")] = None,
    place: Annotated[str, typer.Option(help="Place of the boards.")] = "",
    wifi: Annotated[Path | None, typer.Option(metavar="WIFI.toml", help="File with the Wi-Fi network for the cards: "
"ssid, password, country.", **FILE)] = None,
) -> None:  # fmt: skip
    """Name the boards of the fleet. Their cards are written by `hushfleet flash --fleet DIR`.

    A run without a fleet accepts them from now on, also one that was locked out. Leave the key out there only if the
    broker's access list binds a device's topics to the name in its certificate.

    Examples:

    `hushfleet fleet add greenhouse --count 40 --board raspberry-pi-4-4gb --wifi wifi.toml`

    `hushfleet fleet add greenhouse --csv fleet.csv`

    `hushfleet fleet add runs/field greenhouse-07 --key 64-HEX-DIGITS`
    """
    from hushfleet import atomic_file
    from hushfleet.aggregator.fleet.trust.members import counted, from_csv, named
    from hushfleet.aggregator.fleet.trust.membership import accept, is_fleet
    from hushfleet.aggregator.storage.devices_file import parse_key
    from hushfleet.firmware_profiles.cards.wifi import read_wifi
    from hushfleet.schema import to_plain
    from hushfleet.toml_text import to_toml
    from hushfleet.wire.format.topics import check_name

    if (count is not None) + (csv is not None) + bool(ids) != 1:
        raise BadInput("give --count N, --csv FILE, or the boards' ids")
    given = None if key is None else parse_key(key, "--key")
    if given is not None and len(ids or ()) != 1:
        raise BadInput("--key is the key of one board: name it by its id")
    if ids and not (is_fleet(path) or board or place or prefix or wifi):
        accept(path, ids, given)
        print(f"accepted: {' '.join(ids)}, with {'the first key that is seen' if given is None else given.hex()}")
        return
    profile = "" if wifi is None else check_name(wifi.stem, "the name of the Wi-Fi file")
    network = None if wifi is None else read_wifi(wifi)
    with opened(path) as (folder, registry):
        if csv is not None:
            boards = from_csv(csv, board=board, wifi=profile)
        else:
            if board is None:
                raise BadInput("new boards need --board; `hushfleet boards` lists them")
            known = [row.device for row in registry.boards()]
            prefix = prefix or folder.config.federation
            if ids:
                boards = named(ids, board=board, place=place, wifi=profile, key=given)
            else:
                boards = counted(prefix, count or 0, known=known, board=board, place=place, wifi=profile)
        missing = {
            row.wifi for row in boards if row.wifi and row.wifi != profile and not folder.wifi(row.wifi).exists()
        }
        if missing:
            raise BadInput(
                f"the Wi-Fi profile {min(missing)!r} is not known; give its file with --wifi {min(missing)}.toml"
            )

        def keep_wifi() -> None:
            if network is not None:
                folder.wifi(profile).parent.mkdir(mode=0o700, exist_ok=True)
                text = to_toml(to_plain(network)).encode()
                atomic_file.write_whole(folder.wifi(profile), text, durable=True, mode=0o600)

        # both or neither: other cards may use the former file, and boards cannot be added twice
        registry.add(boards, along=keep_wifi)
    names = f"{boards[0].device} to {boards[-1].device}" if len(boards) > 1 else boards[0].device
    print(f"added {len(boards)}: {names}\nnext: hushfleet flash --fleet {path} --help")
