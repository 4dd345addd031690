"""The task file: what a person writes in TOML, validated into typed configuration.

Used by the aggregator and the simulator; devices get the resolved `hushfleet.config.spec.TaskSpec` instead.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.config.schema import (
    Checked,
    Count,
    PositiveOrInf,
    Probability,
    Share,
    from_plain,
    read_file,
    to_plain,
)
from hushfleet.config.spec import Accounting, Augment, PrivacySpec, Rounds, SecureSpec, Step, Unit, WireSpec
from hushfleet.errors import BadInput, HushfleetError, Malformed, PrivacyError
from hushfleet.methods import find_method
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.methods.server import Mean
from hushfleet.methods.sums import check_sums
from hushfleet.privacy.accounting.epsilon import Accountant, check_delta, noise_multiplier_for
from hushfleet.privacy.record import gradients_factor
from hushfleet.privacy.ring import least_bits
from hushfleet.secure.committee import least_honest
from hushfleet.secure.field import PRIMES
from hushfleet.wire.format.topics import Name

DataSet = Literal["digits", "mnist", "fashion-mnist", "emnist", "cifar10", "cifar100", "svhn", "folder"]
Partition = Literal["iid", "dirichlet-class", "dirichlet-device", "pathological"]
RECORD_DELTA = 1e-5
LEAST_SHARE = 0.9  # of a cohort, without which a secure sum is not opened
_AtLeast1 = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class ModelSection(Checked):
    """`[model]`: one of the compact networks, or `linear`, which can be given features in place of images.

    `features` are fixed and come with the task: `scattering` (28x28 grey, 32x32 colour and the like), `filters` (8x8),
    or an ONNX file of your own that takes the task's images, with pixels in [0, 1], and gives `[batch, features]`; a
    relative path starts at the task file's folder (in an override: at the working directory).
    """

    name: str
    features: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features is not None and self.name != "linear":
            raise ValueError(f"features go with name = 'linear', not {self.name!r}, which takes images")
        if self.features is not None and self.features.endswith(".onnx"):  # absolute, as DataSection.path
            object.__setattr__(self, "features", str(Path(self.features).expanduser().absolute()))


@dataclass(frozen=True)
class MethodSection(Checked):
    """`[method]`: its name and its own settings, which the method's configuration class checks."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.config()
        except HushfleetError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def of(cls, plain: Any) -> MethodSection:
        """A table with `name` beside the settings. Raises `Malformed`."""
        if not isinstance(plain, dict) or not isinstance(plain.get("name"), str):
            raise Malformed("method: expected a table with a name")
        try:
            return cls(plain["name"], {key: value for key, value in plain.items() if key != "name"})
        except ValueError as error:
            raise Malformed(str(error)) from error

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings}

    def config(self) -> TrainingConfig:
        return from_plain(find_method(self.name).config, self.settings, where="method")

    def parts(self, privacy: PrivacySpec, rounds: int) -> Method:
        """The method's parts, before they are bound to a network."""
        return find_method(self.name).parts(self.config(), privacy, rounds)


