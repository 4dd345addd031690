"""The task file: reads the TOML that a person writes, and validates it into typed configuration.

Used by the aggregator and the simulator; devices get the resolved `hushfleet.wire.format.spec.TaskSpec` instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from hushfleet.aggregator.config import rules
from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.config.season import SeasonSection
from hushfleet.aggregator.config.sections import (
    DataSection,
    EvaluationSection,
    MethodSection,
    ModelSection,
    PlanSection,
    PrivacySection,
    StatisticSection,
    WireSection,
    is_path,
    split_kind,
)
from hushfleet.aggregator.config.secure_aggregation import least_updates, spec_of
from hushfleet.data.targets import Targets
from hushfleet.errors import BadInput, Malformed, PrivacyError, format_value
from hushfleet.faults import Fault, faults, refusal, with_lines
from hushfleet.field_types import hints
from hushfleet.losses import FAULT, find_loss
from hushfleet.methods import find_method
from hushfleet.methods.method import Method
from hushfleet.privacy.noise_for import check_delta, noise_multiplier_for
from hushfleet.privacy.record import gradients_factor, sensitivity
from hushfleet.refusals import unknown
from hushfleet.rules import check_rules
from hushfleet.schema import Checked, Count, from_plain, later, parse_toml, read_file, to_plain
from hushfleet.toml_text import without_none
from hushfleet.wire.format.spec import MAX_BATCHES, PrivacySpec, SecureSpec
from hushfleet.wire.format.topics import Name

RECORD_DELTA = 1e-5
FALSE_ALARMS = 0.01


@dataclass(frozen=True, kw_only=True)
class Task(Checked):
    """A whole task file.

    :param name: of the task.
    :param seed: of everything that a simulation draws, and of the first model.
    """

    name: Name
    seed: Count = 0
    model: ModelSection
    method: MethodSection
    privacy: PrivacySection = field(default_factory=PrivacySection)
    data: DataSection
    round: RoundSection = field(default_factory=RoundSection)
    wire: WireSection = field(default_factory=WireSection)
    schedule: ScheduleSection = later(ScheduleSection())
    season: SeasonSection | None = None
    scenario: ScenarioSection = field(default_factory=ScenarioSection)
    evaluation: EvaluationSection | None = None
    statistic: StatisticSection | None = None
    plan: PlanSection | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._complete_features()
        check_rules(self, rules.SEASON_OF_TASK)
        self._complete_season()
        check_rules(self, rules.SUMS_OF_TASK)
        if self.privacy.accounting == "secure":
            check_rules(self, rules.SECURE_AGGREGATION)
            object.__setattr__(self, "wire", replace(self.wire, codec="masked"))
            object.__setattr__(self, "round", replace(self.round, min_updates=least_updates(self)))
        check_rules(self, rules.TASK)
        if self.statistic is not None:
            shape = self.data.shape
            targets = () if self.targets.are_classes else self.class_names or None
            self.statistic.check_column(None if shape is None else math.prod(shape), targets)

    def to_plain(self) -> dict[str, Any]:
        """Returns the task as `parse_task` reads it: dicts, lists and scalars; keys without a value are left out."""
        plain: dict[str, Any] = without_none(to_plain(self))
        return plain

    def _complete_features(self) -> None:
        """Adds the features that the method's linear model needs where the file names none."""
        features = find_method(self.method.name).features
        if features and self.model.name == "linear" and self.model.features is None and self.statistic is None:
            object.__setattr__(self, "model", replace(self.model, features=features))

    def _complete_season(self) -> None:
        """Takes a season's epsilon as the task's."""
        if self.season is not None and self.season.epsilon is not None:
            object.__setattr__(self, "privacy", replace(self.privacy, epsilon=self.season.epsilon))

    @property
    def first_name(self) -> str:
        """The name of the task, or of the first season's task if this is a later season."""
        return self.name if self.season is None else self.season.base(self.name)

    @property
    def cohort_size(self) -> int:
        """The number of devices in a round; the average number if devices are drawn."""
        return min(self.round.cohort_size or self.data.devices, self.data.devices)

    @property
    def evaluations(self) -> int:
        """The number of rounds that evaluate."""
        section, rounds = self.evaluation, self.round.rounds
        return 0 if section is None else -(-rounds // (section.every or rounds))

    @property
    def total_rounds(self) -> int:
        """The number of training rounds and evaluation rounds together."""
        return self.round.rounds + self.evaluations

    @property
    def noise_factor(self) -> float:
        """The factor by which an evaluation increases the noise of training."""
        return 1.0 if self.evaluation is None else 1 / math.sqrt(1 - self.evaluation.share)

    @property
    def sampling_rate(self) -> float:
        """The probability that a device takes part in a round."""
        return self.cohort_size / self.data.devices

    def secure_spec(self, *, noise_multiplier: float = 0.0, size: int | None = None) -> SecureSpec | None:
        """Returns the specification of secure aggregation; None with another accounting.

        Parameters and errors are those of `secure_sums.spec_of`.
        """
        if self.privacy.accounting != "secure":
            return None
        return spec_of(self, noise_multiplier=noise_multiplier, size=size)

    @property
    def targets(self) -> Targets:
        model, section = self.model, self.data
        false_alarms = (model.false_alarms or FALSE_ALARMS) if find_loss(model.standard_loss).of_inputs else None
        return Targets(model.standard_loss, model.tolerance, section.target_mean, section.target_std, false_alarms)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of classes or outputs; for a reconstruction the name of a fault; empty if the data have the names."""
        return self.data.class_names or ((FAULT,) if self.targets.are_inputs else ())

    def parts(self) -> Method:
        """Returns the method's parts, with a placeholder for the amount of noise if that is not known yet."""
        return self.method.parts(self.some_privacy(), self.round.rounds)

    def some_privacy(self) -> PrivacySpec:
        """Returns the specification, with a placeholder for the amount of noise if that is not known yet."""
        section = self.privacy
        noise = section.noise_multiplier if section.noise_multiplier is not None else float(bool(section.epsilon))
        secure = self.secure_spec()
        return PrivacySpec(section.unit, section.accounting, section.clip_norm, noise, self.delta, secure=secure)

    @property
    def noises_updates(self) -> bool:
        """Whether noise is added to the update that is sent, and not to gradients."""
        privacy = self.privacy
        noised = privacy.unit == "device" and bool(privacy.noise_multiplier or privacy.epsilon)
        return noised and self.parts().gaussian is not None

    @property
    def delta(self) -> float:
        """The delta of the file, or else the default that `PrivacySection` promises."""
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
        """Returns the specification of the privacy section, with its noise multiplier computed.

        :param train_samples: number of records of all devices together; `reading = "pooled-sampling"` needs it.
        :param size: number of values in an update; secure aggregation needs it.
        """
        rate, batches = self._record_batches(train_samples) if self.privacy.unit == "record" else (1.0, 1)
        noise_multiplier = self._noise_multiplier(train_samples, rate, batches)
        return replace(
            self.some_privacy(),
            noise_multiplier=noise_multiplier,
            sample_rate=rate,
            batches=batches,
            accountant=self.privacy.accountant,
            noise_split=self.noise_split,
            secure=self.secure_spec(noise_multiplier=noise_multiplier, size=size),
        )

    @property
    def noise_split(self) -> int:
        """The largest number of devices that a round's noise is divided among: a cohort, even if fewer take part."""
        secure = self.secure_spec()
        if secure is not None:
            return secure.honest_devices
        return 1 if self.privacy.unit == "record" or self.privacy.accounting == "strict" else self.cohort_size

    def _record_batches(self, train_samples: int | None) -> tuple[float, int]:
        """Returns sample rate and batches of a round, the same for all devices no matter how many records they have."""
        config, rate = self.method.config(), self._sample_rate(train_samples)
        batches = config.local_steps or config.local_epochs / rate
        if batches > MAX_BATCHES:
            raise BadInput(
                f"privacy.sample_rate = {rate:g} with method.local_epochs = {config.local_epochs}: a round would have "
                f"{batches:g} batches, and it has at most {MAX_BATCHES}; set method.local_steps"
            )
        return rate, max(1, round(batches))

    def _sample_rate(self, train_samples: int | None) -> float:
        rate = self.privacy.sample_rate
        if train_samples is not None:
            share = train_samples * (1 - self.data.share_tested(has_test=False)) / self.data.devices
            try:
                check_delta(self.delta, max(1, round(share)))
            except PrivacyError as error:
                raise PrivacyError(f"privacy.delta = {self.delta:g}: {error}") from error
            rate = rate or min(1.0, self.method.config().batch_size / share)
        if rate is None:
            raise BadInput(
                "privacy.unit = 'record' needs to know how many records a device has, about; in the field give "
                "privacy.sample_rate, the batch size over that number"
            )
        return rate

    def _noise_multiplier(self, train_samples: int | None, rate: float, batches: int) -> float:
        section = self.privacy
        if section.noise_multiplier is not None:
            return section.noise_multiplier
        if section.epsilon is None:
            return 0.0
        find = partial(noise_multiplier_for, epsilon=section.epsilon, delta=self.delta, accountant=section.accountant)
        if section.unit == "record":
            training = self.parts().training
            factor = gradients_factor(training.gradients_per_batch) * sensitivity(training.gradient.subset)
            return factor * find(steps=self.round.rounds * batches, sample_rate=rate)
        if section.reading == "user-level":
            return self.noise_factor * find(steps=self.round.rounds)
        if section.reading == "client-sampling":
            return find(steps=self.round.rounds, sample_rate=self.sampling_rate)
        if train_samples is None:
            raise BadInput(
                "privacy.reading = 'pooled-sampling' needs to know how many records the devices have together; "
                "in the field give privacy.noise_multiplier instead"
            )
        config = self.method.config()
        per_device = math.ceil(train_samples / self.data.devices / config.step_size)
        return find(
            steps=self.round.rounds * self.data.devices * (config.local_steps or per_device * config.local_epochs),
            sample_rate=config.step_size / train_samples,
        )


def load_task(path: Path, overrides: tuple[str, ...] = (), *, folder: Path | None = None) -> Task:
    """Reads a task file (TOML, or a run folder's JSON) and applies `section.key=value` overrides. Raises `BadInput`.

    :param folder: where relative paths begin; the file's own folder by default.
    """
    plain = read_file(path)
    folder = (folder or path.parent).absolute()
    for table, key in _named_files(plain):
        kind, file = split_kind(table[key])
        if not file.startswith("~"):  # a home folder, which its section looks up
            table[key] = kind + str(folder / file)
    return parse_task(plain, overrides, file=path)


def files_beside(path: Path) -> list[str]:
    """Returns the files that a task file names by paths relative to itself. Raises `BadInput`."""
    named = [split_kind(table[key])[1].partition(":")[0] for table, key in _named_files(read_file(path))]
    return [name for name in named if not name.startswith("~") and not Path(name).is_absolute()]


def _named_files(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the section tables and keys, or lists and places, whose values are names of files."""
    for section, key in (
        ("data", "path"),
        ("model", "features"),
        ("model", "public"),
        ("model", "weights"),
        ("model", "start"),
        ("model", "name"),
        ("model", "loss"),
        ("model", "metrics"),
        ("season", "classes"),
    ):
        table = plain.get(section) if isinstance(plain, dict) else None
        named = table.get(key) if isinstance(table, dict) else None
        if isinstance(named, list):
            yield from (
                (named, place) for place, each in enumerate(named) if isinstance(each, str) and is_path(key, each)
            )
        elif isinstance(table, dict) and isinstance(named, str) and is_path(key, named):
            yield table, key


def parse_task(
    plain: dict[str, Any], overrides: tuple[str, ...] = (), *, where: str = "the task", file: Path | None = None
) -> Task:
    """Returns the task of a file's content. Raises `BadInput` with all mistakes.

    :param file: the file that it was read from, so that the error can name lines.
    """
    where = str(file or where)
    if not isinstance(plain, dict):
        raise BadInput(f"{where}: a task has sections such as [model] and [data], not a list or a single value")
    _leave_out_others(plain, overrides)
    for override in overrides:
        _apply(plain, override)
    read, found = {**plain}, [Fault(each) for each in unknown(Task, plain)]
    for name in plain.keys() & _SECTIONS.keys():
        found += faults(_SECTIONS[name], plain[name], name)
    if "method" in plain:
        found += MethodSection.faults(plain["method"])
    if not found:
        try:
            if "method" in plain:
                read["method"] = MethodSection.of(plain["method"])
            task = from_plain(Task, read, where="task")
            steps = _steps(task, plain)
            return from_plain(Task, {**read, **steps}, where="task") if steps else task
        except (Malformed, ValueError) as error:
            found = [Fault(str(error).removeprefix("task: ").removeprefix("task."), getattr(error, "code", ""))]
    if file is not None:
        set_here = tuple(override.partition("=")[0].strip() for override in overrides)
        not_here = [fault for fault in found if set_here and fault.startswith(set_here)]
        found = [*with_lines(file, sorted(set(found) - set(not_here))), *not_here]
    raise refusal(where, found if file is not None else sorted(found))


def _steps(task: Task, plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the sections with rounds, clip norm and directions by the method's own rule, if it has one and the file
    leaves them out."""
    privacy, rule = task.privacy, find_method(task.method.name).steps
    if rule is None or privacy.epsilon is None or privacy.unit == "record":
        return {}
    devices = math.sqrt(task.cohort_size * task.noise_split)  # so many with divided noise have the same mean noise
    given: dict[str, Any] = {"rounds": task.round.rounds} if "rounds" in plain.get("round", {}) else {}
    if task.model.public is not None:
        given |= {"public": True, "classes": task.model.public_classes}
    steps = rule(devices=devices, epsilon=privacy.epsilon, delta=task.delta, **given)
    found = {"privacy": {"clip_norm": steps.clip_norm, **plain.get("privacy", {})}}
    if "rounds" not in given:
        found["round"] = {**plain.get("round", {}), "rounds": steps.rounds}
    if task.model.directions is None and task.model.has_order:
        found["model"] = {**plain["model"], "directions": steps.directions}
    return found


_SECTIONS = {
    name: kind
    for name, hint in hints(Task).items()
    for kind in (hint, *get_args(hint))
    if is_dataclass(kind) and kind is not MethodSection
}


def _leave_out_others(plain: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Removes from `plain` the other way to give the noise if an override sets `noise_multiplier` or `epsilon`."""
    given = {override.partition("=")[0].strip() for override in overrides}
    for key, other in (("noise_multiplier", "epsilon"), ("epsilon", "noise_multiplier")):
        if f"privacy.{key}" in given and isinstance(plain.get("privacy"), dict):
            plain["privacy"].pop(other, None)


def _apply(plain: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {format_value(override)}: write section.key=value, for example round.rounds=5")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    *sections, last = key.strip().split(".")
    table = plain
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise BadInput(f"--set {format_value(override)}: {format_value(section)} is not a section")
    table[last] = value
