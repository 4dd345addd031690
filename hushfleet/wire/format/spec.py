"""Defines the task package: everything that a device learns about a task, as a content-addressed msgpack blob.

People write the aggregator's task file (`task`); this is its resolved form for devices: the method with
its configuration, the privacy charged for each round, the wire format, and the model as data (the layout,
and the digests of the graphs that ONNX Runtime executes).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hushfleet.data.form import ANY_FORM, MOST_STEPS, SampleForm
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.errors import Malformed, TooLarge
from hushfleet.params import MAX_PARAMS, ParamLayout, is_linear
from hushfleet.privacy.ring_length import smooth_length
from hushfleet.privacy.terms import Accountant, Accounting, Unit
from hushfleet.schema import (
    Checked,
    Count,
    Finite,
    NotNegative,
    Positive,
    PositiveOrInf,
    Probability,
    Share,
    from_plain,
    later,
    pack,
    require,
)  # fmt: skip
from hushfleet.wire.format.codecs import NAMES
from hushfleet.wire.format.question import QuestionSpec

if TYPE_CHECKING:
    Form = str
else:
    Form = Literal[NAMES]

SPEC_VERSION = 1
Augment = Literal["none", "flip-crop"]
MAX_SPEC_BYTES = 1 << 20
MAX_GRAPH_BYTES = 32 << 20
MAX_ROUNDS = 1_000_000
MAX_SECURE_ROUNDS = 10_000
"""The limit with secure aggregation: each round number draws one committee, and an aggregator may choose among all
rounds."""
_TASK_ID = "[a-z0-9][a-z0-9._-]{0,95}"
TaskId = Annotated[str, Meta(pattern=rf"^{_TASK_ID}\Z", description=f"like {_TASK_ID}")]
RoundNumber = Annotated[int, Meta(ge=0, le=MAX_ROUNDS)]
Rounds = Annotated[int, Meta(ge=1, le=MAX_ROUNDS)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32, description="32 bytes")]
ChunkBytes = Annotated[int, Meta(ge=1024, le=1 << 19)]
StepSize = Annotated[float, Meta(ge=1e-9, le=16, description="in (0, 16], and at least 1e-9")]
MAX_SIDE = 4096
"""The largest side of a sample besides its steps, and the largest number of features in a vector."""
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE, description=f"a whole number from 1 to {MAX_SIDE}")]
StepCount = Annotated[int, Meta(ge=1, le=MOST_STEPS, description=f"a whole number from 1 to {MOST_STEPS}")]
Shape = tuple[Side, Side, StepCount]
"""Channels, height, width of an image; (channels, 1, steps) of a series, (values, 1, 1) of a vector."""
UNIT_NORM = "unit-norm"
"""The name of the features that only scale a sample to norm 1."""
SOUND = "sound:"
"""How the names of features of sound begin."""
LOG_MEL = "sound:log-mel"
"""The name of the features that are an image of sound, and no vector."""
ClassNames = Annotated[tuple[str, ...], Meta(max_length=65536)]
MAX_BATCHES = 1_000_000
"""The limit of batches in a round with the unit `record`."""


@dataclass(frozen=True)
class BlobRef(Checked):
    """Content-addressed bytes: their SHA-256 and their size."""

    digest: Digest
    size: Annotated[int, Meta(ge=1, le=1 << 32)]

    @classmethod
    def of(cls, data: bytes) -> BlobRef:
        """Makes the reference to these bytes: SHA-256 and length."""
        return cls(hashlib.sha256(data).digest(), len(data))


@dataclass(frozen=True)
class DropoutSpec(Checked):
    """A dropout mask that is an input of the gradient graph: per-sample shape and drop rate."""

    shape: tuple[Annotated[int, Meta(ge=1)], ...]
    rate: Annotated[float, Meta(ge=0, lt=1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(math.prod(self.shape) <= MAX_PARAMS, "shape", self.shape, f"at most {MAX_PARAMS} entries")


@dataclass(frozen=True)
class FeatureSpec(Checked):
    """Fixed features of images, which a network takes in place of the images.

    :param image_shape: channels, height, width of one image.
    :param count: the number of features of an image. If the network takes fewer (`ModelSpec.input_shape`), it takes the
        first ones, and a device's personalized head takes all of them. If it takes all, it may do so in any shape.
    :param graph: ONNX, images to features.
    """

    image_shape: Shape
    count: StepCount
    graph: BlobRef


@dataclass(frozen=True)
class ModelSpec(Checked):
    """The network as data: the layout of the flat vector, and the graphs that compute with it.

    :param input_shape: channels, height, width of the network's input: of one image, or of its features.
    :param class_names: one for each output; for a reconstruction, the meaning of a label.
    :param mean: per channel of an image, subtracted from pixels in [0, 1].
    :param std: per channel of an image, the divisor after that.
    :param form: how samples are written in tables.
    :param closed_form: False for a linear model with an own loss, which only the gradient's graph computes.
    """

    name: str
    layout: ParamLayout
    input_shape: Shape
    class_names: Annotated[ClassNames, Meta(min_length=1)]
    mean: tuple[Finite, ...]
    std: tuple[Positive, ...]
    dropout: tuple[DropoutSpec, ...]
    gradient: BlobRef
    inference: BlobRef
    features: FeatureSpec | None = later(None)
    targets: Targets = later(CLASSES)
    form: SampleForm = later(ANY_FORM)
    closed_form: bool = later(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        channels = self.image_shape[0]
        if self.features is not None:
            taken, count = math.prod(self.input_shape), self.features.count
            fits = taken == count or (taken < count and self.input_shape[1:] == (1, 1))
            require(fits, "input_shape", self.input_shape, f"({count}, 1, 1) or less, or {count} values in all")
        require(len(set(self.class_names)) == len(self.class_names), "class_names", self.class_names[:8], "distinct")
        sound = self.form.sound_shape
        require(sound in (None, self.image_shape), "input_shape", self.image_shape, f"{sound}, as segments of sound")
        outputs = len(self.class_names)
        require(outputs > 1 or not self.targets.are_classes, "class_names", self.class_names, "at least two classes")
        require(len(self.targets.mean) in (0, outputs), "targets.mean", self.targets.mean, f"{outputs} values")
        require(len(self.mean) == len(self.std) == channels, "mean, std", len(self.mean), f"{channels} values")
        for graph in self.graphs:
            require(graph.size <= MAX_GRAPH_BYTES, "graph size", graph.size, f"at most {MAX_GRAPH_BYTES} bytes")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return self.input_shape if self.features is None else self.features.image_shape

    @property
    def outputs(self) -> int:
        """The number of the network's output values for a sample."""
        return self.targets.outputs(self.class_names, self.input_shape)

    @property
    def is_linear(self) -> bool:
        """True if the network is one linear layer, by the names and shapes of its parameters. Its gradient is then
        computed in closed form (`hushfleet.learning.linear`), and a device runs none of its graphs."""
        return is_linear(self.layout) and not self.dropout and self.closed_form

    @property
    def chooses_head(self) -> bool:
        """True if a device makes its personalized head (`hushfleet.learning.personalized_head`): for a linear model
        with classes."""
        return is_linear(self.layout) and self.targets.are_classes

    @property
    def graphs(self) -> tuple[BlobRef, ...]:
        """All graphs that a device needs."""
        return (self.gradient, self.inference, *(() if self.features is None else (self.features.graph,)))


