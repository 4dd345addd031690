"""Predicts the bytes of everything that is sent or stored, before anything is trained.

Messages are made by the wire's own encoder and measured. The size of an update is predicted: the number of values that
a device still shares after this many rounds (from the method), times the bits that the codec needs for one value of
noise, to which its step is tied (from the codec). Packets are counted as the links count them: whole MQTT PUBLISH
packets, without the overhead of TCP, TLS and radio.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.methods.state import PublicState
from hushfleet.secure.committee import committee_rule
from hushfleet.wire.format import quantized
from hushfleet.wire.format.chunks import FRAME_OVERHEAD
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import MASKED, codec_of, steps_for
from hushfleet.wire.format.difference import encode_difference
from hushfleet.wire.format.identity import KEY_BYTES, Identity
from hushfleet.wire.format.spec import SecureSpec
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import encode_masked, encode_update
from hushfleet.wire.link.interface import publish_packet_bytes

_TRIAL_VALUES = 1 << 16
_KEY = Identity.from_bytes(bytes(range(32)))
_EPOCH = 1 << 31  # takes as many bytes as today's unix seconds
_TASK, _DIGEST = "x" * 32, bytes(32)
_TOPICS = Topics("default")


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes: on the wire of whole packets, in a store of the content.

    :param parameters: number of parameters, d.
    :param chunk_bytes: chunk size of the task.
    :param task_blobs: package and graphs, in the order in which a device fetches them.
    :param shared: number of values in an update after 0, 1, ... earlier ones; the last number holds from then on.
    :param bits_per_value: mean bits of an encoded value.
    :param header_bytes: bytes of an update without values and public state.
    :param name_bytes: length of a device's name, the same for the whole fleet.
    :param difference_bytes: bytes of a difference between two consecutive global models; 0 if whole models are sent.
    :param vectors: number of the server half's vectors that are sent with the model.
    """

    parameters: int
    chunk_bytes: int
    task_blobs: tuple[int, ...]
    shared: tuple[int, ...]
    bits_per_value: float
    header_bytes: int
    name_bytes: int
    difference_bytes: int = 0
    vectors: int = 0

    @property
    def model_bytes(self) -> int:
        """The global model, float32, and the vectors that are sent with it."""
        return 4 * self.parameters * (1 + self.vectors)

    def update_bytes(self, participations: int = 0) -> int:
        """Returns the bytes of an update after `participations` earlier ones, without the public state."""
        shared = self.shared[min(participations, len(self.shared) - 1)]
        return self.header_bytes + round(shared * self.bits_per_value / 8)

    def blob_wire_bytes(self, size: int, *, down: bool) -> int:
        """Returns the bytes of all packets of a blob, on the device's topic (up) or on the blob's topic (down)."""
        whole, rest = divmod(size, self.chunk_bytes)
        topic = _TOPICS.blob(_DIGEST) if down else _TOPICS.chunk(self._name)
        packets = whole * publish_packet_bytes(topic, FRAME_OVERHEAD + self.chunk_bytes)
        return packets + (publish_packet_bytes(topic, FRAME_OVERHEAD + rest) if rest else 0)

    @property
    def _name(self) -> str:
        return "d" * self.name_bytes


def sizes_of(prepared: PreparedTask, *, name_bytes: int) -> Sizes:
    """Returns the sizes of a prepared task, without training."""
    spec = prepared.spec
    return Sizes(
        parameters=spec.model.layout.size,
        chunk_bytes=spec.wire.chunk_bytes,
        task_blobs=(
            prepared.spec_ref.size,
            *(graph.size for graph in spec.model.graphs),
            *_membership_list_bytes(prepared, name_bytes),
        ),
        shared=_shared_values(prepared),
        bits_per_value=_bits_per_value(prepared),
        header_bytes=_header_bytes(prepared, name_bytes),
        name_bytes=name_bytes,
        difference_bytes=_difference_bytes(prepared),
        vectors=len(prepared.method.server.vectors),
    )


def _membership_list_bytes(prepared: PreparedTask, name_bytes: int) -> tuple[int, ...]:
    """Returns the size of the membership list of secure aggregation, which a device fetches once."""
    if prepared.spec.privacy.secure is None:
        return ()
    return ((name_bytes + 1 + KEY_BYTES) * prepared.task.data.devices,)


