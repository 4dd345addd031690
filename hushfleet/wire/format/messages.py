"""Defines the small messages of rounds, and the signed frame of these messages and of the fleet's messages.

Frame: "HF", version, kind, u32 body length, msgpack body, Ed25519 signature over the federation's name and all bytes
before the signature. So a frame that is signed for one federation is not valid in any other.
A frame is accepted only in the one form that the encoder gives: the decoded message is encoded again and
must give the same bytes. So repeated keys, padded integers, fields in another order and texts that the
encoder would have cleaned are refused without a rule for each.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias, TypeVar, cast

from msgspec import Meta

from hushfleet.at_need import at_need
from hushfleet.errors import BadSignature, Malformed, OtherVersion, TooLarge
from hushfleet.schema import Checked, Count, Finite, NotNegative, Share, later, pack, require, unpack
from hushfleet.wire.format.chunks import BlobSize, Ranges, check_ranges
from hushfleet.wire.format.fields import (
    DeclineCode,
    Nonce,
    PublicKey,
    Reason,
    StateDigest,
    Text,
    WithReason,
)
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity, verify
from hushfleet.wire.format.spec import BlobRef, Digest, RoundNumber, Rounds, TaskId
from hushfleet.wire.format.topics import NAME_RULE, Name, is_name

if TYPE_CHECKING:
    from hushfleet.wire.format import fleet_messages, health
else:
    fleet_messages = at_need("hushfleet.wire.format.fleet_messages")
    health = at_need("hushfleet.wire.format.health")

MAGIC = b"HF"
VERSION = 3
FLEET_VERSION = 2
"""Version of the messages of enrolment, health and releases. It is separate, because the fleet service must still
understand a board of an earlier version, and offer it the newer release."""
MAX_MESSAGE_BYTES = 64 * 1024
MAX_COHORT = 4096
MAX_CONTROLS = 16
MAX_DIFFERENCES = 16
BASE_BYTES = 8
MAX_INCLUDED_BYTES = 100_000 // 8
MAX_INT = (1 << 63) - 1

_HEAD = struct.Struct("<2sBBI")
M = TypeVar("M")

Phase = Literal["open", "unmask", "closed", "finished"]
IN_PROGRESS = ("open", "unmask")
"""The phases of an open round."""
DeviceStatus = Literal["ready", "training", "sleeping", "lost"]
RefusedCode = Literal[
    "late", "not-in-cohort", "unknown-device", "bad-signature", "malformed", "wrong-shape", "non-finite",
    "out-of-bounds", "below-noise", "state-unknown", "duplicate", "store-full",
]  # fmt: skip
ControlName = Annotated[str, Meta(pattern=r"^[^\W\d]\w{0,31}\Z", description="a short identifier")]


@dataclass(frozen=True)
class _OfUpdate(Checked):
    """Base of messages about one update: its task, its round and its SHA-256."""

    task: TaskId
    round: RoundNumber
    digest: Digest


@dataclass(frozen=True)
class ServerState(Checked):
    """Retained: the aggregator is there, and this is its key.

    :param epoch: grows at each start of any run with this key; a device refuses messages with an older epoch.
    """

    epoch: Count
    state: Literal["ready", "lost"]
    public_key: PublicKey


@dataclass(frozen=True)
class TaskNotice(Checked):
    """Retained: the task package is the blob with this SHA-256 and size.

    :param epoch: the aggregator's epoch, as in `ServerState`.
    """

    task: TaskId
    digest: Digest
    size: BlobSize
    epoch: Count


class DifferenceRef(NamedTuple):
    """Reference to the difference between two global models (`hushfleet.wire.format.difference`).

    :param base: the first 8 bytes of the SHA-256 of the model that the difference is applied to.
    :param digest: SHA-256 of the blob.
    :param size: the number of bytes of the blob.
    """

    base: Annotated[bytes, Meta(min_length=BASE_BYTES, max_length=BASE_BYTES)]
    digest: Digest
    size: BlobSize


@dataclass(frozen=True)
class SecurePlan(Checked):
    """The parameters of a round's secure aggregation: they determine the devices that take part, for a fleet of any
    size.

    :param roster: the blob that lists devices and keys (`hushfleet.secure.membership_list`).
    :param rate: the probability that a device of the membership list is in the cohort. The membership list and the
        round determine the cohort, so that the aggregator cannot choose the devices.
    :param included: in the phase `unmask`, one bit per device of the cohort, in the membership list's order (the first
        is the highest bit of the first byte): whether its update is in the sum. Empty before this phase.
    """

    roster: BlobRef
    rate: Share
    included: Annotated[bytes, Meta(max_length=MAX_INCLUDED_BYTES)] = b""


@dataclass(frozen=True)
class RoundPlan(Checked):
    """Retained: which devices take part in which round, from which global model, until when.

    :param global_digest: SHA-256 of the global model, `d` little-endian float32 values, followed by the method's
        vectors, `d` values each.
    :param global_bytes: the size of these values in bytes.
    :param cohort: device id -> digest (16 bytes) of the `PublicState` that the aggregator holds of the device.
    :param noise_split: the number of devices that share the round's noise.
    :param deadline_s: seconds, not negative.
    :param controls: numbers that the method's server half chose for this round, by name.
    :param differences: each is applied to the result of the one before it; the last one gives the global model.
        Together they are smaller than the global model.
    :param epoch: the epoch of the announcing aggregator, as in `ServerState`; 0 in a simulation without a network.
    :param secure: the plan of a round with secure aggregation, which names no device: `cohort` is empty.
    :param max_staleness: for a buffered round, which names no device either, because any device may take part: an
        update that is at most this many rounds older is still accepted. 0: the round is not buffered.
    """

    task: TaskId
    round: RoundNumber
    rounds: Rounds
    phase: Phase
    global_digest: Digest
    global_bytes: BlobSize
    cohort: Annotated[dict[str, StateDigest], Meta(max_length=MAX_COHORT)]
    noise_split: Annotated[int, Meta(ge=1, le=MAX_INT)]
    deadline_s: Annotated[float, Meta(ge=0, le=1e12)]
    controls: Annotated[dict[ControlName, Finite], Meta(max_length=MAX_CONTROLS)] = later({})
    differences: Annotated[tuple[DifferenceRef, ...], Meta(max_length=MAX_DIFFERENCES)] = later(())
    epoch: Count = later(0)
    secure: SecurePlan | None = later(None)
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = later(0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "differences", tuple(map(tuple, self.differences)))  # so that their items are checked
        super().__post_init__()
        for device in self.cohort:  # not by the type `Name`, which takes three times as long for a large cohort
            require(is_name(device), "cohort device", device, NAME_RULE)
        require(self.round <= self.rounds, "round", self.round, f"at most rounds = {self.rounds}")
        is_over = self.phase in ("closed", "finished")  # round 0 is closed from the beginning
        require(self.round > 0 or is_over, "round", self.round, f"1 or more in the phase {self.phase!r}")
        together = sum(difference.size for difference in self.differences)
        of_sum = self.secure is not None and bool(self.secure.included)
        require(
            of_sum == (self.phase == "unmask"), "secure.included", of_sum, "given in the phase 'unmask', and only there"
        )
        require(self.secure is None or not self.cohort, "cohort", len(self.cohort), "empty where `secure` is given")
        alone = not (self.max_staleness and (self.cohort or self.secure))
        require(alone, "max_staleness", self.max_staleness, "0 where the plan has a cohort or secure aggregation")
        require(together < self.global_bytes, "differences", together, f"below global_bytes = {self.global_bytes}")

    def names(self, device: str) -> bool:
        """Returns whether the plan alone allows the device in the round; the membership list of secure aggregation
        decides further."""
        return self.secure is not None or self.max_staleness > 0 or device in self.cohort

    @property
    def last_closed(self) -> int:
        """The number of the last closed round in the global model."""
        return self.round if self.phase in ("closed", "finished") else self.round - 1

    def is_of(self, task: str, round: int) -> bool:
        """Returns whether this plan is of that round."""
        return (self.task, self.round) == (task, round)

    def takes(self, task: str, round: int) -> bool:
        """Returns whether an update of that round belongs to this plan: it is for the same round, or not too old."""
        return task == self.task and self.round - self.max_staleness <= round <= self.round

    def waits_for(self, task: str, round: int) -> bool:
        """Returns whether an update of that round that is still being made is of use: the plan's sum takes it, or that
        of the next round."""
        more_follows = self.phase == "closed" and self.max_staleness > 0
        return (self.phase == "open" or more_follows) and self.takes(task, round)

    def differences_from(self, held: Collection[bytes]) -> tuple[DifferenceRef, ...] | None:
        """Returns the fewest differences that lead from a blob in `held` to the global model; None if none do.

        The result is empty if the global model itself is in `held`.

        :param held: SHA-256 of each blob that is already there.
        """
        if self.global_digest in held:
            return ()
        bases = {digest[:BASE_BYTES] for digest in held}
        starts = [place for place, each in enumerate(self.differences) if each.base in bases]
        return self.differences[starts[-1] :] if starts else None


@dataclass(frozen=True)
class Birth(Checked):
    """Retained: a device is there, and this is its key. With state `lost`, it is the device's MQTT will.

    :param session: grows by one at each start of the device; a `lost` of an older session is ignored.
    """

    device: Name
    session: Count
    state: DeviceStatus
    board: Text
    version: Text
    public_key: PublicKey
    memory_mib: Annotated[int, Meta(ge=0, le=1 << 40)]


@dataclass(frozen=True)
class Want(Checked):
    """A device asks for chunks of a blob.

    :param missing: ranges `(start, stop)` of chunk indices, in rising order, with gaps; empty means all chunks.
    """

    digest: Digest
    size: BlobSize
    missing: Ranges

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.missing)


@dataclass(frozen=True)
class Offer(_OfUpdate):
    """A device has this update for the aggregator."""

    size: BlobSize


@dataclass(frozen=True)
class Decline(WithReason):
    """A device says why it sends no update for this round; `reason` is shortened to one line."""

    task: TaskId
    round: RoundNumber
    code: DeclineCode
    reason: Reason


@dataclass(frozen=True)
class Ack(_OfUpdate):
    """The aggregator has committed the update."""


@dataclass(frozen=True)
class Missing(_OfUpdate):
    """The aggregator lacks these chunks of the update; empty means all of them."""

    missing: Ranges

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.missing)


@dataclass(frozen=True)
class Refused(WithReason, _OfUpdate):
    """The aggregator refuses the update; `reason` is shortened to one line."""

    code: RefusedCode
    reason: Reason


@dataclass(frozen=True)
class NotEnrolled(WithReason):
    """The aggregator does not accept the device that announced this key; `reason` is shortened to one line."""

    device: Name
    public_key: PublicKey
    reason: Reason


@dataclass(frozen=True)
class Ask(Checked):
    """A device that has connected asks what the aggregator knows about it, before it trains or sends an update.

    :param session: the session of this process, as in its `Birth`.
    :param nonce: 16 random bytes, drawn once for this process.
    """

    session: Count
    nonce: Nonce


@dataclass(frozen=True)
class SeenCharges(Checked):
    """The rounds that the aggregator has ever seen the asking device's key charge, over all tasks and runs.

    Each of them is in the ledger of the newest store of this key; a store that lacks one is an older copy.

    :param rounds: their number.
    :param weight: the sum of their `Charge.weight`, of those whose charge is known.
    :param task: that of the newest of them.
    :param round: that of the newest of them.
    """

    rounds: Annotated[int, Meta(ge=1, le=MAX_INT)]
    weight: NotNegative
    task: TaskId
    round: RoundNumber


@dataclass(frozen=True)
class Known(Checked):
    """The answer to an `Ask`: what the aggregator knows about a device.

    :param epoch: the aggregator's epoch.
    :param nonce: the nonce of the `Ask`, so that no earlier answer can replace this one.
    :param session: the newest session of this device.
    :param yours: whether that session is the asking process's own.
    :param task: that of the announced plan.
    :param round: that of the announced plan.
    :param phase: that of the announced plan.
    :param last_round: the newest round of the task for which the aggregator has an update of this device, or was
        offered one; 0 for none.
    :param last_digest: SHA-256 of that update; empty for none.
    :param seen: None if the aggregator has seen no charge of this key.
    """

    epoch: Count
    nonce: Nonce
    session: Count
    yours: bool
    task: TaskId
    round: RoundNumber
    phase: Phase
    last_round: RoundNumber
    last_digest: Annotated[bytes, Meta(max_length=32)]
    seen: SeenCharges | None = later(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = 32 if self.last_round else 0
        require(len(self.last_digest) == expected, "last_digest", self.last_digest.hex(), f"{expected} bytes")


Message: TypeAlias = (
    "ServerState | TaskNotice | RoundPlan | Birth | Want | Offer | Decline | Ack | Missing | Refused | NotEnrolled"
    " | Ask | Known | fleet_messages.EnrolRequest | fleet_messages.EnrolAnswer | health.Health"
    " | fleet_messages.ReleaseOffer | fleet_messages.ReleaseNews"
)

_PLACES = [each.strip().rpartition(".") for each in str(Message).split("|")]
KINDS = tuple(name for _, _, name in _PLACES)
"""The names of all messages, in the order of `Message`; the kind of one on the wire is its place, from 1 on."""
_OF_FLEET = ("Want", "EnrolRequest", "EnrolAnswer", "Health", "ReleaseOffer")
_WITH_KEY = ("ServerState", "Birth", "EnrolRequest")


def encode_message(message: Message, identity: Identity, *, federation: str) -> bytes:
    """Returns the signed frame. Raises `TooLarge` above `MAX_MESSAGE_BYTES`, which only a huge cohort reaches.

    :param federation: the name of the federation that the message is for; it is signed, but not sent.
    """
    head_and_body = _head_and_body(message)
    size = len(head_and_body) + SIGNATURE_BYTES
    if size > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"a {type(message).__name__} of {size} bytes is above the cap of {MAX_MESSAGE_BYTES}; "
            "use fewer or shorter device ids in one round"
        )
    return head_and_body + identity.sign(_context(federation) + head_and_body)


def peek_kind(data: bytes) -> type[Message]:
    """Returns the message type that a frame claims; nothing is verified. Raises `Malformed` or `TooLarge`."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"a message of {len(data)} bytes is above the cap of {MAX_MESSAGE_BYTES}")
    if len(data) < _HEAD.size + SIGNATURE_BYTES:
        raise Malformed(f"a message of {len(data)} bytes is too short for its frame")
    magic, version, kind, body_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Malformed(f"a message begins with {MAGIC!r}, not with {bytes(magic)!r}")
    expected = version_of(kind)
    if version != expected:
        older = "the sender" if version < expected else "this side"
        raise OtherVersion(f"the message has wire version {version}, this side speaks {expected}; update {older}")
    if not 0 < kind <= len(KINDS):
        raise Malformed(f"the message kind {kind} is not known")
    if body_bytes != len(data) - _HEAD.size - SIGNATURE_BYTES:
        raise Malformed(f"the frame says {body_bytes} bytes of body, but {len(data)} bytes came in all")
    return type_of(kind)


