"""The command on a board: run the device, give it labelled images, use its model, or look at what it has spent.

Exit codes: 0 stopped or finished, 1 failure, 2 a problem that a person must solve (a wrong file or value, a store that
is lost or is a copy of another), 130 Ctrl-C. The store is safe at any time: start the same command again, and the
device continues where it was.

A command imports the modules that it needs only when it is called, so that a board answers `--help` at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.output import escape_output, log_to_stderr, say, take_all_characters
from hushfleet.version import __version__

if TYPE_CHECKING:
    from hushfleet.edge_client.board.config import DeviceConfig
    from hushfleet.edge_client.fleet.health import BoardHealth
    from hushfleet.edge_client.storage.store import DeviceStore

INTERRUPTED = 130

_EXAMPLE = """\
examples:
  hushfleet-edge device.toml                   run it until it is stopped
  hushfleet-edge status device.toml            what it has spent, and on what
  hushfleet-edge predict device.toml photo.jpg   what its model sees
  hushfleet-edge add device.toml *.jpg --label leaf   more images to train on
  hushfleet-edge label device.toml             label new images or clips
  hushfleet-edge listen device.toml            what its model hears, live
  hushfleet-edge label device.toml --wrong     mark alarms that were false

a small device.toml:
  [device]
  id = "greenhouse-07"
  state_dir = "state"            # relative to this file; never share or copy it
  board = "raspberry-pi-4-4gb"   # `hushfleet boards` lists them

  [broker]
  url = "mqtts://broker.example:8883"
  ca_file = "ca.pem"

  [data]
  kind = "folder"                # one sub-folder of images for each class
  path = "images"
  inbox = "inbox"                # may be left out: new images that wait until
                                 # somebody has labelled them
  unlabelled = "camera"          # may be left out: images without labels, for
                                 # this board's personalized head;
                                 # they never leave it

  [limits]
  epsilon_server = 8.0           # it sits rounds out rather than spend more;
                                 # inf: no limit
