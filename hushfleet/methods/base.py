"""What a method of personalized federated learning consists of: a device half and a server half.

Both halves are arithmetic on arrays with a trailing axis `d`, NumPy or PyTorch. State is a value that is
passed in and returned. The executor (a board, a vmapped cohort, a process pool) is chosen elsewhere.

A round on the device:   prepare -> start -> local training, each gradient through `gradient` and `local_gradient`
                         -> measure -> release (clip, noise, once) -> codec -> advance
A round on the server:   controls -> every update is added to exact sums, with its `weight` -> aggregate ->
                         advance_server; `advance_public` per device

Where the unit of privacy is the record, noise is added inside the local training, gradient by gradient, and whatever
a method makes of the trained vector is post-processing: `release` then sends it as it is, and `protect` is not asked.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from hushfleet import array_api
from hushfleet.config.spec import PrivacySpec, require
from hushfleet.errors import Malformed
from hushfleet.model.evaluation import Evaluation
from hushfleet.model.objectives import Objective
from hushfleet.model.params import ParamLayout
from hushfleet.privacy.clipping import clip, layer_norms
from hushfleet.privacy.mechanism import Charge, GaussianMechanism
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism
from hushfleet.training.optim import adam_reach
from hushfleet.training.parts import BoundOf, Part

Array = Any  # numpy.ndarray or torch.Tensor, by the array-API standard


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Local training, common to all methods.

    :param optimizer: `adam` (beta 0.9, 0.999, epsilon 1e-8; state starts afresh each round) or `sgd`.
    :param momentum: of `sgd`.
    :param batch_size: samples a step; the last batch of an epoch may be smaller. With privacy unit `record` batches
        are Poisson samples, and this is what their sums are divided by.
    :param local_epochs: how often a device goes through its samples in a round.
    :param local_steps: how many batches it trains on in a round instead, drawn as in epochs; 0: whole epochs.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    batch_size: int = 16
    local_epochs: int = 1
    local_steps: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        require(self.momentum == 0 or self.optimizer == "sgd", "momentum", self.momentum, "0 unless optimizer = 'sgd'")
        require(0 < self.learning_rate < 100, "learning_rate", self.learning_rate, "in (0, 100)")
        require(0 < self.batch_size <= 65536, "batch_size", self.batch_size, "1 to 65536")
        require(0 < self.local_epochs <= 1000, "local_epochs", self.local_epochs, "1 to 1000")
        require(0 <= self.local_steps <= 1_000_000, "local_steps", self.local_steps, "0 (whole epochs) to 1000000")


@dataclass(frozen=True)
class PublicState:
    """What a device and the aggregator hold alike about this device; a function of what was sent.

    :param mask: bool `[..., d]`, True where a parameter is personalised (kept, not sent).
    :param participations: how many updates of the device went into it.
    """

    mask: Array
    participations: int

    @classmethod
    def initial(cls, size: int) -> PublicState:
        return cls(np.zeros(size, dtype=bool), 0)

    def digest(self) -> bytes:
        """16 bytes: two sides with the same digest hold the same state."""
        packed = np.packbits(np.asarray(self.mask)).tobytes()
        return hashlib.sha256(struct.pack("<I", self.participations) + packed).digest()[:16]

    def to_bytes(self) -> bytes:
        packed = np.packbits(np.asarray(self.mask)).tobytes()
        return struct.pack("<I", self.participations) + zlib.compress(packed, 6)

    @classmethod
    def from_bytes(cls, data: bytes, *, size: int) -> PublicState:
        """Raises `Malformed`; never allocates more than the mask needs."""
        packed_bytes = (size + 7) // 8
        if len(data) < 4:
            raise Malformed(f"a public state of {len(data)} bytes is too short")
        try:
            unpacker = zlib.decompressobj()
            packed = unpacker.decompress(data[4:], packed_bytes + 1)
        except zlib.error as error:
            raise Malformed(f"the public state's mask does not unpack: {error}") from error
        if len(packed) != packed_bytes or not unpacker.eof or unpacker.unused_data:
            raise Malformed(f"the public state's mask is not one of {size} parameters")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8))
        if bits[size:].any():
            raise Malformed("the public state's mask has bits set beyond the last parameter")
        return cls(bits[:size].astype(bool), struct.unpack("<I", data[:4])[0])


@dataclass(frozen=True)
class DeviceState:
    """All that a device carries from round to round. `own` and `private` never leave it.

    :param own: float32 `[..., d]`, the device's model after its last local training; None before it.
    :param private: small named arrays of the method, such as clip weights.
    """

    public: PublicState
    own: Array | None = None
    private: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundTerms:
    """What a round asks of one device.

    :param noise_split: among how many devices the round's noise is divided.
    :param controls: numbers that the server chose for this round and published with the plan, by name.
    :param preference: this device's own privacy preference: its noise is so many times the standard one (APDP-FL).
    """

    noise_split: int = 1
    controls: Mapping[str, float] = field(default_factory=dict)
    preference: float = 1.0


@dataclass(frozen=True)
class Release:
    """A clipped and noised update, before the codec.

    :param values: `[..., d]`, zero where the parameter is personalised.
    :param clip_norms: float64 `[..., L]`, the bound that each layer's noise was scaled to.
    :param noise_stds: float64 `[..., L]`, standard deviation of the noise per coordinate; 0 where the noise was added
        during training.
    :param charge: what the ledger must record before the values and the report leave.
    :param report: a few numbers for the server's half beside the update, within the charge.
    """

    values: Array
    clip_norms: Array
    noise_stds: Array
    charge: Charge
    report: tuple[float, ...] = ()


class Teacher(NamedTuple):
    """What a distillation objective learns from: logits float32 `[n, C]` of the own samples, and the weight in [0, 1]
    of the distillation against the cross-entropy."""

    logits: np.ndarray
    weight: float


class OwnData(Protocol):
    """What a method may ask of a device's own samples outside of its training steps; answers are private."""

    def squared_gradient(self, params: Array) -> Array:
        """Mean over the samples of each one's squared gradient, float32 `[d]`: the diagonal of the empirical Fisher
        information at `params [d]`."""

    def logits(self, params: Array) -> np.ndarray:
        """Logits float32 `[n, C]` of all samples, without dropout."""

    def evaluate(self, params: Array) -> Evaluation: ...