@dataclass(frozen=True)
class SecureSpec(Checked):
    """The parameters of secure aggregation (`hushfleet.secure`).

    :param bits: bits of a value on the wire; the sum is taken modulo the largest prime that fits.
    :param min_devices: the sum of fewer devices is never opened.
    :param honest_devices: the number of devices in a sum whose noise is relied on; each adds 1/honest_devices of it.
    :param honest_fraction: the minimum share of honest devices in the membership list; determines the committee's size.
    :param padded: zeros are added to the values before they are rotated (`hushfleet.privacy.ring_length`).
    """

    bits: Literal[16, 24, 32]
    min_devices: Annotated[int, Meta(ge=2, le=100_000)]
    honest_devices: Annotated[int, Meta(ge=1, le=100_000)]
    honest_fraction: Share = 1.0
    padded: bool = later(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.honest_devices <= self.min_devices,
            "honest_devices",
            self.honest_devices,
            f"at most min_devices = {self.min_devices}",
        )

    def length(self, size: int) -> int:
        """Returns the number of integers that a device sends for `size` values, without the corrections."""
        return smooth_length(size) if self.padded else size


@dataclass(frozen=True)
class PrivacySpec(Checked):
    """The protection of each round's update.

    :param unit: the unit of privacy: `device`, the whole update of a device in a round, or `record`, each sample of the
        device's data, with noise on every gradient.
    :param accounting: `as-published` runs the paper's mechanism; `strict` runs the variant whose ledger holds against
        anyone who sees a device's own update; `secure` divides the noise, and nobody sees a single update.
    :param clip_norm: L2 bound C on the whole update, or on each record's gradient.
    :param noise_multiplier: sigma; the noise's standard deviation is bound x multiplier, and
        `as-published` divides it by the square root of the round's `noise_split`. 0 means no noise.
    :param delta: the delta of every epsilon that is printed.
    :param sample_rate: for the unit `record`: the probability that a batch contains a given record.
    :param batches: for the unit `record`: the number of batches of a round, the same for all devices.
    :param accountant: computes every printed epsilon of the task: `exact`, or `rdp` as in the papers. The limit of a
        device's owner is always counted with `exact`.
    :param noise_split: the maximum number of devices that share a round's noise; 1: the noise is not divided.
    :param secure: for `accounting = "secure"`: a server that did not make the membership list sees only sums.
    """

    unit: Unit
    accounting: Accounting
    clip_norm: PositiveOrInf
    noise_multiplier: NotNegative
    delta: Probability
    sample_rate: Share = later(1.0)
    batches: Annotated[int, Meta(ge=1, le=MAX_BATCHES)] = later(1)
    accountant: Accountant = later("exact")
    noise_split: Annotated[int, Meta(ge=1, le=1_000_000)] = later(1)
    secure: SecureSpec | None = later(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        secure = self.accounting == "secure"
        require((self.secure is not None) == secure, "secure", self.secure, 'given where accounting = "secure"')
        bounded = self.noise_multiplier == 0 or math.isfinite(self.clip_norm)
        require(bounded, "clip_norm", self.clip_norm, "finite where noise is added, since the noise is scaled to it")
        require(not secure or math.isfinite(self.clip_norm), "clip_norm", self.clip_norm, "finite for sums of integers")

    @property
    def as_published(self) -> bool:
        """True if methods run their paper's mechanism; otherwise they run the variant whose ledger holds."""
        return self.accounting == "as-published"

    @property
    def is_strict(self) -> bool:
        """True if nobody is trusted: noise is not divided, and each update protects itself."""
        return self.accounting == "strict"


@dataclass(frozen=True)
class WireSpec(Checked):
    """The wire format of updates.

    :param codec: `quantized` (step tied to the noise, entropy-coded), `one-bit` (signs of noised values), `float16` or
        `float32`; `hushfleet.wire.format.codecs` says what each costs. `masked` is for secure aggregation, and only for
        them.
    :param step: quantisation step in units of the noise's standard deviation.
    :param relative_step: step in units of a layer's root mean square if a method adds no noise.
    :param chunk_bytes: payload bytes of one MQTT message.
    """

    codec: Form = "quantized"
    step: StepSize = 1.0
    relative_step: Share = 0.05
    chunk_bytes: ChunkBytes = 60 * 1024


@dataclass(frozen=True)
class EarlierTask(Checked):
    """The task whose model another task continues: a device keeps its own parts of that model.

    :param class_names: one for each output of that model.
    """

    task: TaskId
    class_names: Annotated[ClassNames, Meta(min_length=1)]


@dataclass(frozen=True)
class TaskSpec(Checked):
    """The whole task package.

    :param task: the run's id: the task's name and a short random part.
    :param method_config: the method's own settings; checked by the method's configuration class.
    :param augment: the augmentation of each batch of images before training.
    :param memory_mib: the estimated memory of a round on a device, with a margin.
    :param continues: the task whose model this one continues.
    :param after_new: with fewer new samples, a device skips a round if its owner lets it say so.
    :param data_window_s: length of the windows of data, seconds: a round trains only on the samples that arrived in the
        present window; 0: on all samples.
    :param question: asked in some of the rounds, which do not train; None: no round asks.
    """

    task: TaskId
    rounds: Rounds
    method: str
    method_config: dict[str, Any]
    privacy: PrivacySpec
    wire: WireSpec
    model: ModelSpec
    memory_mib: Count
    augment: Augment = later("none")
    version: int = SPEC_VERSION
    continues: EarlierTask | None = later(None)
    after_new: Count = later(0)
    data_window_s: Count = later(0)
    question: QuestionSpec | None = later(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        masked, secure = self.wire.codec == "masked", self.privacy.accounting == "secure"
        require(masked == secure, "wire.codec", self.wire.codec, '"masked" with accounting = "secure", and only there')
        most = MAX_SECURE_ROUNDS if secure else MAX_ROUNDS
        require(
            self.rounds <= most, "rounds", self.rounds, f'at most {most} with accounting = "{self.privacy.accounting}"'
        )
        require(self.version == SPEC_VERSION, "version", self.version, f"{SPEC_VERSION}; update this device")
        if self.question is not None:
            unit, kind, trains = self.privacy.unit, self.question.kind, self.training_rounds > 0
            require(unit == "device", "question", kind, "of a task whose unit of privacy is the device")
            require(
                trains == (kind == "evaluation"), "question", kind, "an evaluation where rounds train, and only there"
            )

    def asks(self, round: int) -> bool:
        """Returns whether devices answer a question in this round, in place of training."""
        return self.question is not None and (round % self.question.every == 0 or round == self.rounds)

    @property
    def training_rounds(self) -> int:
        """Number of rounds in which devices train."""
        return self.rounds if self.question is None else self.rounds - -(-self.rounds // self.question.every)

    def training_number(self, round: int) -> int:
        """Returns the number of a training round among the training rounds, from 1 on."""
        return round if self.question is None else round - (round - 1) // self.question.every

    @property
    def last_training_round(self) -> int:
        """The number of the last training round; 0 if there is none."""
        if not self.training_rounds:
            return 0
        return next(round for round in range(self.rounds, 0, -1) if not self.asks(round))

    def local_only(self) -> TaskSpec:
        """Returns the package of the training rounds alone, without the rounds that ask."""
        return self if self.question is None else replace(self, rounds=max(1, self.training_rounds), question=None)

    @property
    def held_out(self) -> float:
        """The share of a device's samples that are never used in training."""
        return 0.0 if self.question is None else self.question.held_out

    @property
    def by_content(self) -> bool:
        """True if no sample may decide whether, or how, another one trains: each is read alone, and by its content, not
        its place, it is for training or held out.

        Otherwise one record would change which other records train, with the unit `record`; and samples of one window
        of data would change which samples train in another.
        """
        return self.privacy.unit == "record" or self.data_window_s > 0

    @property
    def signal(self) -> float | None:
        """A lower bound of r of `hushfleet.methods.hush_rule`: the signal of all devices relative to the noise.

        Infinite without noise. None if it is not known: with the unit `record`, and with `strict`, because then each
        device adds all of the noise and the package does not say how many devices there are.
        """
        privacy, secure = self.privacy, self.privacy.secure
        if privacy.unit == "record" or privacy.is_strict:
            return None
        if privacy.noise_multiplier == 0:
            return math.inf
        counted = privacy.noise_split if secure is None else math.sqrt(secure.min_devices * secure.honest_devices)
        return counted * math.sqrt(self.training_rounds) / privacy.noise_multiplier

    def to_bytes(self) -> bytes:
        """Encodes the task package in the form that `from_bytes` reads."""
        return pack(self)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the task package."""
        return hashlib.sha256(self.to_bytes()).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> TaskSpec:
        """Decodes a task package. Raises `TooLarge` or `Malformed`."""
        if len(data) > MAX_SPEC_BYTES:
            raise TooLarge(f"the task package has {len(data)} bytes, above the cap of {MAX_SPEC_BYTES}")
        try:
            plain = msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Malformed(f"the task package is not msgpack: {error}") from error
        return from_plain(cls, plain)
