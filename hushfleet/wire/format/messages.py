"""The thirteen small messages, and the signed frame that they travel in.

Frame: "HF", version, kind, u32 body length, msgpack body, Ed25519 signature over the federation's name and all
before it: what was signed for one federation verifies in no other.
A frame is accepted only in the one form that the encoder gives: the decoded message is encoded again and
must be the same bytes. So repeated keys, padded integers, fields in another order and texts that the
encoder would have cleaned are refused without a rule for each.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hushfleet.config.spec import TASK_ID, require
from hushfleet.config.strict import later
from hushfleet.errors import BadSignature, Malformed, OtherVersion, TooLarge
from hushfleet.wire.format import canonical
from hushfleet.wire.format.chunks import MAX_BLOB_BYTES, MAX_RANGES, Ranges, check_ranges
from hushfleet.wire.format.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from hushfleet.wire.format.topics import DIGEST_BYTES, NAME_RULE, is_name

MAGIC = b"HF"
VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024
MAX_COHORT = 4096
MAX_ROUNDS = 1_000_000
MAX_TEXT = 64
MAX_REASON = 400
MAX_INT = (1 << 63) - 1
STATE_DIGEST_BYTES = 16
MAX_SECONDS = 1e12
MAX_CONTROLS = 16
MAX_CONTROL_NAME = 32
MAX_DIFFERENCES = 16
BASE_BYTES = 8
NONCE_BYTES = 16

_HEAD = struct.Struct("<2sBBI")

Phase = Literal["open", "closed", "finished"]
DeviceStatus = Literal["ready", "training", "sleeping", "lost"]
RefusedCode = Literal[
    "late", "not-in-cohort", "unknown-device", "bad-signature", "malformed", "wrong-shape", "non-finite",
    "out-of-bounds", "below-noise", "state-unknown", "duplicate", "store-full",
]  # fmt: skip
DeclineCode = Literal[
    "budget", "memory", "no-data", "no-privacy", "graph", "disk", "busy", "paused", "error"
]  # fmt: skip


def _require_count(name: str, value: int, most: int, least: int = 0) -> None:
    require(least <= value <= most, name, value, f"{least} to {most}")


def _require_bytes(name: str, value: bytes, length: int) -> None:
    require(len(value) == length, name, value.hex()[:64], f"{length} bytes")


def _require_text(name: str, value: str) -> None:
    printable = len(value) <= MAX_TEXT and all(" " <= character <= "~" for character in value)
    require(printable, name, value[:MAX_TEXT], f"at most {MAX_TEXT} printable ASCII characters")


def _require_round(task: str, round_number: int) -> None:
    require(TASK_ID.fullmatch(task) is not None, "task", task[:96], f"like {TASK_ID.pattern}")
    _require_count("round", round_number, MAX_ROUNDS)


def _one_line(text: str) -> str:
    """`text` as one line of at most `MAX_REASON` characters.

    An error's text must never stop an answer from being sent, nor forge a line of the receiver's log.
    """
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 3]}..."


@dataclass(frozen=True)
class ServerState:
    """Retained: the aggregator is there, and this is its key.

    :param epoch: grows at each start of any run of this key; a device refuses what names an older one.
    """

    epoch: int
    state: Literal["ready", "lost"]
    public_key: bytes

    def __post_init__(self) -> None:
        _require_count("epoch", self.epoch, MAX_INT)
        require(self.state in ("ready", "lost"), "state", self.state, "ready or lost")
        _require_bytes("public_key", self.public_key, KEY_BYTES)


@dataclass(frozen=True)
class TaskNotice:
    """Retained: the task package is the blob with this SHA-256 and size.

    :param epoch: of the aggregator, as in `ServerState`.
    """

    task: str
    digest: bytes
    size: int
    epoch: int

    def __post_init__(self) -> None:
        _require_round(self.task, 0)
        _require_count("epoch", self.epoch, MAX_INT)
        _require_bytes("digest", self.digest, DIGEST_BYTES)
        _require_count("size", self.size, MAX_BLOB_BYTES, least=1)


class DifferenceRef(NamedTuple):
    """Where the difference between two global models is to be had (`hushfleet.wire.format.difference`).

    :param base: the first 8 bytes of the SHA-256 of the model that it is applied to.
    :param digest: SHA-256 of the blob; :param size: its bytes.
    """

    base: bytes
    digest: bytes
    size: int


@dataclass(frozen=True)
class RoundPlan:
    """Retained: who takes part in which round, from which global model, until when.

    :param global_digest: SHA-256 of the global model, `d` little-endian float32 values.
    :param global_bytes: its size.
    :param cohort: device id -> digest (16 bytes) of the `PublicState` that the aggregator holds of it.
    :param noise_split: between how many devices the round's noise is divided.
    :param deadline_s: seconds, not negative.
    :param controls: numbers that the method's server half chose for this round, by name.
    :param differences: each applied to the model that the one before it gives; the last one gives the global model.
        Together they are smaller than it is.
    :param epoch: of the aggregator that announces it, as in `ServerState`; 0 in a simulation without a network.
    """

    task: str
    round: int
    rounds: int
    phase: Phase
    global_digest: bytes
    global_bytes: int
    cohort: dict[str, bytes]
    noise_split: int
    deadline_s: float
    controls: dict[str, float] = later({})
    differences: tuple[DifferenceRef, ...] = later(())
    epoch: int = later(0)

    def __post_init__(self) -> None:
        _require_round(self.task, self.round)
        _require_count("rounds", self.rounds, MAX_ROUNDS, least=1)
        require(self.round <= self.rounds, "round", self.round, f"at most rounds = {self.rounds}")
        require(self.phase in get_args(Phase), "phase", self.phase, f"one of {get_args(Phase)}")
        _require_count("epoch", self.epoch, MAX_INT)
        _require_bytes("global_digest", self.global_digest, DIGEST_BYTES)
        _require_count("global_bytes", self.global_bytes, MAX_BLOB_BYTES, least=1)
        _require_count("cohort size", len(self.cohort), MAX_COHORT)
        for device, digest in self.cohort.items():
            require(is_name(device), "cohort device", device[:MAX_TEXT], NAME_RULE)
            _require_bytes(f"cohort[{device}]", digest, STATE_DIGEST_BYTES)
        _require_count("noise_split", self.noise_split, MAX_INT, least=1)
        require(0 <= self.deadline_s <= MAX_SECONDS, "deadline_s", self.deadline_s, f"0 to {MAX_SECONDS:g}")
        _require_count("number of controls", len(self.controls), MAX_CONTROLS)
        for name, value in self.controls.items():
            require(name.isidentifier() and len(name) <= MAX_CONTROL_NAME, "controls", name[:64], "short identifiers")
            require(math.isfinite(value), f"controls[{name}]", value, "finite")
        _require_count("number of differences", len(self.differences), MAX_DIFFERENCES)
        for difference in self.differences:
            _require_bytes("base of a difference", difference.base, BASE_BYTES)
            _require_bytes("digest of a difference", difference.digest, DIGEST_BYTES)
            _require_count("size of a difference", difference.size, MAX_BLOB_BYTES, least=1)
        together = sum(difference.size for difference in self.differences)
        require(together < self.global_bytes, "differences", together, f"below global_bytes = {self.global_bytes}")

    def differences_from(self, held: Collection[bytes]) -> tuple[DifferenceRef, ...] | None:
        """Those that lead to the global model from one of the blobs in `held`, the fewest; None if none do.

        :param held: SHA-256 of each blob that there is. Empty differences: the global model is among them.
        """
        if self.global_digest in held:
            return ()
        bases = {digest[:BASE_BYTES] for digest in held}
        starts = [place for place, each in enumerate(self.differences) if each.base in bases]
        return self.differences[starts[-1] :] if starts else None


@dataclass(frozen=True)
class Birth:
    """Retained, and the will with state `lost`: a device is there, and this is its key.

    :param session: grows by one at each start of the device; a `lost` of an older session is void.
    """

    device: str
    session: int
    state: DeviceStatus
    board: str
    version: str
    public_key: bytes
    memory_mib: int

    def __post_init__(self) -> None:
        require(is_name(self.device), "device", self.device[:MAX_TEXT], NAME_RULE)
        _require_count("session", self.session, MAX_INT)
        require(self.state in get_args(DeviceStatus), "state", self.state, f"one of {get_args(DeviceStatus)}")
        _require_text("board", self.board)
        _require_text("version", self.version)
        _require_bytes("public_key", self.public_key, KEY_BYTES)
        _require_count("memory_mib", self.memory_mib, 1 << 40)


@dataclass(frozen=True)
class Want:
    """A device asks for chunks of a blob.

    :param missing: ranges `(start, stop)` of chunk indices, rising and apart; empty means everything.
    """

    digest: bytes
    size: int
    missing: Ranges

    def __post_init__(self) -> None:
        _require_bytes("digest", self.digest, DIGEST_BYTES)
        _require_count("size", self.size, MAX_BLOB_BYTES, least=1)
        object.__setattr__(self, "missing", check_ranges(self.missing))


@dataclass(frozen=True)
class Offer:
    """A device says: I have this update (its SHA-256 and size) for you."""

    task: str
    round: int
    digest: bytes
    size: int

    def __post_init__(self) -> None:
        _require_round(self.task, self.round)
        _require_bytes("digest", self.digest, DIGEST_BYTES)
        _require_count("size", self.size, MAX_BLOB_BYTES, least=1)


@dataclass(frozen=True)
class Decline:
    """A device says why it sends no update for this round; `reason` is cut to one line."""

    task: str
    round: int
    code: DeclineCode
    reason: str

    def __post_init__(self) -> None:
        _require_round(self.task, self.round)
        require(self.code in get_args(DeclineCode), "code", self.code, f"one of {get_args(DeclineCode)}")
        object.__setattr__(self, "reason", _one_line(self.reason))


@dataclass(frozen=True)
class Ack:
    """The aggregator has committed the update with this SHA-256."""

    task: str
    round: int
    digest: bytes

    def __post_init__(self) -> None:
        _require_round(self.task, self.round)
        _require_bytes("digest", self.digest, DIGEST_BYTES)


@dataclass(frozen=True)
class Missing:
    """The aggregator lacks these chunks of the update; empty means all of them."""

    task: str
    round: int
    digest: bytes
    missing: Ranges

    def __post_init__(self) -> None:
        _require_round(self.task, self.round)
        _require_bytes("digest", self.digest, DIGEST_BYTES)
        object.__setattr__(self, "missing", check_ranges(self.missing))


@dataclass(frozen=True)
class Refused:
    """The aggregator will not take the update; `reason` is cut to one line."""

    task: str
    round: int
    digest: bytes
    code: RefusedCode
    reason: str

    def __post_init__(self) -> None:
        _require_round(self.task, self.round)
        _require_bytes("digest", self.digest, DIGEST_BYTES)
        require(self.code in get_args(RefusedCode), "code", self.code, f"one of {get_args(RefusedCode)}")
        object.__setattr__(self, "reason", _one_line(self.reason))


@dataclass(frozen=True)
class NotEnrolled:
    """The aggregator does not accept the device that announced itself with this key; `reason` is cut to one line."""

    device: str
    public_key: bytes
    reason: str

    def __post_init__(self) -> None:
        require(is_name(self.device), "device", self.device[:MAX_TEXT], NAME_RULE)
        _require_bytes("public_key", self.public_key, KEY_BYTES)
        object.__setattr__(self, "reason", _one_line(self.reason))


@dataclass(frozen=True)
class Ask:
    """A device that has connected asks what the aggregator knows of it, before it trains or sends an update.

    :param session: of this process, as in its `Birth`.
    :param nonce: 16 random bytes, drawn once for this process.
    """

    session: int
    nonce: bytes

    def __post_init__(self) -> None:
        _require_count("session", self.session, MAX_INT)
        _require_bytes("nonce", self.nonce, NONCE_BYTES)


@dataclass(frozen=True)
class Known:
    """What the aggregator knows of a device: the answer to its `Ask`.

    :param epoch: of the aggregator; :param nonce: of the `Ask`, so that no earlier answer can be given for this one.
    :param session: the newest of this device; :param yours: whether it is the asking process's own.
    :param task, round, phase: of the plan that is announced.
    :param last_round: the newest round of the task of which the aggregator has an update of this device, or was
        offered one; 0 for none.
    :param last_digest: SHA-256 of that update; empty for none.
    """

    epoch: int
    nonce: bytes
    session: int
    yours: bool
    task: str
    round: int
    phase: Phase
    last_round: int
    last_digest: bytes

    def __post_init__(self) -> None:
        _require_count("epoch", self.epoch, MAX_INT)
        _require_bytes("nonce", self.nonce, NONCE_BYTES)
        _require_count("session", self.session, MAX_INT)
        _require_round(self.task, self.round)
        require(self.phase in get_args(Phase), "phase", self.phase, f"one of {get_args(Phase)}")
        _require_count("last_round", self.last_round, MAX_ROUNDS)
        _require_bytes("last_digest", self.last_digest, DIGEST_BYTES if self.last_round else 0)


Message = (
    ServerState | TaskNotice | RoundPlan | Birth | Want | Offer | Decline | Ack | Missing | Refused | NotEnrolled
    | Ask | Known
)  # fmt: skip

KINDS: dict[int, type[Message]] = dict(enumerate(get_args(Message), start=1))
_NUMBERS = {cls: number for number, cls in KINDS.items()}


def encode_message(message: Message, identity: Identity, *, federation: str) -> bytes:
    """The signed frame. Raises `TooLarge` above `MAX_MESSAGE_BYTES`, which only a huge cohort reaches.

    :param federation: the name of the one that the message is for; it is signed, and not sent.
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
    """Which message a frame claims to hold; nothing is verified. Raises `Malformed` or `TooLarge`."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"a message of {len(data)} bytes is above the cap of {MAX_MESSAGE_BYTES}")
    if len(data) < _HEAD.size + SIGNATURE_BYTES:
        raise Malformed(f"a message of {len(data)} bytes is too short for its frame")
    magic, version, kind, body_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Malformed(f"a message begins with {MAGIC!r}, not with {bytes(magic)!r}")
    if version != VERSION:
        older = "the sender" if version < VERSION else "this side"
        raise OtherVersion(f"the message has wire version {version}, this side speaks {VERSION}; update {older}")
    if kind not in KINDS:
        raise Malformed(f"the message kind {kind} is not known")
    if body_bytes != len(data) - _HEAD.size - SIGNATURE_BYTES:
        raise Malformed(f"the frame says {body_bytes} bytes of body, but {len(data)} bytes came in all")
    return KINDS[kind]


def decode_message(data: bytes, *, federation: str, public_key: bytes | None = None) -> Message:
    """The message in a frame, checked field by field.

    :param federation: for which it must have been signed.
    :param public_key: who must have signed it. None: only `Birth` and `ServerState` are accepted, by the
        key that they hold; whether that key is to be trusted is the caller's decision.

    Raises `Malformed`, `TooLarge` or `BadSignature`, and nothing else.
    """
    cls = peek_kind(data)
    signed, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    if public_key is not None:
        _verify(public_key, signed, signature, federation)
    elif cls not in (Birth, ServerState):
        raise BadSignature(f"a {cls.__name__} cannot be checked, since its sender's key is not known yet")
    message = canonical.unpack(
        cls,
        signed[_HEAD.size :],
        what=f"the body of the {cls.__name__}",
        max_text=4 * MAX_REASON,
        max_bytes=64,
        max_list=MAX_RANGES,
        max_map=MAX_COHORT,
    )
    if isinstance(message, (Birth, ServerState)):
        if public_key is None:
            _verify(message.public_key, signed, signature, federation)
        elif message.public_key != public_key:
            raise BadSignature(f"the {cls.__name__} announces another key than the one that is pinned")
    return message


def _head_and_body(message: Message) -> bytes:
    body = canonical.pack(message)
    return _HEAD.pack(MAGIC, VERSION, _NUMBERS[type(message)], len(body)) + body


def _context(federation: str) -> bytes:
    """Before what is signed. A name has no zero byte, so no two federations sign the same bytes for anything."""
    return b"hushfleet " + federation.encode() + b"\0"


def _verify(public_key: bytes, signed: bytes, signature: bytes, federation: str) -> None:
    try:
        verify(public_key, _context(federation) + signed, signature)
    except BadSignature as error:
        raise BadSignature(f"{error} for the federation {federation!r}") from error
