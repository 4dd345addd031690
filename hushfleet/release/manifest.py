"""What a release says of itself, and who signed it.

    "HR", version, 0 | u32 manifest length | manifest (JSON) | Ed25519 signature over all before it | payload (tar.xz)

Integers are big-endian. All before the payload is the head: it is complete in itself, so a board can judge an offer
before it fetches the payload.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from hushfleet.errors import BadInput, BadSignature, Malformed, OtherVersion, TooLarge

_MAGIC, _FORMAT = b"HR", 1
_START = struct.Struct(">2sBBI")
START_BYTES = _START.size
SIGNATURE_BYTES = 64
MANIFEST_CAP = 4096
HEAD_CAP = START_BYTES + MANIFEST_CAP + SIGNATURE_BYTES
RELEASE_CAP = 2**28  # bytes of the whole file
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_WORD = re.compile(r"[a-z0-9_]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CAPS = {
    "payload_bytes": RELEASE_CAP - HEAD_CAP,
    "unpacked_bytes": 2**30,
    "entries": 2**15,
    "oldest_store": 2**15,
    "store": 2**15,
}


class Signer(Protocol):
    """An Ed25519 private key: `Identity`, or that of `cryptography`."""

    def sign(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True)
class Manifest:
    """What is in a release. Raises `Malformed` for a value that breaks a rule.

    :param version: two to four numbers, `0.3.0`; also the name of its folder on a board.
    :param python: the only CPython that it runs with, as in wheels: `cp313`.
    :param arch: `aarch64`, or what else `platform.machine()` says.
    :param oldest_store: the oldest schema of a board's store that it can bring up to date.
    :param store: the schema that it leaves behind.
    :param downgrade: whether a board that has a newer release may go to this one.
    :param payload_sha256: hex, of the payload of `payload_bytes`.
    :param unpacked_bytes: of all files together; `entries` is their number, folders included. Both are caps.
    """

    version: str
    python: str
    arch: str
    oldest_store: int
    store: int
    downgrade: bool
    payload_sha256: str
    payload_bytes: int
    unpacked_bytes: int
    entries: int

    def __post_init__(self) -> None:
        _require(_is(str, self.version) and _VERSION.fullmatch(self.version), "version", self.version, "such as 0.3.0")
        for name in ("python", "arch"):
            value = getattr(self, name)
            _require(_is(str, value) and _WORD.fullmatch(value), name, value, "such as cp313 or aarch64")
        digest = self.payload_sha256
        _require(_is(str, digest) and _DIGEST.fullmatch(digest), "payload_sha256", digest, "64 hex digits")
        _require(_is(bool, self.downgrade), "downgrade", self.downgrade, "true or false")
        for name, cap in _CAPS.items():
            value = getattr(self, name)
            _require(_is(int, value) and 0 < value <= cap, name, value, f"a whole number from 1 to {cap}")
        _require(self.oldest_store <= self.store, "oldest_store", self.oldest_store, f"at most store = {self.store}")

    @property
    def order(self) -> tuple[int, ...]:
        """The version as numbers, to compare: 0.3 is 0.3.0.0."""
        return version_order(self.version)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises `Malformed` also where keys are missing or unknown."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Malformed("the manifest of the release is no JSON") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or content.keys() != known:
            named = sorted(known ^ content.keys()) if isinstance(content, dict) else "no object"
            raise Malformed(f"the manifest of the release lacks keys, or has others: {named}")
        return cls(**content)

    def require_platform(self, python: str, arch: str) -> None:
        """Raises `BadInput` where it is made for another Python or another processor."""
        if (self.python, self.arch) != (python, arch):
            raise BadInput(f"release {self.version} is for {self.python} on {self.arch}; here is {python} on {arch}")


@dataclass(frozen=True)
class SignedManifest:
    """The head of a release: its manifest, the bytes that were signed, and the signature."""

    manifest: Manifest
    signed: bytes
    signature: bytes

    @classmethod
    def sign(cls, manifest: Manifest, key: Signer) -> SignedManifest:
        body = manifest.to_bytes()
        signed = _START.pack(_MAGIC, _FORMAT, 0, len(body)) + body
        return cls(manifest, signed, key.sign(signed))

    def to_bytes(self) -> bytes:
        """The head, at most `HEAD_CAP` bytes."""
        return self.signed + self.signature

    @classmethod
    def from_bytes(cls, head: bytes) -> SignedManifest:
        """Reads a head without its payload; the signature is not checked yet. Raises `Malformed`, `TooLarge`."""
        length = START_BYTES + manifest_length(head)
        if len(head) != length + SIGNATURE_BYTES:
            raise Malformed(f"the head of a release has {len(head)} bytes in place of {length + SIGNATURE_BYTES}")
        return cls(Manifest.from_bytes(head[START_BYTES:length]), head[:length], head[length:])

    def verify(self, public_key: bytes) -> Manifest:
        """The manifest. Raises `BadSignature` where `public_key` (32 bytes) did not sign it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(self.signature, self.signed)
        except InvalidSignature:
            raise BadSignature(
                f"release {self.manifest.version} is not signed by the key {public_key.hex()}, which this device trusts"
            ) from None
        return self.manifest

    def verify_any(self, keys: Iterable[str]) -> Manifest:
        """The manifest. Raises `BadSignature` where none of these public keys (64 hex digits each) signed it."""
        for key in keys:
            with contextlib.suppress(BadSignature, ValueError):
                return self.verify(bytes.fromhex(key))
        raise BadSignature(f"release {self.manifest.version} is not signed by any key that this device trusts")


def manifest_length(start: bytes) -> int:
    """From the first `START_BYTES` of a release. Raises `Malformed`, `OtherVersion`, `TooLarge`."""
    if len(start) < START_BYTES or start[:2] != _MAGIC:
        raise Malformed("this is no release: it does not begin as a .hfr file does")
    _, version, zero, length = _START.unpack_from(start)
    if version != _FORMAT:
        raise OtherVersion(f"the release has format {version}; this software reads format {_FORMAT}")
    if zero:
        raise Malformed("the release's fourth byte is not zero")
    if length > MANIFEST_CAP:
        raise TooLarge(f"the release's manifest has {length} bytes; at most {MANIFEST_CAP} are allowed")
    return int(length)


def version_order(version: str) -> tuple[int, ...]:
    """Four numbers to compare versions by: 0.3 is 0.3.0.0."""
    numbers = [int(number) for number in version.split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def this_platform() -> tuple[str, str]:
    """The Python and the processor of this process, as manifests name them: ("cp313", "aarch64")."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}", platform.machine()


def _is(kind: type, value: object) -> bool:
    return type(value) is kind  # JSON's true is an int to isinstance


def _require(holds: object, name: str, value: object, accepted: str) -> None:
    if not holds:
        raise Malformed(f"the release's manifest has {name} = {str(value)[:80]!r}; accepted is {accepted}")
