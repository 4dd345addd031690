"""Defines `result.json`: the complete result of a run, as one documented and versioned value.

The simulator and the aggregator write it, the report and the summary table are made from it alone, and
scripts read it. `docs/result.md` describes every key. Accuracies are fractions of 1; bytes are totals over
the devices that took part in the round. A value that was not measured is null, never zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from hushfleet import atomic_file
from hushfleet.aggregator.results.answers import EvaluationRow, StatisticRow
from hushfleet.aggregator.results.json_record import Count, Delta, Epsilon, Fraction, JsonRecord, Measured
from hushfleet.aggregator.results.server_sees import MembershipListBy
from hushfleet.errors import BadInput
from hushfleet.losses import ACCURACY
from hushfleet.plain_json import to_json
from hushfleet.privacy.terms import Accountant, Accounting, TrustModel
from hushfleet.wire.format.spec import Form

SCHEMA: Literal[2] = 2
READ = 1, SCHEMA
"""The schemas of files that are read: in the first, each device has an object of its own in `privacy`."""
_encode = json.JSONEncoder(allow_nan=False).encode
_KEYED_BY_OTHERS = ("boards", "refusals", "declines", "faults", "in_vain", "metrics", "metrics_own")


class ModelInfo(JsonRecord, frozen=True):
    """The trained network: `layers` are (name, number of parameters) in the order of the flat vector."""

    name: str
    parameters: Count
    layers: list[tuple[str, int]]


class RoundRow(JsonRecord, frozen=True, kw_only=True):
    """One round. The three accuracies are means over devices, defined in `docs/result.md`.

    :param participants: updates in the new global model, each from a different device except in buffered rounds; 0 if
        there were too few updates.
    :param metrics: of the task's own metrics, the numbers of the global model on the common test; `metrics_own`: the
        means over devices of those of the personalized models on own samples.
    :param downlink_bytes: total bytes of the global model that they had to fetch, see `model_step.download_bytes`.
    :param snr_db: signal over noise, pooled over all updates; None without noise or visible signal.
    :param opened_at: time in UTC; None in a simulation.
    :param closed_at: likewise.
    :param committee: number of committee members of secure aggregation; `answers`: how many of them answered.
    :param answer_bytes: total bytes of these answers, a part of `uplink_bytes`.
    :param suspected_wraps: number of values of the secure aggregation that may have wrapped around.
    """

    round: Count
    participants: Count
    accuracy_own_common: Fraction = None
    accuracy_own_local: Fraction = None
    accuracy_global: Fraction = None
    loss: Measured = None
    metrics: dict[str, Measured] = {}
    metrics_own: dict[str, Measured] = {}
    uplink_bytes: Count
    downlink_bytes: Count
    snr_db: Measured = None
    wall_s: Measured = None
    opened_at: str | None = None
    closed_at: str | None = None
    committee: Count = 0
    answers: Count = 0
    answer_bytes: Count = 0
    suspected_wraps: Count = 0


class LocalOnly(JsonRecord, frozen=True):
    """The same networks trained by each device alone: means over devices.

    :param way: what was trained instead if the model is one linear layer on features: the best of several models, in
        hindsight; empty: the same network.
    """

    accuracy_own_common: Fraction = None
    accuracy_own_local: Fraction = None
    way: str = ""


class PersonalizedHead(JsonRecord, frozen=True):
    """The head of a linear model that a device mixed by its own images; known only in simulations.

    :param shared: the weight of the shared head in it; `pulled`: of heads pulled to the shared head; `alone`: of a head
        trained alone. Null in files of earlier versions, in which a device chose one of several heads.
    :param right: how many of the device's images it classified correctly in a cross-validation; `right_shared` and
        `right_alone`: the same for the unchanged shared head and for the head trained alone.
    :param unlabelled: number of images without labels, which determine half of the head.
    """

    images: Count
    shared: Fraction = None
    pulled: Fraction = None
    alone: Fraction = None
    right: Count | None = None
    right_shared: Count | None = None
    right_alone: Count | None = None
    unlabelled: Count = 0


class Lifetime(JsonRecord, frozen=True):
    """The privacy loss of one device over all tasks that this aggregator knows, at the delta of the device's own limit.

    :param epsilon_server: for adding or removing a unit, as everywhere; `exchange_server`: for replacing one unit by
        another.
    :param since: when its first charge was stored, unix seconds; 0: not known.
    :param period: the current period and its limit, in words; empty if boards have no such limit.
    :param window: the part of it that counts for samples of one window, in words; empty if the task has no windows.
    """

    epsilon_server: Epsilon
    exchange_server: Epsilon
    delta: Delta
    since: int = 0
    period: str = ""
    window: str = ""


class PrivacyRow(JsonRecord, frozen=True, kw_only=True):
    """The privacy that one device has spent at the end of the run, against each adversary.

    :param exchange_server: like epsilon_server, for replacing one unit by another; null if the accountant cannot
        compute it. A round that was charged but never accepted counts like the accepted round with the least noise.
    :param lifetime: spending over all tasks; null without a fleet, because the aggregator then knows only this task.
    :param raw_values: values that the method sends without noise, in words. With any, both epsilons are infinite.
    :param noised_server: epsilon_server of the noised values alone, which a paper's accounting covers; likewise
        `noised_release`. Null if there are no raw values.
    """

    device: str
    unit: str
    adjacency: str
    delta: Delta
    epsilon_server: Epsilon
    epsilon_release: Epsilon
    rounds_charged: Count
    raw_values: list[str] = []
    noised_server: Measured = None
    noised_release: Measured = None
    exchange_server: Measured = None
    lifetime: Lifetime | None = None


class LostRounds(JsonRecord, frozen=True):
    """The rounds that made no model, because too few updates came.

    :param boards: number of devices whose updates were accepted in them, and are in no model.
    :param epsilon: the largest epsilon_server that one of these devices paid for them; 0 if no update came.
    """

    rounds: Count
    boards: Count
    epsilon: Epsilon

    def words(self, closed: int) -> str:
        """:param closed: number of all closed rounds."""
        paid = ""
        if self.boards:
            who = "1 board" if self.boards == 1 else f"{self.boards} boards"
            paid = f"; {who} paid epsilon {self.epsilon:.3g} for them"
        return f"{self.rounds} of {closed} rounds made no model, because too few updates came{paid}"


class WireInfo(JsonRecord, frozen=True, kw_only=True):
    """The encoding of updates.

    :param step: the quantisation step of `quantized`, else null. Its unit is named by `step_unit`: the standard
        deviation of a layer's noise, or a layer's root mean square if updates have no noise of their own.
    """

    codec: Form
    step: Annotated[float, Meta(gt=0)] | None = None
    step_unit: Literal["noise", "rms"]


class Repeated(JsonRecord, frozen=True):
    """The run with another setting; accuracies are the last measured ones. The gain is `accuracy_own_common` (if
    devices have personalized heads: `accuracy_global`) minus the local-only accuracy, with its standard error over
    devices."""

    accuracy_own_common: Fraction = None
    accuracy_own_local: Fraction = None
    accuracy_global: Fraction = None
    gain_over_local_only: Measured = None
    gain_standard_error: Measured = None


class SweepPoint(Repeated, frozen=True, kw_only=True):
    """The run repeated at another noise level."""

    noise_multiplier: Epsilon
    epsilon_server: Epsilon
    epsilon_release: Epsilon


class SeedPoint(Repeated, frozen=True, kw_only=True):
    """The run repeated with another seed: other devices' data, first model and noise.

    :param local_only_common: mean final accuracy when each device trains alone; `local_only_local`: on own data.
    :param metrics: of the task's own metrics, the last ones of the global model on the common test; `metrics_own`: the
        means of those of each device on its own samples.
    """

    seed: Count
    local_only_common: Fraction = None
    local_only_local: Fraction = None
    metrics: dict[str, Measured] = {}
    metrics_own: dict[str, Measured] = {}


class TimelineRow(JsonRecord, frozen=True):
    """A round: its time in seconds since the run began, and the numbers of devices by outcome.

    The numbers are null if the round is not in the event log. `late`: connected, but no update when the round closed;
    `lost`: asked, and disconnected then.
    """

    round: Count
    opened_s: float
    closed_s: float
    accepted: Count | None = None
    late: Count | None = None
    declined: Count | None = None
    refused: Count | None = None
    lost: Count | None = None


class Rerun(JsonRecord, frozen=True):
    """The record that is needed to repeat the run.

    :param command: the command as typed.
    :param task: the task as a TOML file, with all changes by options.
    :param digests: SHA-256 in hex by the name of the input: the task package, the simulation's images and labels.
    :param commit: commit of Hushfleet's source tree; null if it was installed from a package.
    :param runtime: the runtime that computed the gradients; empty in the field.
    """

    command: str
    task: str
    digests: dict[str, str]
    commit: str | None = None
    runtime: str = ""


class Example(JsonRecord, frozen=True):
    """An image of the common test set of a simulation, and the classes that models predict for it.

    :param png: the image, as base64.
    :param label: its class, as an index in `class_names`, like the models' predictions; null if there is no such model.
    :param device: the device of the personalized model and of the model trained alone.
    """

    png: Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]+=*$")]
    label: Count
    device: str
    said_global: Count
    said_own: Count | None = None
    said_alone: Count | None = None


def _by(*sizes: str) -> Meta:
    """Says by what a list is: of rounds, devices, layers of the model or classes; and what its items are lists of."""
    return Meta(extra={"sizes": sizes})


PerRound = Annotated[list[Measured], _by("rounds")]
RoundsByDevice = Annotated[list[list[Fraction]], _by("rounds", "devices")]
EpsilonsByDevice = Annotated[list[list[Measured]], _by("rounds", "devices")]
PerDevice = Annotated[list[Count], _by("devices")]
Confusion = Annotated[list[list[Count]], _by("classes", "classes")]


class Details(JsonRecord, frozen=True):
    """The data of the plots. Every list may be empty: then it was not recorded.

    Lists by round are in the order of `rounds`, lists by device of `devices`, lists by layer of `model.layers`. Their
    types say which, and a result checks the lengths.

    :param device_names: in a simulation, the devices' names in the data, if they have them.
    :param score: what an accuracy counts if targets are no classes, such as "within 0.5 of the target"; empty: classes.
    :param measure: the name of the score. In the file it replaces "accuracy" in keys that begin with "accuracy_".
    :param metrics_own: of the task's own metrics, the last number of each device on its own samples.
    :param chance: for such targets, the accuracy of the best constant answer on all samples, and on own samples.
    """

    devices: list[str] = []
    device_names: Annotated[list[str], _by("devices")] = []
    accuracy_own_common: RoundsByDevice = []
    accuracy_own_local: RoundsByDevice = []
    metrics_own: dict[str, list[Measured]] = {}
    local_only_common: Annotated[list[Fraction], _by("devices")] = []
    local_only_local: Annotated[list[Fraction], _by("devices")] = []
    own_heads: Annotated[list[PersonalizedHead | None], _by("devices")] = []
    common_test_images: Count | None = None
    local_test_images: PerDevice = []
    personal_share: Annotated[list[list[Fraction]], _by("rounds", "layers")] = []
    clip_weights: Annotated[list[list[Measured]], _by("rounds", "layers")] = []
    label_counts: Annotated[list[list[Count]], _by("devices", "classes")] = []
    class_names: list[str] = []
    score: str = ""
    measure: str = ACCURACY
    chance: Annotated[list[Fraction], Meta(min_length=2, max_length=2)] | None = None
    eq20_bytes: PerRound = []
    float32_bytes: PerRound = []
    values_sent: Annotated[list[Count], _by("rounds")] = []
    epsilon_server: EpsilonsByDevice = []
    epsilon_release: EpsilonsByDevice = []
    rounds_accepted: PerDevice = []
    uplink_bytes: PerDevice = []
    refusals: dict[str, dict[str, Count]] = {}
    declines: dict[str, dict[str, Count]] = {}
    decline_reasons: dict[str, str] = {}
    faults: dict[str, Count] = {}
    timeline: Annotated[list[TimelineRow], _by("rounds")] = []
    in_vain: dict[str, Count] = {}
    confusion_global: Confusion = []
    confusion_own: Confusion = []
    confusion_devices: Count = 0
    examples: list[Example] = []
    seeds: list[SeedPoint] = []
    privacy_sweep: list[SweepPoint] = []


class SumsInfo(JsonRecord, frozen=True, kw_only=True):
    """The party that decides which devices may take part in secure aggregation, as in `SumFacts`.

    :param min_devices: the smallest number of devices in a sum.
    """

    roster_by: MembershipListBy
    keys_in_folder: tuple[str, ...] | None = None
    min_devices: Count


class Result(JsonRecord, frozen=True, kw_only=True):
    """One run."""

    schema: Literal[2] = SCHEMA
    task: str
    recorded_at: str | None = None  # missing in files of earlier versions
    federation: str | None = None  # likewise; None in simulations
    method: str
    dataset: str
    partition: str
    devices: Annotated[int, Meta(gt=0)]
    seed: int | None
    engine: str
    model: ModelInfo
    accounting: Accounting
    trust: TrustModel | None = None  # missing in files of earlier versions
    sums: SumsInfo | None = None  # likewise; None also without secure aggregation
    assumption: str | None = None  # what secure aggregation assumes about the fleet, by the newest membership list
    accountant: Accountant = "rdp"  # files without this key were made with it
    clip_norm: Annotated[float, Meta(gt=0)]
    noise_multiplier: Epsilon
    wire: WireInfo | None = None
    boards: dict[str, str] = {}
    rounds: list[RoundRow]
    evaluations: list[EvaluationRow] = []
    pay: str = ""  # whether the fleet pays, in the field; missing in files of earlier versions
    statistic: StatisticRow | None = None  # only in a task that asks for one, and trains nothing
    local_only: LocalOnly
    privacy: list[PrivacyRow]
    lost_rounds: LostRounds | None = None  # None: each closed round made a model
    details: Details = Details()
    versions: dict[str, str]
    rerun: Rerun | None = None  # missing in files of earlier versions

    @property
    def uplink_bytes(self) -> int:
        """The sum over all rounds; 0 if bytes were not counted, as in a lean simulation."""
        return sum(row.uplink_bytes for row in self.rounds)

    @property
    def downlink_bytes(self) -> int:
        """The sum over all rounds."""
        return sum(row.downlink_bytes for row in self.rounds)

    @property
    def full_model_bytes(self) -> float:
        """The bytes of the same models as whole float32 models: of as many bytes as the updates of plain FedAvg."""
        return sum(value or 0 for value in self.details.float32_bytes)

    @property
    def bits_per_value(self) -> float | None:
        """The bits of an update per sent parameter, header and signature included; None: not recorded.

        A committee's answers do not count as updates.
        """
        values, answers = sum(self.details.values_sent), sum(row.answer_bytes for row in self.rounds)
        return 8 * (self.uplink_bytes - answers) / values if values and self.uplink_bytes else None

    def __post_init__(self) -> None:
        """Checks that the lists fit together."""
        detail = self.details
        classes = len(detail.class_names) or len(next(iter(detail.label_counts), []))
        layers, devices = len(self.model.layers), len(detail.devices)
        sizes = {"rounds": len(self.rounds), "devices": devices, "layers": layers, "classes": classes}
        for name, by in _sizes().items():
            _check_shape(name, getattr(detail, name), *(sizes[each] for each in by))
        for name, values in detail.metrics_own.items():
            _check_shape(f"metrics_own.{name}", values, devices)
        if any(each.label >= len(detail.class_names) for each in detail.examples):
            raise ValueError("details.examples has a label that is none of details.class_names")
        if sum(size for _, size in self.model.layers) != self.model.parameters:
            raise ValueError("the sizes of model.layers do not add up to model.parameters")

    def with_details(self, **changes: Any) -> Result:
        """Returns a copy with other values of some details."""
        return self.but(details=self.details.but(**changes))

    def save(self, path: Path) -> None:
        """Writes the file completely or not at all. Raises `StoreError`, and `ValueError` if it could not be read."""
        plain = to_json(self.of(self))
        for part in (*plain["rounds"], plain["details"], *plain["details"]["seeds"]):
            for key in ("metrics", "metrics_own", "device_names"):
                if not part.get(key, True):  # a task without them has the keys of 0.3
                    del part[key]
        plain["privacy"] = _together(plain["privacy"])
        named = renamed(plain, ACCURACY, self.details.measure.lower())
        write_whole(path, _laid_out(named, 1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Reads a file of this schema; unknown keys are ignored. Raises `BadInput`."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            text = "has no result.json: the run has not ended (--resume goes on with it), or is elsewhere"
            raise BadInput(f"{Path(path).parent} {text}") from error
        except NotADirectoryError as error:
            raise BadInput(f"{Path(path).parent} is a file; give the run's folder, which has a result.json") from error
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"{path} is not a readable JSON file: {error}") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema not in READ:
            raise BadInput(
                f"{path} has schema {schema!r}, and this Hushfleet reads schema {' and '.join(map(str, READ))}: "
                "open it with the version that wrote it (key `versions`)"
            )
        details = data.get("details")
        measure = details.get("measure") if isinstance(details, dict) else None
        data["schema"], privacy = SCHEMA, data.get("privacy")
        try:
            if isinstance(privacy, list):
                data["privacy"] = _one_by_one(privacy)
            return cls.of(renamed(data, str(measure or ACCURACY).lower(), ACCURACY))
        except msgspec.ValidationError as error:
            raise BadInput(f"{path} is not a result of schema {schema}: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replaces a text file completely or not at all; a byte that is no text, as in a file's name, becomes an escape.

    Raises `StoreError`.
    """
    atomic_file.write_whole(Path(path), text.encode(errors="backslashreplace"), durable=True)


