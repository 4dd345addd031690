"""The folder of a fleet. `hushfleet fleet init` makes it, and all other commands take it.

Anyone with `ca/ca.key` can admit any device; anyone with the operator's private key decides who may take part in secure
aggregation. The operator's key may be elsewhere; `operator.pub` is its public half. The aggregator needs neither key:
it reads `aggregator/`, `task.toml`, `fleet.toml`, `ca/ca.pem`, `admissions` and `roster`, and writes only to
`WRITTEN_BY_AGGREGATOR`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from hushfleet.aggregator.fleet.trust.authority import CA_DAYS
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.device_toml import check_sections
from hushfleet.privacy.terms import HONEST_FRACTION, MIN_DEVICES
from hushfleet.schema import Checked, NotNegative, Port, Positive, Share, read_file
from hushfleet.secure.membership_list import MAX_DEVICES
from hushfleet.wire.format.topics import Name, check_name
from hushfleet.written import read_written

FILE_NAME = "fleet.toml"
SERVICE_NAME = "fleet"
AGGREGATOR_NAME = "aggregator"
HOME_ASSISTANT_NAME = "homeassistant"
WRITTEN_BY_AGGREGATOR = ("aggregator", "runs", "cache")

Host = Annotated[
    str,
    Meta(
        pattern=r"^[0-9A-Za-z]([0-9A-Za-z.-]{0,251}[0-9A-Za-z])?\Z|^[0-9a-fA-F:.]+\Z",
        description="a host name or an IP address",
    ),
]
DayCount = Annotated[float, Meta(gt=0, le=CA_DAYS, description=f"days, more than 0 and at most {CA_DAYS}")]
Policy = Literal["token", "list", "manual"]


@dataclass(frozen=True)
class BrokerPart(Checked):
    """The addresses of the broker.

    :param names: host names and addresses in the broker's certificate; boards use the first.
    :param port: for devices with a certificate.
    :param enrolment_port: for boards that have none yet.
    :param connect: where the aggregator and the fleet service reach the broker; also in its certificate.
    """

    names: Annotated[tuple[Host, ...], Meta(min_length=1)]
    port: Port = 8883
    enrolment_port: Port = 8884
    connect: Host = "127.0.0.1"


@dataclass(frozen=True)
class EnrolmentPart(Checked):
    """The rules of enrolment.

    :param policy: `token`: any board with a valid token; `list`: only boards whose public key was given to `fleet add`;
        `manual`: after `hushfleet fleet approve`. Each policy admits a board whose key is known.
    :param token_days: how long tokens are valid.
    :param certificate_days: how long certificates are valid.
    """

    policy: Policy = "token"
    token_days: DayCount = 90.0
    certificate_days: DayCount = 730.0


@dataclass(frozen=True)
class UpdatesPart(Checked):
    """The stages of a roll-out: to one board, then to a share of them, then to all.

    :param second_stage: the share of the boards in the second stage.
    :param error_budget: the share of a stage's boards that may go back, or fall silent, before the roll-out stops; in
        the first stage no board may.
    :param soak_minutes: how long the boards of a stage run the release before the next stage begins.
    :param kib_per_second: limit of the rate at which a release is sent, whatever the number of boards.
    """

    second_stage: Share = 0.1
    error_budget: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    soak_minutes: NotNegative = 10.0
    kib_per_second: Positive = 1024.0


@dataclass(frozen=True)
class PagePart(Checked):
    """The address at which the status page listens."""

    host: str = "0.0.0.0"
    port: Port = 8443


@dataclass(frozen=True)
class HomeAssistantPart(Checked):
    """The switch for publishing the figures of `/metrics` by Home Assistant's MQTT discovery."""

    enabled: bool = False


@dataclass(frozen=True)
class SecureAggregationPart(Checked):
    """The operator's limits for secure aggregation, which are signed into the membership list and written on each card.

    :param honest_fraction: least share of honest boards. Boards decline a task that assumes more.
    :param min_devices: the fewest boards in a sum. Boards decline a task that opens smaller ones.
    """

    honest_fraction: Share = HONEST_FRACTION
    min_devices: Annotated[int, Meta(ge=2, le=MAX_DEVICES, description="2 or more")] = MIN_DEVICES


