"""A fleet on this machine: its folder, real brokers, the fleet service in a thread, boards in this process."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hushfleet.aggregator.fleet.create import create_fleet
from hushfleet.aggregator.fleet.processes import brokers_of, started
from hushfleet.aggregator.fleet.serve import serve
from hushfleet.aggregator.fleet.software.releases import name_keys
from hushfleet.aggregator.fleet.trust.device_file import device_toml
from hushfleet.aggregator.fleet.trust.folder import BrokerPart, EnrolmentPart, FleetConfig, FleetFolder, PagePart
from hushfleet.aggregator.fleet.trust.members import counted
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.board import Board as RegisteredBoard
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.edge_client.fleet.enrol import CertificateRequest, enrol
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.connection import Timing
from hushfleet.wire.link.interface import LinkEvent
from hushfleet.wire.link.mqtt import MqttLink
from support.ports import free_ports
from support.tools import need

QUICK = Timing(backoff_base_s=0.05, backoff_cap_s=0.2)
PATIENCE_S = 240.0
"""For what must come: long enough for a machine that is busy with other things."""
FEDERATION = "greenhouse"
TASK = """
name = "small"
[model]
name = "digits-cnn"
[method]
name = "dp-fedavg"
[privacy]
noise_multiplier = 1.0
clip_norm = 1.0
delta = 1e-3
[data]
name = "digits"
devices = 2
[round]
rounds = 2
min_devices = 2
"""


def make_folder(
    path: Path,
    *,
    boards: int = 2,
    task: str = TASK,
    task_file: Path | None = None,
    operator: bytes | None = None,
    **enrolment: Any,
) -> FleetFolder:
    """:param operator: public key, where the private one is to lie elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if task_file is None:
        task_file = path.with_name(f"{path.name}-task.toml")
        task_file.write_text(task)
    port, enrolment_port, page_port = free_ports(3)
    broker = BrokerPart(("127.0.0.1",), port, enrolment_port)
    folder = create_fleet(
        path,
        FleetConfig(FEDERATION, broker, EnrolmentPart(**enrolment), PagePart("127.0.0.1", page_port)),
        task_file,
        operator=operator,
    )
    with FleetRegistry(path) as registry:
        if boards:
            registry.add(counted(FEDERATION, boards, known=[], board="generic-x86"))
    return folder


def issue_token(registry: FleetRegistry, device: str, *, days: float, now: float) -> str:
    """A new token for the card of `device`, as its file holds it; the earlier ones hold no longer."""
    token = secrets.token_urlsafe(32)
    registry.add_token(device, token.encode(), expires=now + days * 86400)
    return token


class Board:
    """A board's card and state, and what it does of enrolment.

    :param token: of its card; None: one that the registry gives out.
    """

    def __init__(self, folder: FleetFolder, home: Path, device: str, *, token: str | None = None) -> None:
        self.folder, self.device, self.topics = folder, device, Topics(FEDERATION)
        state = home / "state"
        state.mkdir(parents=True, mode=0o700)
        with FleetRegistry(folder.path) as registry:
            row = registry.board(device)
            token = token if token is not None else issue_token(registry, device, days=1, now=time.time())
        self.token_file = state / "enrol.token"
        self.token_file.write_text(token)
        self.file = home / "device.toml"
        text = device_toml(folder, row, state_dir=str(state), ca_file=str(folder.ca / "ca.pem"))
        self.file.write_text(text.replace("[device]\n", "[device]\nallow_volatile_state = true\n"))
        self.config: DeviceConfig = load_config(self.file)
        self.store = DeviceStore(self.config.store_path, device=device, durable=False)
        self.tls = TlsIdentity(state, device=device)

    def asking(self) -> CertificateRequest:
        return CertificateRequest(self.config, self.store, self.tls)

    def enrolment_link(self) -> MqttLink:
        return MqttLink(self.config.enrolment_address, client_id=self.device, timing=QUICK)

    def enrol(self, *, patience_s: float = 20.0) -> bool:
        stop = threading.Event()
        return enrol(self.asking(), self.enrolment_link, self.topics, self.device, stop, patience_s=patience_s)

    def link(self, *filters: str) -> MqttLink:
        """To the fleet's broker, with the board's own certificate."""
        link = MqttLink(self.config.broker_address, client_id=self.device, timing=QUICK)
        for topic_filter in filters:
            link.subscribe(topic_filter)
        link.open()
        return link

    def with_limits(self, **limits: Any) -> DeviceConfig:
        return replace(self.config, limits=replace(self.config.limits, **limits))


def add_enrolled(folder: FleetFolder, *devices: str) -> None:
    """Adds boards that have enrolled, each with a key made of its id."""
    with FleetRegistry(folder.path) as registry:
        for device in devices:
            key = Identity.from_bytes(device.encode().ljust(32)).public_key
            registry.add([RegisteredBoard(device, "generic-x86", public_key=key)])
        registry.write("UPDATE boards SET standing = 'enrolled' WHERE standing = 'new'")


def adopt(folder: FleetFolder, *keys: Identity, threshold: int = 1) -> None:
    """Root of the fleet says that these keys sign its releases from now on."""
    named = [key.public_key.hex() for key in keys]
    name_keys(folder, keys=named, threshold=threshold, holders=[folder.root_key])


@contextlib.contextmanager
def served(folder: FleetFolder) -> Iterator[threading.Thread]:
    """Both brokers as child processes, and the service in a thread."""
    need("mosquitto")
    with started(folder, brokers_of(folder)), serving(folder) as thread:
        yield thread


@contextlib.contextmanager
def serving(folder: FleetFolder) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(folder.path, stop))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def until(condition: Callable[[], Any]) -> Any:
    """What `condition` gives, once it is true. It is asked less and less often: the question takes a core, too."""
    give_up, pause_s = time.monotonic() + PATIENCE_S, 0.005
    while not (value := condition()):
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(pause_s)
        pause_s = min(0.05, 1.2 * pause_s)
    return value


def event_of(link: MqttLink, kind: type[LinkEvent]) -> Any:
    """The next event of this kind; others are passed over."""
    give_up = time.monotonic() + PATIENCE_S
    while (left := give_up - time.monotonic()) > 0:
        event = link.receive(left)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} came")
