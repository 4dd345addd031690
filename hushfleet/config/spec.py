"""What a device is told about a task: the task package, a msgpack blob that travels content-addressed.

The aggregator's task file (`task`) is for people; this is its resolved form for devices: the
method with its configuration, the privacy that each round is charged with, the wire format, and the
model as data (layout and the digests of the graphs that ONNX Runtime executes).
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from hushfleet.config.strict import from_plain, later, to_plain
from hushfleet.errors import Malformed, TooLarge
from hushfleet.model.params import MAX_PARAMS, ParamLayout
from hushfleet.privacy.accounting.epsilon import Accountant

SPEC_VERSION = 1
Augment = Literal["none", "flip-crop"]
MAX_SPEC_BYTES = 1 << 20
MAX_GRAPH_BYTES = 32 << 20
TASK_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")


def require(condition: bool, name: str, value: object, accepted: str) -> None:
    """Raises ValueError in the one form that all configuration errors have."""
    if not condition:
        raise ValueError(f"{name} = {value!r}: must be {accepted}")


@dataclass(frozen=True)
class BlobRef:
    """Content-addressed bytes: their SHA-256 and their size."""

    digest: bytes
    size: int

    def __post_init__(self) -> None:
        require(len(self.digest) == 32, "digest", self.digest.hex(), "32 bytes")
        require(0 < self.size <= 1 << 32, "size", self.size, "between 1 and 2^32 bytes")

    @classmethod
    def of(cls, data: bytes) -> BlobRef:
        return cls(hashlib.sha256(data).digest(), len(data))


@dataclass(frozen=True)
class DropoutSpec:
    """A dropout mask that the gradient graph takes as input: per-sample shape and drop rate."""

    shape: tuple[int, ...]
    rate: float

    def __post_init__(self) -> None:
        require(0 <= self.rate < 1, "rate", self.rate, "in [0, 1)")
        require(all(n > 0 for n in self.shape), "shape", self.shape, "positive sizes")
        require(math.prod(self.shape) <= MAX_PARAMS, "shape", self.shape, f"at most {MAX_PARAMS} entries")


@dataclass(frozen=True)
class ModelSpec:
    """The network as data: how the flat vector is read, and the graphs that compute with it.

    :param input_shape: channels, height, width of one image.
    :param mean: per channel, subtracted from pixels in [0, 1].
    :param std: per channel, divided by afterwards.
    """

    name: str
    layout: ParamLayout
    input_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dropout: tuple[DropoutSpec, ...]
    gradient: BlobRef
    inference: BlobRef

    def __post_init__(self) -> None:
        channels = self.input_shape[0]
        require(all(0 < n <= 4096 for n in self.input_shape), "input_shape", self.input_shape, "1 to 4096 each")
        require(len(set(self.class_names)) == len(self.class_names), "class_names", self.class_names[:8], "distinct")
        require(1 < len(self.class_names) <= 65536, "class_names", len(self.class_names), "2 to 65536 names")
        require(len(self.mean) == len(self.std) == channels, "mean, std", len(self.mean), f"{channels} values")
        require(all(math.isfinite(m) for m in self.mean), "mean", self.mean, "finite")
        require(all(0 < s < math.inf for s in self.std), "std", self.std, "positive and finite")
        for graph in (self.gradient, self.inference):
            require(graph.size <= MAX_GRAPH_BYTES, "graph size", graph.size, f"at most {MAX_GRAPH_BYTES} bytes")


@dataclass(frozen=True)
class PrivacySpec:
    """How each round's update is protected.

    :param unit: what one unit of privacy is: `device`, the whole update of a device in a round, or `record`, each
        sample of the device's data, with noise on every gradient.
    :param accounting: `as-published` runs the paper's mechanism; `strict` the variant whose ledger holds.
    :param clip_norm: L2 bound C on the whole update, or on each record's gradient.
    :param noise_multiplier: sigma; the noise's standard deviation is bound x multiplier, and
        `as-published` divides it by the square root of the round's `noise_split`. 0 means no noise.
    :param delta: the delta of every epsilon that is printed.
    :param sample_rate: of the unit `record`: with which probability a batch takes each record.
    :param batches: of the unit `record`: how many batches a round has, the same for all devices.
    :param accountant: by which every epsilon of the task is printed: `exact`, or `rdp` as in the papers. What the owner
        of a device allows is always counted by `exact`.
    :param noise_split: among how many devices a round's noise may be divided, at most; 1: not at all.
    """

    unit: Literal["device", "record"]
    accounting: Literal["as-published", "strict"]
    clip_norm: float
    noise_multiplier: float
    delta: float
    sample_rate: float = later(1.0)
    batches: int = later(1)
    accountant: Accountant = later("exact")
    noise_split: int = later(1)

    def __post_init__(self) -> None:
        require(0 < self.sample_rate <= 1, "sample_rate", self.sample_rate, "in (0, 1]")
        require(1 <= self.batches <= 1_000_000, "batches", self.batches, "1 to 1000000")
        require(1 <= self.noise_split <= 1_000_000, "noise_split", self.noise_split, "1 to 1000000")
        require(self.clip_norm > 0, "clip_norm", self.clip_norm, "positive (inf: no clipping)")
        require(
            self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier),
            "noise_multiplier",
            self.noise_multiplier,
            "0 or a finite positive number",
        )
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        require(
            self.noise_multiplier == 0 or math.isfinite(self.clip_norm),
            "clip_norm",
            self.clip_norm,
            "finite where noise is added, since the noise is scaled to it",
        )


@dataclass(frozen=True)
class WireSpec:
    """How updates travel.

    :param codec: `quantized` (step tied to the noise, entropy-coded), `one-bit` (signs of noised values), `float16` or
        `float32`; `hushfleet.wire.format.forms` says what each costs.
    :param step: quantisation step in units of the noise's standard deviation.
    :param relative_step: step in units of a layer's root mean square where a method adds no noise.
    :param chunk_bytes: payload bytes of one MQTT message.
    """

    codec: Literal["quantized", "one-bit", "float16", "float32"] = "quantized"
    step: float = 1.0
    relative_step: float = 0.05
    chunk_bytes: int = 60 * 1024

    def __post_init__(self) -> None:
        require(0 < self.step <= 16, "step", self.step, "in (0, 16]")
        require(0 < self.relative_step <= 1, "relative_step", self.relative_step, "in (0, 1]")
        require(1024 <= self.chunk_bytes <= 1 << 19, "chunk_bytes", self.chunk_bytes, "1024 to 524288")


@dataclass(frozen=True)
class TaskSpec:
    """The whole task package.

    :param task: the run's id: the task's name and a short random part.
    :param method_config: the method's own settings; checked by the method's configuration class.
    :param augment: what a device does to each batch of images before it trains on them.
    :param memory_mib: what a round is expected to need on a device, an estimate with head-room.
    """

    task: str
    rounds: int
    method: str
    method_config: dict[str, Any]
    privacy: PrivacySpec
    wire: WireSpec
    model: ModelSpec
    memory_mib: int
    augment: Augment = later("none")
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        require(self.version == SPEC_VERSION, "version", self.version, f"{SPEC_VERSION}; update this device")
        require(bool(TASK_ID.fullmatch(self.task)), "task", self.task, f"like {TASK_ID.pattern}")
        require(0 < self.rounds <= 1_000_000, "rounds", self.rounds, "1 to 1000000")
        require(self.memory_mib >= 0, "memory_mib", self.memory_mib, "not negative")

    def to_bytes(self) -> bytes:
        return msgpack.packb(to_plain(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> TaskSpec:
        """Raises `TooLarge` or `Malformed`."""
        if len(data) > MAX_SPEC_BYTES:
            raise TooLarge(f"the task package has {len(data)} bytes, above the cap of {MAX_SPEC_BYTES}")
        try:
            plain = msgpack.unpackb(data, strict_map_key=True)
        except Exception as error:  # msgpack raises a dozen kinds, ValueError and its own among them
            raise Malformed(f"the task package is not msgpack: {error}") from error
        return from_plain(cls, plain)
