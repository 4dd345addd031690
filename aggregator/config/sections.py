"""The sections of a task file, each with the values that it accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hushfleet.aggregator.config import rules
from hushfleet.codecs.registry import codec_of
from hushfleet.config.spec import UNIT_NORM, Augment, ClassNames, PrivacySpec, Shape, StepSize, WireSpec
from hushfleet.config.written import Fault, faults
from hushfleet.data.form import OWN_DATA, Columns, DecimalMark, LabelKind, SampleForm, ValueKind
from hushfleet.data.sets import SOURCES
from hushfleet.data.targets import Tolerance
from hushfleet.durations import duration_s
from hushfleet.errors import HushfleetError
from hushfleet.methods import find_method
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.privacy.terms import Accountant, Accounting, Unit
from hushfleet.schema import (
    AtLeast1,
    Checked,
    Finite,
    Fraction,
    PositiveOrInf,
    Probability,
    Share,
    from_plain,
    missing,
    require,
)
from hushfleet.user_files import expanded, in_file

if TYPE_CHECKING:
    DataSetName = str
else:
    DataSetName = Literal[(*SOURCES, *OWN_DATA)]
Partition = Literal["iid", "dirichlet-class", "dirichlet-device", "pathological", "given"]
_Deviation = Annotated[float, Meta(ge=1e-30, le=1e30, description="1e-30 to 1e30, as float32 numbers can be")]


def is_path(key: str, value: str) -> bool:
    """Returns whether this value of the key `key` names a file, and not something that comes with Hushfleet."""
    return {"features": value.endswith(".onnx"), "name": in_file(value)}.get(key, True)


@dataclass(frozen=True)
class ModelSection(Checked):
    """`[model]`: one of the compact networks, or `linear`, which can take features instead of images; or your own
    network, `path/to/file.py:NAME`: a `torch.nn.Module`, or a class or function that returns one, see
    `hushfleet.models.module`.

    `features` are fixed and come with the task: `scattering` (28x28 grey, 32x32 colour and the like), `filters` (8x8),
    a pretrained network (`torchvision:mobilenet_v3_small`, `timm:NAME`), or your own ONNX file that takes the task's
    images, with pixels in [0, 1], and returns `[batch, features]` or ends with a classifier; a relative path starts at
    the task file's folder (in an override: at the working directory). `unit-norm` are no features of images: it scales
    a sample of up to 4095 values, normalised as without features, to norm 1. With method `hush`, `linear` takes it if
    no features are named.

    `directions` says how many leading directions of the features the shared head takes as input and sends; a device's
    own part uses all. Left out, method `hush` uses the number of its rule, other methods use all. A network without a
    classifier returns features in no order, so that all are sent.

    With `share = "head"` only the last layer of a compact network is trained and sent. The other layers are fixed: the
    task's seed draws them, or they come from the safetensors file `weights` (a run stores its global model as one), and
    they come with the task like features. For a pretrained network, `weights` is the file that its authors offer; left
    out, it is the file in the download folder of torchvision or timm.

    `start` is the model to continue from: the folder of an earlier run or a `global-ROUND.safetensors` of it. Left out,
    the seed draws the first model. A class that both tasks have keeps its outputs, a new class starts with the mean of
    the others, and devices keep their own parts of the model. Network and features must be the same.

    `loss` says what the network learns (`hushfleet.losses`): `cross-entropy`, one of several classes; `binary`,
    yes or no for each output (multi-label); `squared` or `huber`, numbers (regression), which need `tolerance`: an
    answer is right if every output is at most this far from its target, in the target's unit; or `reconstruction`, to
    reproduce the input, which needs no labels: an input that is reproduced badly is unusual. A board's threshold is
    chosen so that the share `false_alarms` of its normal samples lies above it.
    """

    name: str
    features: str | None = None
    directions: AtLeast1 | None = None
    share: Literal["all", "head"] = "all"
    weights: str | None = None
    start: str | None = None
    loss: str = "cross-entropy"
    tolerance: Tolerance | None = None
    false_alarms: Probability | None = None

    rules = rules.MODEL

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, path in (
            ("features", self.features),
            ("weights", self.weights),
            ("start", self.start),
            ("name", self.name),
        ):
            if path is not None and is_path(key, path):  # absolute, as the board's OwnDataSection.path
                object.__setattr__(self, key, str(expanded(path, key).absolute()))

    @property
    def has_features(self) -> bool:
        """Whether the trained network takes features, and not images."""
        return self.features is not None or self.share == "head"

    @property
    def takes_pixels(self) -> bool:
        """Whether features are computed from pixels in [0, 1], unless the task gives a mean and a deviation."""
        return self.features not in (None, UNIT_NORM)

    @property
    def has_order(self) -> bool:
        """Whether the model takes features that are ordered by importance. Raises `BadInput` for a bad file."""
        if self.features is None or not is_path("features", self.features):
            return self.takes_pixels
        from hushfleet.models.features import have_order  # with PyTorch

        return have_order(self.features)


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
        for key, value in self.settings.items():
            too_large = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
            require(not too_large, f"method.{key}", value, "a whole number of 64 bits, or have a decimal point")

    @classmethod
    def of(cls, plain: dict[str, Any]) -> MethodSection:
        """Makes the section of a table with `name` and the settings. Raises `ValueError`."""
        return cls(plain["name"], {key: value for key, value in plain.items() if key != "name"})

    @classmethod
    def faults(cls, plain: Any) -> list[Fault]:
        """Returns all reasons why `of` would refuse a table: its keys, and their types and ranges."""
        if not isinstance(plain, dict):
            return faults(cls, plain, "method")
        if "name" not in plain:
            return [Fault(missing("name", "method"))]
        if found := faults(str, plain["name"], "method.name"):
            return found
        try:
            kind = find_method(plain["name"]).config
        except HushfleetError as error:
            return [Fault(str(error))]
        return faults(kind, {key: value for key, value in plain.items() if key != "name"}, "method")

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings}

    def config(self) -> TrainingConfig:
        return from_plain(find_method(self.name).config, self.settings, where="method")

    def parts(self, privacy: PrivacySpec, rounds: int) -> Method:
        """Returns the method's parts, before they are bound to a network."""
        return find_method(self.name).parts(self.config(), privacy, rounds)