class BatchGradient(Protocol):
    """The objective's gradient on one batch, wherever a method asks for it. Losses are `[...]`, one a client.

    :param memory: lives as long as one local training; a method may keep arrays `[..., n]` in it.
    :param part: what the method's pass that asks will move. Gradients on the rest may be left out, as zeros.
    """

    memory: dict[str, Any]
    part: Part

    def mean(self, params: Array) -> tuple[Any, Array]:
        """Mean loss and its gradient `[..., d]`, in memory that the next call overwrites. With privacy unit `record`
        clipped by record and noised: each call is charged."""

    def each(self, params: Array) -> tuple[Array, Array]:
        """Each sample's loss `[..., B]` and gradient `[..., B, d]`, raw; padding has loss and gradient zero."""

    def clipped(self, params: Array, bound_of: BoundOf) -> tuple[Any, Array]:
        """As `mean`, of gradients that are clipped one by one, on `part` alone, and raw as those of `each`.

        :param bound_of: called once, with the norms `[..., B]` of each sample's gradient on `part` (0 for padding);
            returns what they are clipped to, a number or `[..., 1]`.
        """

    @property
    def sizes(self) -> Array:
        """Samples in the batch, `[...]`."""


@dataclass(frozen=True)
class RoundOutcome:
    """A closed round, for the server half.

    :param before: the global vector float32 `[d]` that the round began with, :param after: the new one.
    :param reports: of the accepted devices, in the order of their names.
    :param accuracy: of the new model on the server's own test set, in 0..1; None without one. Likewise `loss`.
    """

    round: int
    before: np.ndarray
    after: np.ndarray
    reports: Sequence[tuple[float, ...]]
    accuracy: float | None
    loss: float | None


ServerState = dict[str, np.ndarray]