def type_of(kind: int) -> type[Message]:
    """Returns the type of the messages of this kind. Those of a fleet are imported if one comes or goes."""
    module, _, name = _PLACES[kind - 1]
    found: type[Message] = getattr(globals()[module], name) if module else globals()[name]
    return found


def decode_message(data: bytes, *, federation: str, public_key: bytes | None = None) -> Message:
    """Decodes the message in a frame, and checks it field by field.

    :param federation: the federation for which it must have been signed.
    :param public_key: the key that must have signed it. None: only `Birth`, `ServerState` and `EnrolRequest` are
        accepted, and checked with the key that they contain; the caller decides whether to trust that key.

    Raises `Malformed`, `TooLarge` or `BadSignature`, and nothing else.
    """
    cls = peek_kind(data)
    signed, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    if public_key is not None:
        _verify(public_key, signed, signature, federation)
    elif cls.__name__ not in _WITH_KEY:
        raise BadSignature(f"a {cls.__name__} cannot be checked, since its sender's key is not known yet")
    message: Message = unpack(cls, signed[_HEAD.size :], what=f"the body of the {cls.__name__}")
    if cls.__name__ in _WITH_KEY:
        announced = cast("Birth", message).public_key
        if public_key is None:
            _verify(announced, signed, signature, federation)
        elif announced != public_key:
            raise BadSignature(f"the {cls.__name__} announces another key than the one that is pinned")
    return message


