"""The admission list of a fleet, which the fleet's authority signs and the aggregator reads.

The aggregator decides by it who may take part, and cannot write it: it has neither the authority's key nor the right to
write beside the file. A list that the authority has not signed, of another federation, or older than one that was seen
before, is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hushfleet.aggregator.storage.board import Board, membership_list_keys
from hushfleet.errors import BadInput, BadSignature, Malformed
from hushfleet.schema import Checked, Count, pack, unpack
from hushfleet.wire.format.identity import KEY_BYTES
from hushfleet.wire.format.topics import Name

if TYPE_CHECKING:
    from cryptography import x509

_SIGNED = b"hushfleet admissions\0"
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


@dataclass(frozen=True)
class AdmissionList(Checked):
    """Who may take part in a fleet's rounds at one moment.

    :param number: rises with each list; at least the unix seconds of its signature.
    :param keys: the key of each board that may take part, by id.
    :param blocked: why each board that is locked out is, by id.
    """

    federation: Name
    number: Count
    keys: dict[Name, _Key]
    blocked: dict[Name, str]

    @classmethod
    def of(cls, boards: Sequence[Board], *, federation: str, after: int) -> AdmissionList:
        """Returns the list of these boards, with a higher number than the one before."""
        blocked = {board.device: board.reason or "no reason was given" for board in boards if board.is_blocked}
        return cls(federation, max(after + 1, int(time.time())), membership_list_keys(boards), blocked)

    def signed(self, sign: Callable[[bytes], bytes]) -> bytes:
        """Returns the bytes of the file.

        :param sign: signs by the authority's key (`Authority.sign`).
        """
        content = pack(self)
        signature = sign(_SIGNED + content)
        return bytes([len(signature)]) + signature + content


def read_admissions(data: bytes, authority: x509.Certificate, *, federation: str) -> AdmissionList:
    """Reads a signed list.

    Raises `BadSignature` or `Malformed` for one that is not of this authority and federation.
    """
    from cryptography.exceptions import InvalidSignature  # where a key is used
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    end = 1 + (data[0] if data else 0)
    key = authority.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(data[1:end], _SIGNED + data[end:], ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise BadSignature("the fleet's authority has not signed it") from None
    found = unpack(AdmissionList, data[end:], what="the admission list")
    if found.federation != federation:
        raise BadSignature(f"it is of the federation {found.federation}, and this fleet is {federation}")
    if len(set(found.keys.values())) < len(found.keys):
        raise Malformed("two of its boards have one key")
    return found


def load_authority(file: Path) -> x509.Certificate:
    """Loads the certificate of a fleet's authority. Raises `BadInput`."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"the authority {file} cannot be read: {error}") from error