def _shared_values(prepared: PreparedTask) -> tuple[int, ...]:
    """Returns `Sizes.shared`: computed by the method for first, middle and last round, interpolated between them."""
    method, rounds = prepared.method, prepared.spec.rounds
    size = prepared.spec.model.layout.size
    sent = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    nothing = np.zeros(size, dtype=bool)
    asked = sorted({0, rounds // 2, rounds})
    counts = [size]
    for participations in asked[1:]:
        after = method.advance_public(PublicState(nothing, participations - 1), sent)
        counts.append(size - int(np.count_nonzero(after.mask)))
    return tuple(int(value) for value in np.rint(np.interp(range(rounds + 1), asked, counts)))


def _bits_per_value(prepared: PreparedTask) -> float:
    """Returns the codec's mean size of Gaussian values, because noise hides the signal and determines the steps."""
    wire, privacy = prepared.spec.wire, prepared.spec.privacy
    if privacy.secure is not None:
        return _masked_bits(prepared, privacy.secure)
    codec = codec_of(wire.codec)
    if codec.bits is not None:
        return codec.bits
    values = _noise(prepared)
    steps = steps_for(wire, noise_stds=[float(_noised(prepared))], layer_rms=[1.0])
    return 8 * len(codec.encode(values, Coding([len(values)], steps, bytes(16)), np.empty_like(values))) / len(values)


def _masked_bits(prepared: PreparedTask, secure: SecureSpec) -> float:
    """Returns the bits of a masked value, including the corrections for a committee of the mean cohort."""
    task = prepared.task
    rule = committee_rule(task.cohort_size, honest_fraction=secure.honest_fraction, membership_list=task.data.devices)
    size = prepared.spec.model.layout.size
    return secure.bits * (1 + rule.may_miss / max(1, rule.packed)) * secure.length(size) / size


def _difference_bytes(prepared: PreparedTask) -> int:
    """Returns a difference's bytes as if all parameters changed: too many if all devices keep a layer private."""
    wire, layout = prepared.task.wire, prepared.spec.model.layout
    if wire.downlink == "full":
        return 0
    step = wire.downlink_step if _noised(prepared) else wire.relative_step
    parts = 1 + len(prepared.method.server.vectors)
    layers = len(layout.layers) * parts
    still = np.zeros(layers, np.float32)
    header = encode_difference(
        still, still, task=prepared.spec.task, round=1, counts=[1] * layers, steps=[step] * layers
    ).data
    values = _noise(prepared)
    coded = quantized.encode_values(values, Coding([len(values)], [step], None))
    return len(header) + round(8 * len(coded) / len(values) * layout.size * parts / 8)


def _noise(prepared: PreparedTask) -> np.ndarray:
    """Draws float32 noise of standard deviation 1, with at most as many values as the network has: in a small network
    the size of the code table matters."""
    count = min(prepared.spec.model.layout.size, _TRIAL_VALUES)
    return np.random.default_rng(0).standard_normal(count).astype(np.float32)


def _noised(prepared: PreparedTask) -> bool:
    """Returns whether updates carry noise that determines the steps."""
    return prepared.spec.privacy.noise_multiplier > 0 and prepared.method.parts.gaussian is not None


def _header_bytes(prepared: PreparedTask, name_bytes: int) -> int:
    layers, codec = len(prepared.spec.model.layout.layers), codec_of(prepared.spec.wire.codec)
    header = UpdateHeader(
        task=prepared.spec.task,
        round=1,
        device="d" * name_bytes,
        codec=codec.name,
        value_count=layers,
        steps=() if codec.step_of is None else (1.0,) * layers,
        noise_stds=(1.0,) * layers,
        clip_norms=(1.0,) * layers,
        public_digest=bytes(16),
        rounds_charged=1,
        epsilon_server=1.0,
        multiplier_server=1.0,
        noise_split=1,
    )
    if codec is MASKED:
        return len(encode_masked(header, b"", identity=_KEY))
    values, counts = np.zeros(layers, np.float32), [1] * layers
    whole = encode_update(header, values, counts=counts, identity=_KEY).data
    coded = codec.encode(values, header.coding(counts), np.empty_like(values))
    return len(whole) - len(coded)