@dataclass(frozen=True)
class PrivacySection(Checked):
    """`[privacy]`: what is promised, and the noise that it takes.

    Give `noise_multiplier`, or `epsilon` to have it found. With `as-published`, `epsilon` is the papers' number:
    against whoever sees the aggregate only (epsilon_release); with `strict` it is against the server as well.
    `delta` is one over the number of devices as in the papers, and a tenth of that with `strict`.

    With `secure` the server sees nothing but sums (`hushfleet.secure`), and `epsilon` is against it. At least
    `honest_fraction` of the devices are taken to be honest: the noise is divided among those that are left of the
    fewest devices of a sum (`round.min_updates`) when all others are there. `delta` is 1e-5 by default.

    `accountant` turns noise into epsilon and back: `exact`, or `rdp` (Rényi), the looser one that the papers used.

    `reading` says what `epsilon` counts: `user-level` counts rounds with every device taking
    part; `client-sampling` counts the cohort as a Poisson sample of the devices that nobody sees (DP-FedSim), though
    the broker does; `pooled-sampling` is FedDPA's public accountant, which counts batches drawn from the pooled
    records although that is not what is run.

    With `unit = "record"` each gradient is noised (DP-SGD): `clip_norm` bounds each record's gradient, a batch takes
    a record with probability `sample_rate` (by default the batch size over an even share of the training records),
    a round has `local_epochs / sample_rate` batches, or `local_steps`, and `epsilon` is against the server, over all
    rounds.

    In the field a device's budget and preference are its owner's (DEVICE.toml, `[limits]`). In a simulation each
    device allows `budget` against the server, and where the method lets devices choose their noise each wants it
    1 plus a normal deviation of `preference_std` times the standard, within 0.2 to 5.
    """

    unit: Unit = "device"
    accounting: Accounting = "as-published"
    clip_norm: PositiveOrInf = 0.5
    noise_multiplier: Annotated[float, Meta(ge=0, le=1000)] | None = None
    epsilon: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    delta: Probability | None = None
    honest_fraction: Share = 0.9
    sample_rate: Share | None = None
    accountant: Accountant = "exact"
    reading: Literal["user-level", "client-sampling", "pooled-sampling"] = "user-level"
    budget: PositiveOrInf = math.inf
    preference_std: Annotated[float, Meta(ge=0, le=10)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier is not None and self.epsilon is not None:
            raise ValueError("give noise_multiplier or epsilon, not both")
        if self.sample_rate is not None and self.unit != "record":
            raise ValueError("sample_rate belongs to unit = 'record'")
        if self.reading != "user-level" and self.unit == "record":
            raise ValueError("reading belongs to unit = 'device'; a record's epsilon has one accountant")
        if math.isinf(self.clip_norm) and (self.noise_multiplier or self.epsilon):
            raise ValueError("clip_norm = inf: must be finite where noise is added, since the noise is scaled to it")


@dataclass(frozen=True)
class DataSection(Checked):
    """`[data]`: the data set, and how a simulation divides it among devices.

    For `folder`, `class_names` and `input_shape` say what the devices' class folders hold; `path` is where a
    simulation finds `train/<class>/*` and `test/<class>/*`, and an aggregator in the field its public test set. A
    relative path starts at the task file's folder (in an override: at the working directory).

    `augment = "flip-crop"` flips images at random and moves them by up to 4 pixels before each training step.

    With `test_fraction = 0` a device trains on all of its share, and its own-distribution test part is drawn from
    the common test set by its label shares.
    """

    name: DataSet
    devices: Annotated[int, Meta(ge=1, le=100_000)] = 10
    partition: Partition = "iid"
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    classes_per_device: _AtLeast1 | None = None
    test_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    min_samples: Annotated[int, Meta(ge=2)] = 10
    limit: _AtLeast1 | None = None
    augment: Augment = "none"
    path: Path | None = None
    class_names: tuple[str, ...] = ()
    input_shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:  # absolute, since a run is resumed from a copy of the task, from wherever
            object.__setattr__(self, "path", self.path.expanduser().absolute())
        if self.partition.startswith("dirichlet") and self.alpha is None:
            raise ValueError(f"partition = {self.partition!r} needs alpha, for example alpha = 1.0")
        if self.partition == "pathological" and self.classes_per_device is None:
            raise ValueError("partition = 'pathological' needs classes_per_device, for example 2")
        if len(set(self.class_names)) != len(self.class_names):
            raise ValueError(f"class_names = {list(self.class_names)}: each name may stand there once")
        if self.name == "folder" and (not self.class_names or self.input_shape is None):
            raise ValueError("name = 'folder' needs class_names and input_shape, such as [3, 32, 32]")
        if self.name != "folder" and self.path is not None:
            raise ValueError(f"path belongs to name = 'folder'; where {self.name!r} lies is said by --data-dir")


@dataclass(frozen=True)
class RoundSection(Checked):
    """`[round]`: how many rounds, who takes part, when a round closes.

    A round closes when `quorum` of the cohort was accepted, when everybody has answered, or after
    `deadline_s` with at least `min_updates`; with fewer it is extended.

    With `privacy.accounting = "secure"` no sum of fewer than `min_updates` is ever opened; left out, it is nine tenths
    of the cohort.

    `aggregation` is what is made of the updates, parameter by parameter, of those that sent it: their `mean`; their
    `median`; or the `trimmed-mean`, without the share `trim` of them at either end (rounded down). The last two do
    not follow a few devices that send what they like, and cost accuracy and memory (docs/privacy.md, "A member that
    lies").
    """

    rounds: Rounds = 20
    cohort_size: Annotated[int, Meta(ge=0)] = 0
    min_devices: _AtLeast1 | None = None
    quorum: Share = 1.0
    min_updates: _AtLeast1 = 1
    deadline_s: Annotated[float, Meta(gt=0, le=30 * 86400)] = 600.0
    aggregation: Literal["mean", "trimmed-mean", "median"] = "mean"
    trim: Annotated[float, Meta(gt=0, lt=0.5)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.trim is not None) != (self.aggregation == "trimmed-mean"):
            raise ValueError(
                "trim belongs to aggregation = 'trimmed-mean', which needs it: the share of the updates that is left "
                "out at either end, for example 0.1"
            )


@dataclass(frozen=True)
class WireSection(WireSpec):
    """`[wire]`: what devices are told, and two keys of the aggregator's own.

    `downlink` is how a global model reaches devices that hold an earlier one: `difference`, coded, with a step of
    `downlink_step` times the standard deviation of the noise in the aggregate (`relative_step` times the root mean
    square of a layer's change where there is no noise); or `full`, exactly as it was computed. Left out, it is
    `full` where `codec` rounds no more than a float does, since exact averages are then what is asked for.
    """

    downlink: Literal["difference", "full"] | None = None
    downlink_step: Step = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.downlink is None:
            floats = self.codec in ("float32", "float16")
            object.__setattr__(self, "downlink", "full" if floats else "difference")

    def spec(self) -> WireSpec:
        return WireSpec(self.codec, self.step, self.relative_step, self.chunk_bytes)


@dataclass(frozen=True, kw_only=True)
class Task(Checked):
    """A whole task file."""

    name: Name
    seed: Count = 0
    model: ModelSection
    method: MethodSection
    privacy: PrivacySection = PrivacySection()
    data: DataSection
    round: RoundSection = RoundSection()
    wire: WireSection = WireSection()
    scenario: ScenarioSection = field(default_factory=ScenarioSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._complete_sums()
        self._check_augment()
        self._check_preferences()
        self._check_signs()
        self._check_aggregation()
        self._check_delta()

    def to_plain(self) -> dict[str, Any]:
        """What `parse_task` reads, of dicts, lists and scalars; keys without a value are left out."""
        plain: dict[str, Any] = _without_none(to_plain(self))
        return plain

    def _complete_sums(self) -> None:
        """What secure sums ask of a task, and what follows from them where the file says nothing."""
        secure, codec = self.privacy.accounting == "secure", self.wire.codec
        if not secure:
            if codec == "masked":
                raise ValueError('wire.codec = "masked" belongs to privacy.accounting = "secure"')
            return
        if codec not in ("masked", WireSection().codec):
            raise ValueError(f'wire.codec = {codec!r}: secure sums have their own, "masked"; leave it out')
        if self.round.aggregation != "mean":
            raise ValueError(f"round.aggregation = {self.round.aggregation!r}: of a secure sum there is only the mean")
        if self.privacy.reading != "user-level":
            raise ValueError(f"privacy.reading = {self.privacy.reading!r}: with secure sums every round counts in full")
        if math.isinf(self.privacy.clip_norm):
            raise ValueError("privacy.clip_norm = inf: must be finite for sums of whole numbers")
        least = self.round.min_updates
        if least == 1:
            cohort, rate = self.cohort_size, self.sampling_rate
            least = max(2, math.ceil(LEAST_SHARE * (cohort - 3 * math.sqrt(cohort * (1 - rate))) - 1e-9))
        if least > self.cohort_size:
            raise ValueError(f"round.min_updates = {least}: a round has {self.cohort_size} devices")
        object.__setattr__(self, "wire", replace(self.wire, codec="masked"))
        object.__setattr__(self, "round", replace(self.round, min_updates=least))
        try:
            check_sums(self.parts(), self._some_privacy())
        except (PrivacyError, BadInput) as error:
            raise ValueError(f"method.name = {self.method.name!r}: {error}") from error

    @property
    def cohort_size(self) -> int:
        """Devices in a round, on average where they are drawn."""
        return min(self.round.cohort_size or self.data.devices, self.data.devices)

    @property
    def sampling_rate(self) -> float:
        """With which probability a device takes part in a round."""
        return self.cohort_size / self.data.devices

    def secure_spec(self, *, noise_multiplier: float = 0.0, size: int | None = None) -> SecureSpec | None:
        """None where the accounting is another.

        :param size: values in an update, which say how many bits each takes; None: 32, whatever there are.

        Raises `PrivacyError` where no honest devices are left, or no ring is fine enough.
        """
        if self.privacy.accounting != "secure":
            return None
        least, fraction = self.round.min_updates, self.privacy.honest_fraction
        most = math.ceil(self.cohort_size + 6 * math.sqrt(self.cohort_size * (1 - self.sampling_rate)))
        honest = least_honest(least, devices=self.data.devices, honest_fraction=fraction, drawn=most)
        if honest == 0:
            raise PrivacyError(
                f"a sum of round.min_updates = {least} of {self.data.devices} devices, of which a share of "
                f"privacy.honest_fraction = {fraction:g} is honest, may have no honest one: ask for larger sums"
            )
        bits: Literal[16, 24, 32] = 32
        if size is not None:
            bits = least_bits(PRIMES, noise_multiplier=noise_multiplier, honest_devices=honest, devices=most, size=size)
        return SecureSpec(bits, min_devices=least, honest_devices=honest, honest_fraction=fraction)

    def _check_augment(self) -> None:
        if self.data.augment != "none" and self.model.features is not None:
            raise ValueError(
                f"data.augment = {self.data.augment!r}: with model.features each image's features are computed once, "
                "so images cannot be changed from step to step; leave one of them out"
            )

    def _check_preferences(self) -> None:
        if self.privacy.preference_std > 0 and self.parts().max_preference is None:
            raise ValueError(
                f"privacy.preference_std = {self.privacy.preference_std:g}: with method.name = {self.method.name!r} "
                "all devices add the same noise"
            )

    def _check_signs(self) -> None:
        if self.wire.codec == "one-bit" and not self.noises_updates:
            raise ValueError(
                'wire.codec = "one-bit" sends signs of noised values, and here no noise is added to the update; use '
                '"quantized", or privacy.unit = "device" with noise'
            )

    def _check_aggregation(self) -> None:
        """A median has no weights, and a method with another aggregate of its own would be given what it is not."""
        name, rules = self.method.name, self.round
        if rules.aggregation == "mean":
            return
        server = self.parts().server
        if type(server).aggregate is not Mean.aggregate:
            raise ValueError(
                f"round.aggregation = {rules.aggregation!r}: method.name = {name!r} aggregates in its own way"
            )
        if server.weighs:
            raise ValueError(
                f"round.aggregation = {rules.aggregation!r} gives every update the same weight, and {name!r} "
                "weighs them; switch that off (dp-fedsim: method.msa = false), or keep the mean"
            )

    def _check_delta(self) -> None:
        if self.privacy.unit == "record":
            return  # how many records a device has is known once the data are
        published = self.privacy.accounting == "as-published"
        try:
            check_delta(self.delta, max(self.data.devices, 2), as_published=published)
        except PrivacyError as error:
            raise ValueError(f"privacy.delta = {self.delta:g}: {error}") from error

    def parts(self) -> Method:
        """The method's parts, as they are with some noise: how much there is may not be known yet."""
        return self.method.parts(self._some_privacy(), self.round.rounds)

    def _some_privacy(self) -> PrivacySpec:
        section = self.privacy
        noise = section.noise_multiplier if section.noise_multiplier is not None else float(bool(section.epsilon))
        secure = self.secure_spec()
        return PrivacySpec(section.unit, section.accounting, section.clip_norm, noise, self.delta, secure=secure)

    @property
    def noises_updates(self) -> bool:
        """Whether noise is added to what is sent, and not to gradients."""
        privacy = self.privacy
        noised = privacy.unit == "device" and bool(privacy.noise_multiplier or privacy.epsilon)
        return noised and self.parts().gaussian is not None

    @property
    def delta(self) -> float:
        """What the file says, or else what `PrivacySection` promises."""
        if self.privacy.delta is not None:
            return self.privacy.delta
        if self.privacy.unit == "record" or self.privacy.accounting == "secure":
            return RECORD_DELTA
        return (1.0 if self.privacy.accounting == "as-published" else 0.1) / max(self.data.devices, 2)

    @property
    def partition_label(self) -> str:
        if self.data.partition.startswith("dirichlet"):
            return f"{self.data.partition}(alpha={self.data.alpha:g})"
        if self.data.partition == "pathological":
            return f"{self.data.partition}({self.data.classes_per_device} classes)"
        return self.data.partition

    def privacy_spec(self, *, train_samples: int | None = None, size: int | None = None) -> PrivacySpec:
        """The privacy section with its noise multiplier found.

        :param train_samples: records of all devices together; `reading = "pooled-sampling"` needs it.
        :param size: values in an update; secure sums need it.
        """
        section = self.privacy
        rate, batches = self._record_batches(train_samples) if section.unit == "record" else (1.0, 1)
        noise_multiplier = self._noise_multiplier(train_samples, rate, batches)
        return PrivacySpec(
            unit=section.unit,
            accounting=section.accounting,
            clip_norm=section.clip_norm,
            noise_multiplier=noise_multiplier,
            delta=self.delta,
            sample_rate=rate,
            batches=batches,
            accountant=section.accountant,
            noise_split=self.noise_split,
            secure=self.secure_spec(noise_multiplier=noise_multiplier, size=size),
        )

    @property
    def noise_split(self) -> int:
        """Among how many devices a round's noise is divided at most: a cohort, however many devices are there."""
        if self.privacy.unit == "record" or self.privacy.accounting == "strict":
            return 1
        secure = self.secure_spec()
        return self.cohort_size if secure is None else secure.honest_devices

    def _record_batches(self, train_samples: int | None) -> tuple[float, int]:
        """Sample rate and batches of a round, the same for all devices whatever they hold."""
        config, rate = self.method.config(), self.privacy.sample_rate
        if train_samples is not None:
            share = train_samples * (1 - self.data.test_fraction) / self.data.devices
            check_delta(self.delta, max(1, round(share)))
            rate = rate or min(1.0, config.batch_size / share)
        if rate is None:
            raise BadInput(
                "privacy.unit = 'record' needs to know how many records a device has, about; in the field give "
                "privacy.sample_rate, the batch size over that number"
            )
        return rate, config.local_steps or max(1, round(config.local_epochs / rate))

    def _noise_multiplier(self, train_samples: int | None, rate: float, batches: int) -> float:
        section = self.privacy
        if section.noise_multiplier is not None:
            return section.noise_multiplier
        if section.epsilon is None:
            return 0.0
        find = partial(noise_multiplier_for, epsilon=section.epsilon, delta=self.delta, accountant=section.accountant)
        if section.unit == "record":
            factor = gradients_factor(self.parts().training.gradients_per_batch)
            return factor * find(steps=self.round.rounds * batches, sample_rate=rate)
        if section.reading == "user-level":
            return find(steps=self.round.rounds)
        if section.reading == "client-sampling":
            return find(steps=self.round.rounds, sample_rate=self.sampling_rate)
        if train_samples is None:
            raise BadInput(
                "privacy.reading = 'pooled-sampling' needs to know how many records the devices have together; "
                "in the field give privacy.noise_multiplier instead"
            )
        config = self.method.config()
        per_device = math.ceil(train_samples / self.data.devices / config.batch_size)
        return find(
            steps=self.round.rounds * self.data.devices * (config.local_steps or per_device * config.local_epochs),
            sample_rate=config.batch_size / train_samples,
        )


def load_task(path: Path, overrides: tuple[str, ...] = ()) -> Task:
    """Reads a task file (TOML, or a run folder's JSON) and applies `section.key=value` overrides. Raises `BadInput`."""
    plain = read_file(path)
    folder = path.absolute().parent
    for section, key in (("data", "path"), ("model", "features")):
        table = plain.get(section) if isinstance(plain, dict) else None
        named = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(named, str) and (key == "path" or named.endswith(".onnx")):
            table[key] = str(folder / Path(named).expanduser())
    return parse_task(plain, overrides, where=str(path))


def parse_task(plain: dict[str, Any], overrides: tuple[str, ...] = (), *, where: str = "the task") -> Task:
    """The task of a file's content. Raises `BadInput`."""
    if not isinstance(plain, dict):
        raise BadInput(f"{where}: a task has sections such as [model] and [data], not a list or a single value")
    for override in overrides:
        _apply(plain, override)
    read, errors = {**plain}, []
    for name in plain.keys() & {"method", *_SECTIONS}:
        try:
            given = plain[name]
            read[name] = MethodSection.of(given) if name == "method" else from_plain(_SECTIONS[name], given, where=name)
        except Malformed as error:
            errors.append(str(error))
    if not errors:
        try:
            return _with_steps(from_plain(Task, read, where="task"), plain)
        except Malformed as error:
            errors = [str(error).removeprefix("task: ").removeprefix("task.")]
    raise BadInput(f"{where}: {'; '.join(sorted(errors))}")


def _with_steps(task: Task, plain: dict[str, Any]) -> Task:
    """With rounds and clip norm by the method's own rule, where it has one and the file leaves them out."""
    privacy, rule = task.privacy, find_method(task.method.name).steps
    if rule is None or privacy.epsilon is None or privacy.unit == "record":
        return task
    devices = math.sqrt(task.cohort_size * task.noise_split)  # that as much noise would be divided among as is added
    steps = rule(devices=devices, epsilon=privacy.epsilon, delta=task.delta)
    if "rounds" not in plain.get("round", {}):
        task = replace(task, round=replace(task.round, rounds=steps.rounds))
    if "clip_norm" not in plain.get("privacy", {}):
        task = replace(task, privacy=replace(privacy, clip_norm=steps.clip_norm))
    return task


_SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "privacy": PrivacySection,
    "data": DataSection,
    "round": RoundSection,
    "wire": WireSection,
    "scenario": ScenarioSection,
}


def _without_none(plain: Any) -> Any:
    """`plain` without keys that have no value, which TOML cannot write."""
    if isinstance(plain, dict):
        return {key: _without_none(value) for key, value in plain.items() if value is not None}
    return [_without_none(item) for item in plain] if isinstance(plain, (list, tuple)) else plain


def _apply(plain: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {override!r}: write section.key=value, for example round.rounds=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *sections, last = key.strip().split(".")
    table = plain
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise BadInput(f"--set {override!r}: {section!r} is not a section")
    table[last] = value