class Method:
    """Base of all methods, and FedAvg's plain behaviour in every step that a method leaves alone.

    :param config: the method's configuration.
    :param privacy: what the task says about privacy.
    :param layout: how the flat vector is read.
    :param rounds: T, the length of the task.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]
    config_class: ClassVar[type[TrainingConfig]] = TrainingConfig
    clips: ClassVar[bool] = True  # whether what is sent is bounded by the clip norm
    personal_noise: ClassVar[bool] = False  # whether devices may choose their own noise multiplier
    max_preference: float = 1.0  # the most that they may choose, in units of the task's

    def __init__(self, config: Any, privacy: PrivacySpec, layout: ParamLayout, *, rounds: int) -> None:
        self.config = config
        self.privacy = privacy
        self.layout = layout
        self.rounds = rounds

    # the device half

    def init_state(self) -> DeviceState:
        return DeviceState(PublicState.initial(self.layout.size))

    def prepare(self, state: DeviceState, global_params: Array, data: OwnData) -> DeviceState:
        """What a method measures on its own data before it starts, kept in `private`."""
        return state

    def start(self, state: DeviceState, global_params: Array) -> Array:
        """The vector that local training begins with, `[..., d]`, to be read only: `global_params` itself where nothing
        is personal, since a board has no room for two."""
        xp = array_api.array_namespace(global_params)
        if state.own is None or not bool(xp.any(state.public.mask)):
            return global_params
        return xp.where(state.public.mask, state.own, global_params)

    @property
    def objective(self) -> Objective:
        """The loss whose gradient the task's graph computes."""
        return Objective()

    def teacher(self, state: DeviceState, data: OwnData) -> Teacher | None:
        """What a distillation objective learns from this round; None trains on labels alone."""
        return None

    def passes(self, state: DeviceState) -> Sequence[Array | None]:
        """The parts of the vector that a batch updates one after the other, each by a gradient of its own.

        Each is a bool `[..., d]`; None is the whole vector, in one step. Each has its own optimizer.
        """
        return (None,)

    def active_passes(self, epoch: int, passes: int) -> Sequence[int]:
        """Which of them an epoch (0, 1, ...) makes."""
        return range(passes)

    def gradient(self, state: DeviceState, start: Array, params: Array, batch: BatchGradient) -> tuple[Any, Array]:
        """Mean loss and the gradient `[..., d]` to step along, before `local_gradient`."""
        return batch.mean(params)

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        """Adds to `gradient`, in place, what the method's objective has beyond the loss."""

    @classmethod
    def gradients_per_batch(cls, config: Any) -> int:
        """How many gradients a batch is used for, at most; with privacy unit `record` they are charged together."""
        return 1

    @property
    def companion(self) -> Method | None:
        """A second local training, of a personal model beside the shared one: its result is the device's own model.

        Its `local_gradient` is given the global vector as `start`.
        """
        return None

    def measure(self, state: DeviceState, own: Array, data: OwnData) -> DeviceState:
        """What a method measures after the training for its report, kept in `private`."""
        return state

    def release(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        """Clips and noises `update = trained - start`, once."""
        if self.privacy.unit == "record":
            return self._as_trained(state, update, terms)
        return self.protect(state, update, terms, noise)

    def protect(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        """`release` for the unit `device`. Here: the shared part as a whole clipped to C, and noised, as DP-FedAvg."""
        xp = array_api.array_namespace(update)
        mechanism, clip_norm = self.mechanism(terms), self.clip_norm(terms)
        shared = self.shared(state, update)
        bounds = xp.full_like(layer_norms(shared, self.layout), clip_norm)
        stds = mechanism.vector_stds(bounds)
        clipped = clip(shared, clip_norm)
        values = mechanism.add_noise(clipped, stds, noise, where=~state.public.mask, layout=self.layout)
        return Release(values, bounds, stds, self.charge(terms))

    def shared(self, state: DeviceState, update: Array) -> Array:
        """`update [..., d]`, zero where a parameter is personal: `update` itself where none is."""
        xp = array_api.array_namespace(update)
        if not bool(xp.any(state.public.mask)):
            return update
        return xp.where(state.public.mask, xp.zeros_like(update), update)

    def advance(
        self, state: DeviceState, *, update: Array, trained: Array, sent: Array
    ) -> DeviceState:
        """The state for the next round.

        :param trained: the device's own model `[..., d]`.
        :param sent: `[..., d]`, exactly what the aggregator decodes.
        """
        return DeviceState(self.advance_public(state.public, sent), trained, state.private)

    def _as_trained(self, state: DeviceState, update: Array, terms: RoundTerms) -> Release:
        xp = array_api.array_namespace(update)
        norms = layer_norms(update, self.layout)
        values = self.shared(state, update)
        return Release(values, xp.full_like(norms, float("inf")), xp.zeros_like(norms), self.charge(terms))

    # both halves

    def clip_norm(self, terms: RoundTerms) -> float:
        """C of a round: the server's choice, or the task's."""
        return terms.controls.get("clip_norm", self.privacy.clip_norm)

    def noise_multiplier(self, terms: RoundTerms) -> float:
        """sigma of a round: the server's choice, or the task's."""
        return terms.controls.get("noise_multiplier", self.privacy.noise_multiplier)

    def mechanism(self, terms: RoundTerms) -> GaussianMechanism:
        """The noise of one update. `strict` protects against the server, so nothing is split."""
        split = terms.noise_split if self.privacy.accounting == "as-published" else 1
        return GaussianMechanism(self.noise_multiplier(terms), noise_split=split)

    def record_mechanism(self, terms: RoundTerms) -> RecordMechanism:
        """The noise of one round's gradients, for the unit `record`."""
        return RecordMechanism(
            clip_norm=self.clip_norm(terms),
            noise_multiplier=self.noise_multiplier(terms),
            sample_rate=self.privacy.sample_rate,
            batches=self.privacy.batches,
            gradients_per_batch=self.gradients_per_batch(self.config),
            batch_size=self.config.batch_size,
        )

    def raw_values(self, terms: RoundTerms) -> tuple[str, ...]:
        """Functions of the device's data that leave in a round beside the values and have no noise, in words.

        The ledger charges infinity for them. Under `strict` accounting a task with noise has none.
        """
        return ()

    def charged_mechanism(self, terms: RoundTerms) -> GaussianMechanism:
        """What pays for values and report together, for the unit `device`."""
        return self.mechanism(terms)

    def charge(self, terms: RoundTerms) -> Charge:
        """What a round costs the device; known before any training."""
        record = self.privacy.unit == "record"
        mechanism = self.record_mechanism(terms) if record else self.charged_mechanism(terms)
        return replace(mechanism.charge(), raw=self.raw_values(terms))

    @property
    def reach(self) -> float:
        """The most that a value of an update can be without noise of its own, whatever the data were; inf: no bound.

        With Adam no value moves by more than some learning rates a step, and with the unit `record` the task says how
        many steps there are. By SGD it moves as far as the gradients say, and of those a batch has any number.
        """
        if self.privacy.unit != "record" or self.config.optimizer != "adam":
            return math.inf
        return adam_reach(self.config.learning_rate, self.privacy.batches)

    def mechanism_multiplier(self, terms: RoundTerms, charged: float) -> float:
        """Noise multiplier of the values alone, where `charged` covers them and the report."""
        return charged

    def report_limit(self, terms: RoundTerms) -> float:
        """The most that a number of an honest report is in size, but for a probability below 1e-14; inf: no bound."""
        return math.inf

    def advance_public(self, public: PublicState, sent: Array) -> PublicState:
        return PublicState(public.mask, public.participations + 1)

    # the server half

    def init_server(self, seed: int) -> ServerState:
        """Named arrays that the server carries from round to round."""
        return {}

    def controls(self, server: ServerState, round: int) -> dict[str, float]:
        """What the plan of `round` tells every device, such as `clip_norm` or `noise_multiplier`."""
        return {}

    @classmethod
    def weighs(cls, config: Any) -> bool:
        """Whether `weight` may be other than 1."""
        return False

    def weight(self, global_params: np.ndarray, sent: np.ndarray) -> float:
        """What an update `sent [d]` weighs in the mean; positive."""
        return 1.0

    def multiplier_release(self, terms: RoundTerms, *, participants: int) -> float:
        """Noise multiplier of one round against whoever sees only the aggregate.

        With the unit `record` it is the device's own: another device's noise is not known to hide its records.
        """
        if self.privacy.unit == "record":
            return self.charge(terms).noise_multiplier
        return self.mechanism(terms).multiplier_release(participants)

    def aggregate(self, global_params: Array, sums: Array, weights: Array) -> Array:
        """The new global vector `[d]` from the weighted sum of sent values and the sum of their senders' weights.

        A parameter that nobody shared keeps its value.
        """
        xp = array_api.array_namespace(global_params)
        mean = sums / xp.astype(xp.where(weights > 0, weights, xp.ones_like(weights)), sums.dtype)
        return global_params + xp.astype(mean, global_params.dtype)

    def advance_server(self, server: ServerState, outcome: RoundOutcome) -> ServerState:
        """The server's state after a round; a function of its arguments alone, since a killed server starts over."""
        return server
