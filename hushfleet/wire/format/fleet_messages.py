"""Defines the messages between a board and the fleet service: enrolment and releases (docs/wire.md, "Fleet")."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.schema import Checked, Count, NotNegative, Share, later, require
from hushfleet.wire.format.chunks import DEFAULT_CHUNK_BYTES, Ranges, check_ranges
from hushfleet.wire.format.fields import Nonce, PublicKey, Reason, Text, WithReason
from hushfleet.wire.format.spec import MAX_ROUNDS, Digest, RoundNumber, TaskId
from hushfleet.wire.format.topics import Name

PROOF_BYTES = 64
MAX_CSR_BYTES = 2048
MAX_CERTIFICATE_BYTES = 16 * 1024
MAX_CARRIED = 1000
MAX_CARRIED_BYTES = 40 * 1024  # of carried rounds in one answer, besides its certificate
MAX_MANIFEST_BYTES = 8 * 1024
MAX_RELEASE_BYTES = 256 << 20
MAX_KEYS_BYTES = 32 * 1024
MAX_NEWEST_BYTES = 8 * 1024
RELEASE_CHUNK_BYTES = DEFAULT_CHUNK_BYTES

Verdict = Literal["granted", "pending", "refused"]
SpentRound = tuple[TaskId, RoundNumber]


@dataclass(frozen=True)
class EnrolRequest(Checked):
    """A board asks for a certificate: its first one, with the proof of a token, or the next one.

    :param csr: a certificate signing request (PKCS #10, DER) for the board's TLS key; its common name is the device id.
    :param public_key: the public key of the board's identity, which signs this frame.
    :param proof: a signature of `proven_by_token` by the token's key. Empty: without a token, as for a renewal.
    :param nonce: the answer repeats it.
    :param after: the board still needs only the charges after this task and round (`EnrolAnswer.up_to`).
    """

    device: Name
    csr: Annotated[bytes, Meta(min_length=1, max_length=MAX_CSR_BYTES)]
    public_key: PublicKey
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)]
    nonce: Nonce
    board: Text
    version: Text
    after: SpentRound | None = later(None)


def token_seed(token_digest: bytes) -> bytes:
    """Returns the seed of the Ed25519 key that belongs to a token, 32 secret bytes.

    The fleet service keeps only the public key, which can check a proof but cannot make one.

    :param token_digest: SHA-256 of the token.
    """
    return hmac.digest(token_digest, b"hushfleet enrolment key", "sha256")


def proven_by_token(*, federation: str, device: str, csr: bytes, public_key: bytes) -> bytes:
    """Returns the bytes that a board signs with its token's key, to prove that it has the token without sending it.

    :param public_key: the public key of the board's identity.
    """
    fields = (b"hushfleet enrolment", federation.encode(), device.encode(), public_key, csr)
    return b"\0".join(hashlib.sha256(field).digest() for field in fields)


@dataclass(frozen=True)
class CarriedRounds(Checked):
    """Rounds in which a board has spent privacy with an earlier memory card; each has the same fields of a `Charge`.

    :param rounds: ranges `(start, stop)` of round numbers, in rising order, with gaps between them.
    """

    task: TaskId
    rounds: Annotated[Ranges, Meta(min_length=1)]
    unit: Literal["device", "record"]
    adjacency: Annotated[str, Meta(min_length=1, max_length=200)]
    mechanism: Literal["gaussian", "none"]
    noise_multiplier: NotNegative
    noise_split: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    sample_rate: Share
    steps: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    raw: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=400)], ...], Meta(max_length=16)]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.rounds)
        require(self.rounds[-1][1] <= MAX_ROUNDS + 1, "rounds", self.rounds[-1][1], f"at most {MAX_ROUNDS + 1}")


@dataclass(frozen=True)
class EnrolAnswer(WithReason):
    """The fleet service's answer to an `EnrolRequest`, signed by the service's key.

    :param certificate: PEM, with intermediate ones if there are any; empty unless the verdict is `granted`.
    :param retry_s: seconds after which the board may ask again.
    :param carried: charges under this id with earlier memory cards, for the ledger of a new board.
    :param up_to: `carried` ends with this task and round, in order, and there is more; the board asks for the rest with
        this value as `after`.
    """

    device: Name
    nonce: Nonce
    verdict: Verdict
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    reason: Reason
    retry_s: Count
    carried: Annotated[tuple[CarriedRounds, ...], Meta(max_length=MAX_CARRIED)] = later(())
    up_to: SpentRound | None = later(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        granted = self.verdict == "granted"
        require(granted == bool(self.certificate), "certificate", len(self.certificate), "given where it is granted")


@dataclass(frozen=True)
class ReleaseOffer(Checked):
    """A board should run this release. It is signed with the fleet service's key, and sent again while it is valid.

    :param manifest: the head of the release, with the signature of the release key (`hushfleet.release`).
    :param digest: SHA-256 of the whole release file, whose chunks the fleet service serves.
    :param size: its size in bytes.
    :param attempt: a board takes each attempt once, and no lower one after it; a higher number tells the board to try
        again.
    """

    device: Name
    version: Text
    manifest: Annotated[bytes, Meta(min_length=1, max_length=MAX_MANIFEST_BYTES)]
    digest: Digest
    size: Annotated[int, Meta(ge=1, le=MAX_RELEASE_BYTES)]
    attempt: Count = later(0)


@dataclass(frozen=True)
class ReleaseNews(Checked):
    """The keys that sign releases, and the newest release. The fleet service signs the message, others its content.

    :param keys: statements that root has signed, one per line, the newest last (`hushfleet.release.statements`).
    :param newest: the daily statement of the newest release, in the same format, signed by the key that the newest of
        `keys` names for it.
    """

    keys: Annotated[bytes, Meta(min_length=1, max_length=MAX_KEYS_BYTES)]
    newest: Annotated[bytes, Meta(min_length=1, max_length=MAX_NEWEST_BYTES)]
