"""What a method of personalized federated learning consists of: a device half and a server half.

Both halves are arithmetic on arrays with a trailing axis `d`, NumPy or PyTorch. State is a value that is
passed in and returned. The executor (a board, a vmapped cohort, a process pool) is chosen elsewhere.

A round on the device:   start -> local training, each gradient through `local_gradient` -> release
                         (clip, noise, once) -> codec -> advance
A round on the server:   every update is added to exact sums -> aggregate; `advance_public` per device
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import array_api_compat
import numpy as np

from hushfleet.errors import Malformed
from hushfleet.params import ParamLayout
from hushfleet.privacy.mechanism import Charge, GaussianMechanism
from hushfleet.privacy.noise import NoiseSource
from hushfleet.spec import PrivacySpec, require

Array = Any  # numpy.ndarray or torch.Tensor, by the array-API standard


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Local training, common to all methods.

    :param optimizer: `adam` (beta 0.9, 0.999, epsilon 1e-8; state starts afresh each round) or `sgd`.
    :param batch_size: samples a step; the last batch of an epoch may be smaller.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    batch_size: int = 16
    local_epochs: int = 1

    def __post_init__(self) -> None:
        require(0 < self.learning_rate < 100, "learning_rate", self.learning_rate, "in (0, 100)")
        require(0 < self.batch_size <= 65536, "batch_size", self.batch_size, "1 to 65536")
        require(0 < self.local_epochs <= 1000, "local_epochs", self.local_epochs, "1 to 1000")


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
class Release:
    """A clipped and noised update, before the codec.

    :param values: `[..., d]`, zero where the parameter is personalised.
    :param clip_norms: float64 `[..., L]`, the bound that each layer's noise was scaled to.
    :param noise_stds: float64 `[..., L]`, standard deviation of the noise per coordinate.
    :param charge: what the ledger must record before the values leave.
    """

    values: Array
    clip_norms: Array
    noise_stds: Array
    charge: Charge


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
    clips: ClassVar[bool] = True  # whether what is sent is bounded by the task's clip norm

    def __init__(self, config: Any, privacy: PrivacySpec, layout: ParamLayout, *, rounds: int) -> None:
        self.config = config
        self.privacy = privacy
        self.layout = layout
        self.rounds = rounds

    # the device half

    def init_state(self) -> DeviceState:
        return DeviceState(PublicState.initial(self.layout.size))

    def start(self, state: DeviceState, global_params: Array) -> Array:
        """The vector that local training begins with, `[..., d]`, a copy."""
        xp = array_api_compat.array_namespace(global_params)
        if state.own is None:
            return xp.asarray(global_params, copy=True)
        return xp.where(state.public.mask, state.own, global_params)

    def passes(self, state: DeviceState) -> Sequence[Array | None]:
        """The parts of the vector that a batch updates one after the other, each by a gradient of its own.

        Each is a bool `[..., d]`; None is the whole vector, in one step.
        """
        return (None,)

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        """Adds to `gradient`, in place, what the method's objective has beyond the loss."""

    def release(
        self, state: DeviceState, update: Array, *, cohort_size: int, noise: NoiseSource
    ) -> Release:
        """Clips and noises `update = trained - start`, once."""
        raise TypeError(f"{type(self).__name__} does not say how its updates are released")

    def advance(
        self, state: DeviceState, *, update: Array, trained: Array, sent: Array
    ) -> DeviceState:
        """The state for the next round; `sent [..., d]` is exactly what the aggregator decodes."""
        return DeviceState(self.advance_public(state.public, sent), trained, state.private)

    # both halves

    def mechanism(self, cohort_size: int) -> GaussianMechanism:
        """The noise of one round. `strict` protects against the server, so nothing is split."""
        split = cohort_size if self.privacy.accounting == "as-published" else 1
        return GaussianMechanism(self.privacy.noise_multiplier, noise_split=split)

    def advance_public(self, public: PublicState, sent: Array) -> PublicState:
        return PublicState(public.mask, public.participations + 1)

    # the server half

    def multiplier_release(self, *, cohort_size: int, participants: int) -> float:
        """Noise multiplier of one round against whoever sees only the aggregate."""
        return self.mechanism(cohort_size).multiplier_release(participants)

    def aggregate(self, global_params: Array, sums: Array, counts: Array) -> Array:
        """The new global vector `[d]` from the sum of sent values and the number of senders.

        A parameter that nobody shared keeps its value.
        """
        xp = array_api_compat.array_namespace(global_params)
        mean = sums / xp.astype(xp.where(counts > 0, counts, 1), sums.dtype)
        return global_params + xp.astype(mean, global_params.dtype)