@dataclass(frozen=True)
class FleetConfig(Checked):
    """The content of fleet.toml.

    :param device: defaults for DEVICE.toml, by section: above all `data` and `limits`.
    """

    federation: Name
    broker: BrokerPart
    enrolment: EnrolmentPart = field(default_factory=EnrolmentPart)
    page: PagePart = field(default_factory=PagePart)
    device: dict[str, Any] = field(default_factory=dict)
    updates: UpdatesPart = field(default_factory=UpdatesPart)
    secure_sums: SecureAggregationPart = field(default_factory=SecureAggregationPart)
    home_assistant: HomeAssistantPart = field(default_factory=HomeAssistantPart)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sections(self.device, "device")


def check_ports(broker: BrokerPart, page: PagePart) -> None:
    """Raises `BadInput` if one port is used twice.

    Brokers and page on one machine need different ports; a local `connect` means that the page runs beside the broker.
    """
    named = {"broker.port": broker.port, "broker.enrolment_port": broker.enrolment_port}
    if broker.connect in ("127.0.0.1", "::1", "localhost"):
        named["page.port"] = page.port
    for key, port in named.items():
        if other := next((each for each, taken in named.items() if each != key and taken == port), None):
            raise BadInput(f"{key} and {other} are both {port}: each needs a port of its own")


class FleetFolder:
    """Paths below DIR, and its configuration. Raises `BadInput` if DIR is no fleet's folder."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.task = self.path / "task.toml"
        self.ca = self.path / "ca"  # `ca.pem`, which everybody may have, and `ca.key`
        self.broker = self.path / "broker"
        # `cert.pem`, `cert.key`, `identity.key`, which boards pin, and what it writes of boards, `devices.sqlite`
        self.aggregator = self.path / "aggregator"
        # `cert.pem` and `cert.key` for the broker, `page.pem` and `page.key` for the status page, and `identity.key`,
        # which signs the messages to boards
        self.service = self.path / "service"
        self.service_key = self.service / "identity.key"
        self.operator_public = self.path / "operator.pub"
        self.operator_key = self.path / "operator.key"  # may be elsewhere; so may `release_key`
        self.release_key = self.path / "release.key"
        self.root_key = self.path / "root.key"  # signs the list of release keys; should be elsewhere
        self.root_public = self.path / "root.pub"
        self.release_keys = self.path / "release_keys"
        self.newest_key = self.service / "newest.key"  # signs each day which release is the newest
        self.membership_list = self.path / "roster"
        self.admissions = self.path / "admissions"  # the list by which the aggregator knows who may take part
        self.paused = self.path / "paused"  # while it exists, the aggregator lets nobody train
        self.round = self.path / "round.toml"  # of `fleet set`: numbers of boards that hold while the task runs
        self.releases = self.path / "releases"
        self.unsigned = self.path / "unsigned"  # releases that lack a signature
        self.logs = self.path / "log"  # of `hushfleet fleet up`; services of systemd log to its journal
        file = self.path / FILE_NAME
        if not file.exists():
            raise BadInput(f"{path} is not the folder of a fleet: there is no {FILE_NAME}; see: hushfleet fleet init")
        self.config: FleetConfig = read_written(FleetConfig, file)
        broker = self.config.broker
        check_ports(broker, self.config.page)
        here, outside = (f"mqtts://{url_host(each)}" for each in (broker.connect, broker.names[0]))
        # for the aggregator and the fleet service, and for boards
        self.local_broker, self.local_enrolment = f"{here}:{broker.port}", f"{here}:{broker.enrolment_port}"
        self.broker_url, self.enrolment_url = f"{outside}:{broker.port}", f"{outside}:{broker.enrolment_port}"
        if (self.path / "devices.sqlite").exists():
            raise BadInput(
                "the list of devices is in the aggregator's own folder now. While nothing of the fleet runs: "
                f"mv {self.path / 'devices.sqlite'}* {self.aggregator}"
            )
        if (self.path / "run").exists():
            raise BadInput(
                f"each run of a fleet has a folder of its own now: mv {self.path / 'run'} {self.path / 'runs'}/NAME, "
                "with the name that its task.toml has"
            )

    def wifi(self, profile: str) -> Path:
        """Returns the file with network and password of a Wi-Fi profile."""
        return self.path / "wifi" / f"{profile}.toml"

    @property
    def run(self) -> Path:
        """The run folder, named after the task in `task.toml`. Raises `BadInput` for a file without a name."""
        return self.path / "runs" / check_name(str(read_file(self.task).get("name")), f"name in {self.task}")


def url_host(name: str) -> str:
    """Formats a host name or an IP address for a URL."""
    return f"[{name}]" if ":" in name else name
