"""Reads DEVICE.toml: who this device is, where its broker and its data are, and what its owner allows.

Every error names the file, the key, the value and what is accepted, because the person who reads it may stand beside
the board.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hushfleet.at_need import at_need
from hushfleet.data import form as forms
from hushfleet.data.form import FOLDERS, SOUND_KEYS, OwnData, SampleForm, form_rules
from hushfleet.durations import duration_s
from hushfleet.edge_client.storage.state_files import STORE, TLS_CERTIFICATE, TLS_KEY
from hushfleet.errors import BadInput, format_value
from hushfleet.firmware_profiles import load_board
from hushfleet.paths import expanded, is_closed
from hushfleet.privacy.budget import DEFAULT_DELTA, Budget
from hushfleet.privacy.terms import HONEST_FRACTION, MIN_DEVICES, Accounting
from hushfleet.public_keys import PublicKeyText
from hushfleet.schema import (
    AtLeast1,
    Checked,
    Count,
    Fraction,
    Positive,
    PositiveOrInf,
    Probability,
    Share,
)
from hushfleet.wire.format.spec import ModelSpec, PrivacySpec
from hushfleet.wire.format.topics import Name
from hushfleet.written import read_written

if TYPE_CHECKING:
    from hushfleet.wire.link import address as link_address
else:
    link_address = at_need("hushfleet.wire.link.address")

_IN_FILES = "left out with kind 'arrays': parts of one file cannot be deleted"
USABLE_MEMORY = 0.6  # share of the board's memory, the same as the systemd unit's MemoryHigh


@dataclass(frozen=True)
class DeviceSection(Checked):
    """The identity of this device, and the place of its store.

    :param id: unique in the fleet, and the name in the certificate.
    :param state_dir: holds the store: private key, personalized model, ledger; one folder for each device, never shared
        or copied.
    :param federation: the aggregator's rounds that it joins.
    :param board: a profile of `hushfleet boards`; determines the memory for training.
    :param roster_key: the operator's public key, 64 hex digits: the device joins secure aggregation only if this key
        has signed the list of permitted devices; without the key, it trusts the aggregator.
    :param accelerator: `auto`: training uses a GPU if ONNX Runtime has CUDA and the GPU is faster here; `cuda`: if the
        GPU computes the same as the processor; `cpu`: never.
    :param allow_volatile_state: FOR TESTS: start also where the state directory is forgotten with the power, on a file
        system in memory or an overlay. Health reports it.
    """

    id: Name
    state_dir: str
    federation: Name = "default"
    board: str = "generic-x86"
    roster_key: PublicKeyText | None = None
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    allow_volatile_state: bool = False


@dataclass(frozen=True)
class BrokerSection(Checked):
    """The address of the broker, and how device and broker identify themselves.

    :param url: ports 1883 and 8883 by default.
    :param ca_file: PEM, who may sign the broker's certificate; left out, the system's authorities.
    :param cert_file: PEM, the board's certificate; needs `mqtts://`.
    :param key_file: of the certificate.
    :param username: for brokers with user names and passwords.
    :param password_file: its first line is the password.
    :param server_key: the aggregator's public key, 64 hex digits; without it the first one seen is pinned.
    :param keepalive_s: the longest time without a message. If a router drops idle connections earlier, the client
        shortens it after one lost connection; brokers of `hushfleet broker` accept at most 120.
    """

    url: str
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    username: str | None = None
    password_file: str | None = None
    server_key: PublicKeyText | None = None
    keepalive_s: Annotated[int, Meta(ge=5, le=120)] = 60

    rules = {
        "broker.url": (
            lambda broker: (
                not broker.url.startswith(("mqtt://", "mqtts://")) and {"shown": broker.url.rpartition("@")[2]}
            ),
            "url = {shown!r}: must be mqtt://HOST[:PORT] or mqtts://HOST[:PORT]",
        ),
        "broker.key-needs-certificate": (
            lambda broker: (broker.cert_file is None) != (broker.key_file is None),
            "key_file = {key_file!r}: must be given together with cert_file",
        ),
    }

    @property
    def address(self) -> link_address.BrokerAddress:
        """The broker's address. Raises `BadInput` if a file cannot be read or has the wrong content."""
        return link_address.BrokerAddress.parse(
            self.url,
            username=self.username,
            password_file=self.password_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )


@dataclass(frozen=True)
class FleetSection(Checked):
    """The operator of the fleet. With it the board gets its own certificate, and updates; `hushfleet flash` writes it.

    :param operator_key: public key, 64 hex digits: signs the list of devices that may take part in secure aggregation
        (unless `device.roster_key` is given).
    :param service_key: public key, 64 hex digits, of the fleet service: signs the answers to enrolment and the offers
        of releases. Without it `operator_key` is used, as in files of earlier versions.
    :param enrol_url: where a board without a certificate asks for one.
    :param token_file: the one-time token; erased after its use.
    :param releases: the folder of `slots.py`; if it has no slots, this board takes no updates.
    """

    operator_key: PublicKeyText
    enrol_url: str
    token_file: str | None = None
    service_key: PublicKeyText | None = None
    releases: str = "/opt/hushfleet"


@dataclass(frozen=True)
class OwnDataSection(Checked):
    """Place of the device's own data.

    :param kind: `folder`, one sub-folder of images for each class; `sound`, one of sound files; `arrays`, an .npz of
        samples `x` and labels `y`; `csv`, one line for each sample, in one file or in the files of a folder.
    :param path: the folder or the file.
    :param held_out: more data that are never trained on: `status` says how many of these the own
        model gets right. This stays on the device.
    :param unlabelled: a folder of images without labels, for the personalized head after a task's last round. They take
        part in no round, and nothing of them leaves the device.
    :param inbox: a folder of new images that wait for a label (`label`); nothing is trained on them.
    :param keep: how long an image or a CSV file stays, such as `90d`; after that the device deletes it.
    :param max_mib: the most disk space that these files may take; beyond it the oldest are deleted. 0: no limit. One
        large file then decides about others, so tasks that protect single records refuse it (`board/by_content.py`).
    :param columns: how this board's CSV files call the columns of values, in the order in which the task takes them.
    :param decimal: the decimal mark of CSV files. This key and the ones around it replace what the task says.
    :param labels: whether labels are `names` of classes or `numbers` from 0.
    :param values: whether values are `pixels` from 0 to 255, `numbers` or `tokens`.
    :param vocabulary: how many tokens there are.
    :param label_column: how this board's CSV files call the column of labels; likewise `device_column`, `time_column`
        and `record_column`.
    :param device_column: a column that is no value: all lines of a board are its own.
    :param time_column: a column of times, by which lines are sorted.
    :param record_column: lines with the same entry are the steps of one sample.
    :param layout: whether arrays have the axis of channels first or last.
    :param bit_depth: 9 to 16: pixels are whole numbers of so many bits.
    """

    kind: OwnData
    path: str
    held_out: str | None = None
    unlabelled: str | None = None
    inbox: str | None = None
    keep: str | None = None
    max_mib: Count = 0
    columns: forms.Columns = ()
    decimal: forms.DecimalMark = ""
    labels: forms.LabelKind = ""
    values: forms.ValueKind = ""
    vocabulary: forms.Vocabulary = 0
    label_column: forms.ColumnName = ""
    device_column: forms.ColumnName = ""
    time_column: forms.ColumnName = ""
    record_column: forms.ColumnName = ""
    layout: forms.LayoutKind = ""
    bit_depth: forms.BitDepth = 0

    rules = {
        "data.inbox-needs-folder": (
            lambda data: data.inbox is not None and data.kind not in ("folder", "sound"),
            "inbox = {inbox!r}: must be left out unless kind is 'folder' or 'sound'",
        ),
        "data.keep-needs-files": (
            lambda data: data.keep and data.kind == "arrays",
            f"keep = {{keep!r}}: must be {_IN_FILES}",
        ),
        "data.max-mib-needs-files": (
            lambda data: data.max_mib and data.kind == "arrays",
            f"max_mib = {{max_mib}}: must be {_IN_FILES}",
        ),
        **form_rules("data", lambda data: data.kind, without=SOUND_KEYS),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None:
            try:
                duration_s(self.keep)
            except ValueError as error:
                raise ValueError(f"keep = {error}") from error

    def check_kind(self, model: ModelSpec) -> None:
        """Raises `BadInput` if a task's samples are sound and these files are images, or the other way round."""
        if self.kind in FOLDERS and (self.kind == "sound") != bool(model.form.sample_rate):
            needed = "sound" if model.form.sample_rate else "folder' of images, or a table, not 'sound"
            raise BadInput(f"data.kind = {self.kind!r}: the task needs kind '{needed}'")

    def here(self, model: ModelSpec) -> ModelSpec:
        """Returns a task's model with the form of samples that this board's files have."""
        return replace(model, form=SampleForm.of(self).merged(model.form))


@dataclass(frozen=True)
class LimitsSection(Checked):
    """Limits that the device's owner sets.

    :param epsilon_server: the limit of the privacy loss against the aggregator, over all tasks; inf allows any. With
        `per` it applies to each period; without it, for ever.
    :param per: length of a period, such as "90d". Needs `epsilon_lifetime`.
    :param epsilon_lifetime: with `per`, the limit over all periods together; inf allows any.
    :param delta: the delta of that epsilon.
    :param memory_mib: memory for training; 0 takes a share of the board's memory.
    :param noise_preference: how many times the standard noise this device adds, if a method lets devices choose
        (APDP-FL).
    :param accounting: the parties that this device trusts. `strict`: nobody; the device declines tasks with secure
        sums, because their noise is divided. `secure`: enough of the other devices; such tasks are accepted. Both
        decline tasks that send functions of the data without noise (`Cost.raw`). `as-published` accepts all tasks, and
        the ledger charges infinity.
    :param min_noise_multiplier: the smallest ratio of noise to sensitivity in what this device sends; 0: any.
    :param noise_split: the most devices among which the noise may be divided; 0: as many as the task package names.
    :param min_devices: the fewest devices of secure aggregation. If an operator has signed a higher number, that
        applies.
    :param honest_fraction: the largest share of the devices that a task with secure aggregation may assume to be
        honest. If an operator has signed a smaller share, that applies.
    :param tell_new: whether the device may skip rounds while it has fewer new samples than a task's
        `schedule.after_new`: this reveals that it has so few, and no charge covers it.
    :param tell_drift: whether the device answers, with noise and for a charge, whether its personalized model has
        become worse.
    :param constant_time: whether a round's end is announced at a time that the task determines, and not when training
        ends; None: only with the unit `record`, outside simulations.
    """

    epsilon_server: PositiveOrInf
    delta: Probability = DEFAULT_DELTA
    memory_mib: Count = 0
    noise_preference: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    accounting: Accounting = "strict"
    min_noise_multiplier: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    noise_split: Count = 0
    min_devices: Count = MIN_DEVICES
    honest_fraction: Share = HONEST_FRACTION
    constant_time: bool | None = None
    tell_new: bool = False
    tell_drift: bool = False
    per: str | None = None
    epsilon_lifetime: PositiveOrInf | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.budget  # raises for limits that contradict each other

    @cached_property
    def budget(self) -> Budget:
        """The owner's limits on the privacy loss, which the ledger must not exceed."""
        budget = Budget.of(asdict(self))
        assert budget is not None
        return budget

    @classmethod
    def of_simulation(cls, privacy: PrivacySpec, **others: Any) -> LimitsSection:
        """Returns limits that allow whatever the task asks, FOR SIMULATION ONLY. Simulated data have no owner, and one
        person is operator, aggregator and every board at once, so limits would have no effect."""
        secure = privacy.secure
        trust = {} if secure is None else {"min_devices": secure.min_devices, "honest_fraction": secure.honest_fraction}
        limits = {"epsilon_server": math.inf, "delta": privacy.delta, "accounting": privacy.accounting}
        return cls(**{**limits, **trust, **others})


@dataclass(frozen=True)
class WorkerSection(Checked):
    """The process that trains for the client, without keys and without a network.

    :param keep_s: seconds that it waits for the next round of the same task after it has finished one. It then starts
        faster, and its memory is free after this time. 0: each round has a new process.
    """

    keep_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0


@dataclass(frozen=True)
class ListenSection(Checked):
    """The owner's rules for sound that the command `listen` hears. It stays on the board, but for `mqtt`.

    :param microphone: ALSA's name of it; `arecord -L` lists them.
    :param keep: what is kept in `data.inbox`, where it waits for a label: `loud`, after a segment at `loud_dbfs` or
        above, the loudest stretch of it and the segments before and after it, as long as one; `unsure`, a segment where
        the likeliest class has less than `unsure_below`, or the score of unusual sound is 0.5 to 2; `key`, the loudest
        stretch of the last three when somebody presses Enter, or sends the process SIGUSR1; `none`.
    :param loud_dbfs: decibels below the loudest possible sound, of a whole segment.
    :param unsure_below: a probability.
    :param most_kept: clips that wait at most: a newer one replaces the oldest that `listen` has kept.
    :param alarm_above: a class other than `no_alarm` is an alarm from this probability on; unusual sound always is.
    :param no_alarm: the class of everything that the others are not; for `label --wrong` of unusual sound `normal`.
    :param keep_alarms: the number of alarms, the newest, whose segments are kept for `label --wrong`.
    :param mqtt: the owner's own broker, `mqtt://[USER:PASSWORD@]HOST[:PORT]`, where Home Assistant reads the class, its
        probability or the score, and the loudness. The fleet's is refused.
    """

    microphone: str = "default"
    keep: Literal["none", "loud", "unsure", "key"] = "none"
    loud_dbfs: Annotated[float, Meta(ge=-100, le=0)] = -30.0
    unsure_below: Fraction = 0.6
    most_kept: AtLeast1 = 1000
    alarm_above: Fraction = 0.5
    no_alarm: str = "none of these"
    keep_alarms: Count = 0
    mqtt: str | None = None


@dataclass(frozen=True)
class SimulationSection(Checked):
    """Settings FOR SIMULATION ONLY: a seed makes the noise predictable, so there is no privacy.

    :param seed: of the noise and of all else that is drawn.
    :param index: the device's number, part of the seed.
    :param common_test: .npz that every device is tested on.
    :param local_test: .npz of this device's own held-out samples, or of one bit for each common sample.
    :param metrics: JSON lines are appended to it; they are never sent.
    :param own_metrics: the task's own metrics, `path/to/file.py:NAME`, which are measured on `local_test`.
    :param reconnect_s: first delay of a reconnect.
    :param durable: the store is synced as in the field, for simulated power cuts.
    """

    seed: Annotated[int, Meta(ge=0)]
    index: Count
    common_test: str | None = None
    local_test: str | None = None
    metrics: str | None = None
    own_metrics: tuple[str, ...] = ()
    reconnect_s: Positive | None = None
    durable: bool = False

    gone = dict.fromkeys(
        ("slowdown", "write_mb_s"), "hushfleet simulate --boards plays slow boards and disks on a virtual clock"
    )


@dataclass(frozen=True)
class DeviceConfig(Checked):
    """All of DEVICE.toml; paths are absolute once `load_config` has read it."""

    device: DeviceSection
    broker: BrokerSection
    data: OwnDataSection
    limits: LimitsSection
    worker: WorkerSection = WorkerSection()
    listen: ListenSection = ListenSection()
    simulation: SimulationSection | None = None
    fleet: FleetSection | None = None

    @property
    def store_path(self) -> Path:
        return Path(self.device.state_dir) / STORE

    @property
    def is_durable(self) -> bool:
        """Whether what is stored survives a power cut."""
        return self.simulation is None or self.simulation.durable

    @property
    def broker_address(self) -> link_address.BrokerAddress:
        """The broker's address, with the certificate of the fleet unless the file names another. Raises `BadInput`."""
        broker, folder = self.broker, Path(self.device.state_dir)
        if self.fleet is not None and broker.cert_file is None:
            broker = replace(broker, cert_file=str(folder / TLS_CERTIFICATE), key_file=str(folder / TLS_KEY))
        return broker.address

    @property
    def enrolment_address(self) -> link_address.BrokerAddress:
        """The address at which a board of a fleet asks for its certificate. Raises `BadInput`."""
        if self.fleet is None:
            raise BadInput("this board has no section [fleet], so it cannot ask for a certificate")
        return link_address.BrokerAddress.parse(self.fleet.enrol_url, ca_file=self.broker.ca_file)

    @property
    def server_key(self) -> bytes | None:
        return bytes.fromhex(self.broker.server_key) if self.broker.server_key else None

    @property
    def service_key(self) -> bytes:
        """The public key of the fleet service. Raises `BadInput` for a board without a fleet."""
        if self.fleet is None:
            raise BadInput("this board has no section [fleet], so it has no fleet service")
        return bytes.fromhex(self.fleet.service_key or self.fleet.operator_key)

    @property
    def roster_key(self) -> bytes | None:
        key = self.device.roster_key or (self.fleet.operator_key if self.fleet else None)
        return bytes.fromhex(key) if key else None

    @property
    def memory_mib(self) -> int:
        """Memory that training may use, MiB. Raises `BadInput` for an unknown board."""
        if self.limits.memory_mib:
            return self.limits.memory_mib
        return int(USABLE_MEMORY * float(load_board(self.device.board).memory_mib))


_PATHS: dict[str, tuple[str, ...]] = {
    "device": ("state_dir",),
    "broker": ("ca_file", "cert_file", "key_file", "password_file"),
    "data": ("path", "held_out", "unlabelled", "inbox"),
    "simulation": ("common_test", "local_test", "metrics"),
    "fleet": ("token_file",),
}


def load_config(path: Path) -> DeviceConfig:
    """Reads DEVICE.toml; relative paths in it are relative to the file. Raises `BadInput`."""
    if not os.path.exists(path) and not is_closed(path):
        raise BadInput(f"there is no file {path}; see `hushfleet-edge --help` for an example")
    config = read_written(DeviceConfig, path)
    try:
        load_board(config.device.board)
    except BadInput as error:
        raise BadInput(f"{path}: device.board = {format_value(config.device.board)}: {error}") from error
    base = path.resolve().parent
    sections: dict[str, Any] = {}
    for name, keys in _PATHS.items():
        section = getattr(config, name)
        if section is not None:
            given = {key: getattr(section, key) for key in keys}
            try:
                absolute = {key: str(base / expanded(value, f"{name}.{key}")) for key, value in given.items() if value}
            except ValueError as error:
                raise BadInput(f"{path}: {error}") from error
            sections[name] = replace(section, **absolute)
    config = replace(config, **sections)
    if config.data.inbox is not None:
        inbox, images = (Path(os.path.realpath(each)) for each in (config.data.inbox, config.data.path))
        if inbox.is_relative_to(images) or images.is_relative_to(inbox):
            raise BadInput(
                f"{path}: data.inbox = {config.data.inbox!r} and data.path = {config.data.path!r}: one lies in the "
                "other; give the images that wait for a label a folder of their own"
            )
    return config