def unverified(kind: type[M], data: bytes) -> M | None:
    """Decodes a message of this kind WITHOUT its signature, for one that may have no effect; None for another kind.

    Raises `Malformed` or `TooLarge`.
    """
    return unpack(kind, data[_HEAD.size : -SIGNATURE_BYTES], what="the body") if peek_kind(data) is kind else None


def decode_as(kind: type[M], data: bytes, *, federation: str, public_key: bytes | None = None) -> M:
    """Decodes a message as `decode_message` does; raises `Malformed` also if it is of another kind."""
    message = decode_message(data, federation=federation, public_key=public_key)
    if not isinstance(message, kind):
        raise Malformed(f"expected a {kind.__name__}, got a {type(message).__name__}")
    return message


def version_of(kind: int) -> int:
    """Returns the wire version of messages of this kind: the version of fleet messages, or of round messages."""
    of_fleet = 0 < kind <= len(KINDS) and KINDS[kind - 1] in _OF_FLEET
    return FLEET_VERSION if of_fleet else VERSION


def _head_and_body(message: Message) -> bytes:
    body, kind = pack(message), KINDS.index(type(message).__name__) + 1
    return _HEAD.pack(MAGIC, version_of(kind), kind, len(body)) + body


def _context(federation: str) -> bytes:
    """Returns the prefix of signed bytes; names have no zero byte, so no two federations sign the same bytes."""
    return b"hushfleet " + federation.encode() + b"\0"


def _verify(public_key: bytes, signed: bytes, signature: bytes, federation: str) -> None:
    try:
        verify(public_key, _context(federation) + signed, signature)
    except BadSignature as error:
        raise BadSignature(f"{error} for the federation {federation!r}") from error