@dataclass(frozen=True)
class PrivacySection(Checked):
    """`[privacy]`: the privacy guarantee, and the noise that it needs.

    Give `noise_multiplier`, or `epsilon`, from which it is computed. With `strict`, the default, `epsilon` also holds
    against the server. `as-published` repeats a paper, and `epsilon` is the paper's number: it holds only against an
    observer who sees nothing but the aggregate (epsilon_release).
    By default `delta` is a tenth of one over the number of devices with `strict`, and ten times that, as in the papers,
    with `as-published`.

    With `secure` a server that does not hold the operator's key sees nothing but sums (`hushfleet.secure`), and
    `epsilon` holds against it. At least `honest_fraction` of the devices are assumed to be honest: the noise is divided
    among the honest devices that remain in the smallest sum (`round.min_updates`) when all dishonest devices are in it.
    `delta` is 1e-5 by default.

    `accountant` converts noise to epsilon and back: `exact`, or `rdp` (Rényi), the looser one that the papers used.

    `reading` says what `epsilon` counts: `user-level` counts rounds in which every device takes part;
    `client-sampling` treats the cohort as a Poisson sample of the devices that nobody sees (DP-FedSim), although the
    broker sees it; `pooled-sampling` is FedDPA's public accountant, which counts batches drawn from the pooled records,
    although training does not draw them so. The last two belong to `as-published`.

    With `unit = "record"` each gradient is noised (DP-SGD): `clip_norm` bounds each record's gradient, a batch includes
    a record with probability `sample_rate` (by default the batch size over an even share of the training records),
    a round has `local_epochs / sample_rate` batches, or `local_steps`, and `epsilon` holds against the server, over
    all rounds.

    In the field the owner of a device sets its budget and preference (DEVICE.toml, `[limits]`). In a simulation each
    device allows `budget` against the server; if the method lets devices choose their noise, each chooses the standard
    noise times 1 plus a normal deviation with standard deviation `preference_std`, within 0.2 to 5.
    """

    unit: Unit = "device"
    accounting: Accounting = "strict"
    clip_norm: PositiveOrInf = 0.5
    noise_multiplier: Annotated[float, Meta(ge=0, le=1000)] | None = None
    epsilon: Annotated[float, Meta(ge=1e-6, le=10_000)] | None = None
    delta: Probability | None = None
    honest_fraction: Share = 0.9
    sample_rate: Share | None = None
    accountant: Accountant = "exact"
    reading: Literal["user-level", "client-sampling", "pooled-sampling"] = "user-level"
    budget: PositiveOrInf = math.inf
    preference_std: Annotated[float, Meta(ge=0, le=10)] = 0.0

    rules = rules.PRIVACY


@dataclass(frozen=True)
class PlanSection(Checked):
    """`[plan]`: what `hushfleet plan` assumed or simulated. It decides only the sentence on whether the fleet pays.

    `images` per board, and `alpha` of their labels, are guesses. The rest is what `--data` simulated on public images:
    `measured_on` names them, `devices` is the size of a fleet in which all are honest and present, `alone` has the
    accuracies without the others, on own labels and on all, and each of `points` has an epsilon, the accuracies of own
    heads and of the shared head, and the gain's deviation over seeds.
    """

    images: AtLeast1 | None = None
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    measured_on: str = ""
    devices: Annotated[float, Meta(ge=1, le=1e6)] | None = None
    alone: tuple[Fraction, ...] = ()
    points: tuple[tuple[Annotated[float, Meta(ge=1e-3, le=1e3)], Fraction, Fraction, Fraction], ...] = ()

    rules = rules.PLAN