"""

_LISTEN = """\
in device.toml, all of it optional:
  [listen]
  microphone = "default"  # arecord -L lists them
  keep = "loud"           # what waits for a label in data.inbox, from -30 dBFS
                          # on (loud_dbfs); "unsure": below 60 % (unsure_below),
                          # or a score of 0.5 to 2; "key": at Enter, or kill
                          # -USR1; "none" is the default
  keep_alarms = 100       # for label --wrong
  mqtt = "mqtt://me:secret@homeassistant.local"   # your own broker, not the fleet's

  ffmpeg -i rtsp://camera/1 -f s16le -ac 1 -ar 16000 - | \\
    hushfleet-edge listen device.toml --from -
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; a `HushfleetError` becomes one clear paragraph and an exit code."""
    take_all_characters()
    escape_output()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser(arguments).parse_args(arguments)
    log_to_stderr("%(levelname)-7s %(message)s")
    logging.getLogger().setLevel(logging.DEBUG if options.verbose else logging.INFO)
    try:
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it; nothing may remain to be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except HushfleetError as error:
        say(f"error: {error}", error=True)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        from hushfleet.needs import too_old

        if not (old := too_old()):
            raise
        say(f"error: {type(error).__name__}: {error}. {old}", error=True)
        return 1


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    """Returns the parser; adds the command `run` to `arguments` if they name none, because a board mostly runs."""
    parser = argparse.ArgumentParser(
        prog="hushfleet-edge",
        description="Hushfleet's client for boards: trains on the device's own images, and sends\n"
        "only clipped and noised updates.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hushfleet {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{run,predict,status,add,label,listen}", required=True)
    for name, text in (
        ("run", "run the device (the default)"),
        (
            "predict",
            "classify an image or a clip of sound with the device's personalized model, or say how unusual series of "
            "sensor values are",
        ),
        ("status", "show the device's state, its model, and the privacy that it has spent"),
        ("add", "add images or clips of one class to what the device trains on"),
        ("label", "label new images or clips from the inbox, on a page for a browser or a telephone"),
        ("listen", "classify what a microphone hears, segment by segment, as lines of JSON"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="DEVICE.toml", type=Path, help="the device's configuration")
        command.add_argument("-v", "--verbose", action="store_true", help="log more")
        if name == "predict":
            command.add_argument(
                "files",
                metavar="FILE",
                type=Path,
                nargs="+",
                help="a JPEG, PNG, ... file; a WAV file at the task's rate (with the extra `sound`, which cards lack, "
                "also FLAC, ... and other rates); a CSV or .npz file of values",
            )
        if name in ("predict", "listen"):
            command.add_argument(
                "--top", type=int, default=3, metavar="N", help="classes, or unusual samples, to print (default 3)"
            )
        if name == "listen":
            command.epilog, command.formatter_class = _LISTEN, argparse.RawDescriptionHelpFormatter
            command.add_argument(
                "--from", dest="given", metavar="FILE|-",
                help="a sound file in place of the microphone; -: raw sound from a pipe, 16 bits, little-endian, mono",
            )  # fmt: skip
        if name == "add":
            command.add_argument("photos", metavar="FILE", type=Path, nargs="+", help="an image or a sound file")
            command.add_argument("--label", required=True, metavar="CLASS", help="what is in them")
        if name == "label":
            command.add_argument(
                "--wrong", action="store_true", help="show the alarms that listen has kept, to mark the false ones"
            )
            command.add_argument(
                "--host", default="127.0.0.1", metavar="ADDRESS",
                help="where to listen (default %(default)s: this board alone; 0.0.0.0: for the local network)",
            )  # fmt: skip
            command.add_argument("--port", type=int, default=8765, metavar="N", help="(default %(default)s)")
        if name == "status":
            command.add_argument(
                "--details", action="store_true", help="show more about privacy, tasks and the personalized model"
            )
        if name in ("predict", "status"):
            command.add_argument("--json", action="store_true", help="print JSON for other programs")
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    only_asks = not arguments or arguments[0] in ("-h", "--help", "--version")
    if named == "update" and not Path(named).exists():
        parser.error("update went after 0.3; releases come over the network: hushfleet release rollout")
    if named not in commands.choices and not only_asks:
        meant = difflib.get_close_matches(named or "", commands.choices, n=1)
        if named and meant and named.isalpha() and not Path(named).exists():
            parser.error(f"there is no command {named!r}; did you mean {meant[0]}?")
        arguments.insert(0, "run")
    return parser


def _run(options: argparse.Namespace) -> int:
    from hushfleet.edge_client.board.config import load_config

    config = load_config(options.config)
    from hushfleet.edge_client.agent import Agent
    from hushfleet.edge_client.board.budget_clock import BudgetClock
    from hushfleet.edge_client.board.certificate import describe_certificate
    from hushfleet.edge_client.board.data_place import describe_data
    from hushfleet.edge_client.board.process import Supervisor, return_freed_memory
    from hushfleet.edge_client.board.state_place import check_place
    from hushfleet.edge_client.duties import Duty
    from hushfleet.edge_client.storage.store import DeviceStore
    from hushfleet.wire.format.topics import check_new_name
    from hushfleet.wire.link.connection import Timing
    from hushfleet.wire.link.interface import Will
    from hushfleet.wire.link.mqtt import MqttLink

    return_freed_memory()
    for words in filter(None, (check_place(config), describe_certificate(config), describe_data(config.data))):
        logging.getLogger("hushfleet.edge").warning("%s", words)
    simulation = config.simulation
    timing = Timing(backoff_base_s=simulation.reconnect_s) if simulation and simulation.reconnect_s else None
    if config.fleet is None:
        config.broker.address  # noqa: B018 - a wrong file is an error before the store is made
        if not any(config.store_path.parent.glob("*")):  # a board that has run keeps its names
            check_new_name(config.device.id, f"{options.config}: device.id")
            check_new_name(config.device.federation, f"{options.config}: device.federation")

    def connect(store: DeviceStore, will: Will | None = None, *, enrol: bool = False) -> MqttLink:
        address = config.enrolment_address if enrol else config.broker_address
        client_id, keepalive_s = store.identity.client_id(config.device.id), config.broker.keepalive_s
        return MqttLink(address, client_id=client_id, will=will, timing=timing, keepalive_s=keepalive_s)

    stop, supervisor, caught = threading.Event(), Supervisor.from_environment(), list[int]()

    def on_signal(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if config.fleet is not None:
        from hushfleet.edge_client.fleet.trial import prove

        if not prove(config, connect, stop, supervisor):
            return INTERRUPTED if signal.SIGINT in caught else 0
    path, name, in_fleet = config.store_path, config.device.id, config.fleet is not None
    with DeviceStore(path, device=name, durable=config.is_durable, in_fleet=in_fleet) as store:
        period_s = config.limits.budget.period_s
        budget_clock = BudgetClock(store.ledger, waits=simulation is None, period_s=period_s)

        def run_agent(duties: Sequence[Duty] = (), health: BoardHealth | None = None) -> None:
            agent = Agent(
                config,
                partial(connect, store),
                store,
                stop=stop,
                supervisor=supervisor,
                duties=duties,
                health=health,
                budget_clock=budget_clock,
            )
            agent.run()

        if config.fleet is None:
            run_agent()
        else:
            from hushfleet.edge_client.fleet.membership import run_in_fleet
            from hushfleet.edge_client.fleet.newest import newest_said_at

            witness = partial(newest_said_at, config.store_path.parent)
            budget_clock = BudgetClock(store.ledger, witness=witness, period_s=period_s)
            run_in_fleet(config, store, run_agent, partial(connect, store, enrol=True), stop, supervisor)
    return INTERRUPTED if signal.SIGINT in caught else 0


def _predict(options: argparse.Namespace) -> int:
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.status import describe_model
    from hushfleet.edge_client.worker.personalized_model import personalized_model
    from hushfleet.edge_client.worker.predict import LoadedGraphs, graphs_of, predict
    from hushfleet.edge_client.worker.unusual import Judge

    config, loaded, wrong = load_config(options.config), dict[bytes, LoadedGraphs](), 0
    judge: Judge | None = None
    many = len(options.files) > 1
    with _inspected(config) as store:
        own = personalized_model(store)
        of_model = f"by {describe_model(own.kind)}, of {own.spec.task}"
        if many and not options.json:
            say(of_model)
        for file in options.files:
            try:
                if own.spec.model.targets.are_inputs:
                    judge = judge or Judge(own, config.data, graphs_of(store, own.spec, stay=True))
                    found = judge.file(file)
                    answer, told = found.to_json(), found.words(options.top)
                else:
                    prediction = predict(store, file, loaded)
                    answer, told = prediction.to_json(options.top), prediction.words(options.top)
            except BadInput as error:
                wrong += 1
                say(f"error: {error}", error=True)
                continue
            if options.json:
                say(json.dumps({"file": str(file)} | answer))
            elif many and not own.spec.model.form.sample_rate:
                say(f"{file}: {', '.join(map(str.strip, told))}")
            else:
                say(f"{file}: {of_model}" if not many else f"{file}:", *told)
    return BadInput.exit_code if wrong else 0


def _status(options: argparse.Namespace) -> int:
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.status import format_status, status

    config = load_config(options.config)
    with _inspected(config) as store:
        report = status(config, store)
    say(*([json.dumps(report)] if options.json else format_status(report, details=options.details)))
    return 0


def _add(options: argparse.Namespace) -> int:
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.labelling import class_folders

    config = load_config(options.config)
    with class_folders.opened_store(config) as store:
        label = class_folders.check_label(options.label, class_folders.class_names(config, store))
        folders, added, wrong = class_folders.ClassFolders(config.data, rate=class_folders.sample_rate(store)), 0, 0
    for photo in options.photos:
        try:
            say(f"{photo}: added as {folders.add(photo, label)}")
            added += 1
        except class_folders.AlreadyThere as error:
            say(str(error))
        except BadInput as error:
            wrong += 1
            say(f"error: {error}", error=True)
    say(f"{added} of {len(options.photos)} added" + "; the next round trains on them" * bool(added))
    return BadInput.exit_code if wrong else 0


def _label(options: argparse.Namespace) -> int:
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.labelling.desk import Desk
    from hushfleet.edge_client.labelling.server import LabelServer

    desk = Desk(load_config(options.config), wrong=options.wrong)
    with LabelServer(desk, host=options.host, port=options.port) as server:
        say(*server.describe())
        server.serve_forever()
    return 0


def _listen(options: argparse.Namespace) -> int:
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.listen.command import listen

    is_interrupted = listen(load_config(options.config), options.config, given=options.given, top=options.top)
    return INTERRUPTED if is_interrupted else 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "predict": _predict,
    "status": _status,
    "add": _add,
    "label": _label,
    "listen": _listen,
}


def _inspected(config: DeviceConfig) -> DeviceStore:
    from hushfleet.edge_client.storage.store import DeviceStore

    return DeviceStore(config.store_path, device=config.device.id, inspect=True, in_fleet=config.fleet is not None)


if __name__ == "__main__":
    sys.exit(main())