def renamed(value: Any, old: str, new: str) -> Any:
    """Returns a JSON value in which `new` replaces `old` in all keys that begin with `old` and an underscore, but not
    in the names of devices and of metrics."""
    if isinstance(value, list) and old != new:
        return [renamed(item, old, new) for item in value]
    if not isinstance(value, dict) or old == new:
        return value
    begin, found = f"{old}_", {}
    for name, item in value.items():
        key = f"{new}_{name.removeprefix(begin)}" if name.startswith(begin) else name
        found[key] = item if name in _KEYED_BY_OTHERS else renamed(item, old, new)
    return found


def _together(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of devices, with one for all that differ in `device` alone."""
    found = dict[str, dict[str, Any]]()
    for row in rows:
        shared = {name: value for name, value in row.items() if name != "device"}
        found.setdefault(_encode(shared), {"devices": [], **shared})["devices"].append(row["device"])
    return list(found.values())


def _one_by_one(rows: Sequence[Any]) -> list[Any]:
    """Returns what `_together` was made from, by the names of the devices. Rows without `devices` stay as they are."""
    joint = [row for row in rows if isinstance(row, dict) and isinstance(row.get("devices"), list)]
    each = [{**row, "device": device} for row in joint for device in row["devices"]]
    return sorted(each, key=lambda row: str(row["device"])) or list(rows)


def last_measured(rows: Sequence[Any], value: Callable[[Any], float | None]) -> float | None:
    """Returns the newest value that was measured; None if there is none."""
    return next((v for row in reversed(rows) if (v := value(row)) is not None), None)


def last_metrics(rows: Sequence[RoundRow]) -> dict[str, float | None]:
    """Returns the newest values of the task's own metrics, of the global model."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return {name: last_measured([row.metrics.get(name) for row in rows], lambda value: value) for name in names}


@cache
def _sizes() -> dict[str, tuple[str, ...]]:
    """Returns by what the lists of `Details` are."""
    hints = {name: get_args(kind) for name, kind in get_type_hints(Details, include_extras=True).items()}
    metas = {name: each for name, kinds in hints.items() for each in kinds if isinstance(each, Meta) and each.extra}
    return {name: meta.extra["sizes"] for name, meta in metas.items() if meta.extra}


def _laid_out(value: Any, depth: int) -> str:
    """Returns JSON with an indent of one, but lists of numbers and texts on one line: fewer lines, easier to read."""
    has_parts = isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    if not value or not (isinstance(value, dict) or has_parts):
        return _encode(value)
    gap = "\n" + " " * depth
    if isinstance(value, list):
        parts, ends = [_laid_out(item, depth + 1) for item in value], "[]"
    else:
        parts, ends = [f"{_encode(name)}: {_laid_out(item, depth + 1)}" for name, item in value.items()], "{}"
    return ends[0] + gap + f",{gap}".join(parts) + gap[:-1] + ends[1]


def _check_shape(name: str, values: Sequence[Any], length: int, width: int | None = None) -> None:
    """Checks the lengths of a list and of its rows; an empty list was not recorded, and passes."""
    if values and len(values) != length:
        raise ValueError(f"details.{name} has {len(values)} entries, and must have {length}")
    if width is not None and (widths := {len(row) for row in values} - {width}):
        raise ValueError(f"details.{name} has rows of {sorted(widths)} entries, and must have {width} in each")