@dataclass(frozen=True)
class DataSection(Checked):
    """`[data]`: the data set, and how a simulation divides it among devices.

    For `folder`, `class_names` and `input_shape` describe the devices' class folders; `path` is the folder in which a
    simulation finds `train/<class>/*` and `test/<class>/*`, and an aggregator in the field its public test set. A
    relative path starts at the task file's folder (in an override: at the working directory).

    `arrays` is an `.npz` file `path` with train_x and train_y, test_x and test_y, and more (`hushfleet.data.arrays`);
    `csv` is a file `path` with the columns `label`, perhaps `device`, and values, or a folder with `train.csv` and
    `test.csv`. In the field give `class_names` and `input_shape`. With `partition = "given"` the file says which device
    each sample belongs to.

    A network is given pixels in [0, 1] and all other values as they are, in a simulation as on a board; with `mean` and
    `std`, one of each for a channel, it is given (value - mean) / std. They are public numbers that you give, because
    nothing is computed from private data.

    What tables contain is the same for all samples and boards, and is never concluded from the samples: `columns` names
    the columns of values of CSV files in the order in which the network takes them (left out, it is the order in the
    file `path`), `decimal` is the decimal mark of CSV files, `labels` says whether labels are `names` of classes or
    `numbers` from 0, and `values` whether values are `pixels` from 0 to 255 or `numbers`. A board's owner may say
    otherwise in DEVICE.toml.

    With a `model.loss` other than cross-entropy, y are numbers, `class_names` are the names of the outputs (in
    CSV files the columns of the targets), and a regression's targets are scaled by `target_mean` and `target_std`, one
    of each for an output: public numbers that you give, because nothing is computed from private data; a network learns
    (target - mean) / std.

    With `window = "30d"` a board trains only on the samples that arrived in the current window of 30 days, so that a
    person who appears in one window is protected by the epsilon of that window (docs/privacy.md). In a simulation all
    samples have arrived in the current window.

    `augment = "flip-crop"` flips images at random and moves them by up to 4 pixels before each training step.

    With `test_fraction = 0` a device trains on its whole share, and its own-distribution test part is drawn from
    the common test set by its label shares.

    Each simulated device gets `unlabelled` additional images, with its own mix of classes but without labels. They are
    drawn from the training images that `limit` leaves out, and help its own head after the last round (`hush` with few
    devices); a board has `data.unlabelled` in DEVICE.toml.
    """

    name: DataSetName
    devices: Annotated[int, Meta(ge=1, le=100_000)] = 10
    partition: Partition = "iid"
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    classes_per_device: AtLeast1 | None = None
    test_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    min_samples: Annotated[int, Meta(ge=2)] = 10
    limit: AtLeast1 | None = None
    unlabelled: Annotated[int, Meta(ge=0, le=10_000)] = 0
    augment: Augment = "none"
    window: str | None = None
    path: Path | None = None
    class_names: ClassNames = ()
    input_shape: Shape | None = None
    mean: tuple[Finite, ...] = ()
    std: tuple[_Deviation, ...] = ()
    target_mean: tuple[Finite, ...] = ()
    target_std: tuple[_Deviation, ...] = ()
    columns: Columns = ()
    decimal: DecimalMark = ""
    labels: LabelKind = ""
    values: ValueKind = ""

    rules = rules.DATA

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:  # absolute, because a run can be resumed from a copy of the task, in any folder
            object.__setattr__(self, "path", expanded(self.path, "path").absolute())

    @property
    def form(self) -> SampleForm:
        """How samples are written in tables."""
        return SampleForm(self.columns, self.decimal, self.labels, self.values)

    @property
    def window_s(self) -> int:
        """Length of a window of data in seconds; 0: no windows. Raises `ValueError` for a text in an unknown form."""
        try:
            return 0 if self.window is None else int(duration_s(self.window))
        except ValueError as error:
            raise ValueError(f"window = {error}") from error


@dataclass(frozen=True)
class WireSection(WireSpec):
    """`[wire]`: the encoding that devices are told, and two keys that only the aggregator uses.

    `downlink` is how a global model reaches devices that hold an earlier one: `difference`, encoded, with a step of
    `downlink_step` times the standard deviation of the noise in the aggregate (`relative_step` times the root mean
    square of a layer's change if there is no noise); or `full`, exactly as it was computed. Left out, it is
    `full` if `codec` rounds no more than a float does, because such a task wants exact averages.
    """

    downlink: Literal["difference", "full"] | None = None
    downlink_step: StepSize = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.downlink is None:
            floats = codec_of(self.codec).float_error is not None
            object.__setattr__(self, "downlink", "full" if floats else "difference")

    def spec(self) -> WireSpec:
        return WireSpec(self.codec, self.step, self.relative_step, self.chunk_bytes)
