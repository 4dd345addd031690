"""Defines the manifest of a release, and its signatures.

    "HR", format, 0 | u32 manifest length | manifest (JSON) | u8 count | count signatures | payload (tar.xz)

Integers are big-endian. A signature has 96 bytes: an Ed25519 public key, and its signature over all bytes before the
count. So another key can sign later, on another machine. Signatures are in the order of their keys, each key once. All
bytes before the payload are the head: it is complete, so a board can check an offer before it fetches the payload.
"""

from __future__ import annotations

import json
import platform
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Protocol, TypeGuard

from hushfleet.errors import BadInput, BadSignature, Malformed, OtherVersion, TooLarge
from hushfleet.public_keys import KEY_BYTES, SIGNATURE_BYTES, verify

_MAGIC, _FORMAT = b"HR", 2
_START = struct.Struct(">2sBBI")
_KEY_AND_SIGNATURE = KEY_BYTES + SIGNATURE_BYTES
MOST_SIGNATURES = 8
MANIFEST_CAP = 7 * 1024  # a manifest with nine wheels has 1.5 KiB; an offer has room for a head of 8 KiB
HEAD_CAP = _START.size + MANIFEST_CAP + 1 + MOST_SIGNATURES * _KEY_AND_SIGNATURE
RELEASE_CAP = 2**28  # bytes of the whole file
VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_WORD = re.compile(r"[a-z0-9_]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WHEEL = re.compile(r"[A-Za-z0-9_.+-]{1,128}\.whl")
_OF_32_BITS = {"aarch64": "armv8l", "x86_64": "i686"}  # a kernel's machine name -> the name for 32-bit programs on it
_MOST_NAMED = 32  # versions in `downgrade_from`
_CAPS = {
    "payload_bytes": RELEASE_CAP - HEAD_CAP,
    "unpacked_bytes": 2**30,
    "entries": 2**15,
    "oldest_store": 2**15,
    "store": 2**15,
}


class Signer(Protocol):
    """An Ed25519 private key: `Identity`. :ivar public_key: 32 bytes."""

    public_key: bytes

    def sign(self, data: bytes, /) -> bytes:
        """Signs with Ed25519; returns 64 bytes."""


@dataclass(frozen=True)
class Manifest:
    """The content of a release. Raises `Malformed` for a value that breaks a rule.

    :param version: two to four numbers, `0.3.0`; also the name of its folder on a board.
    :param python: the only CPython that it runs with, in the form of wheel names: `cp313`.
    :param arch: `aarch64`, or another value of `platform.machine()`.
    :param oldest_store: the oldest schema of a board's store that it can upgrade.
    :param store: the schema after the upgrade.
    :param downgrade_from: versions from which a board may go to this one, even if it has had a newer one; mostly empty.
        They are withdrawn: a board on which this release was good takes none up to the highest of them.
    :param downgrade_serial: rises with each such permission, so that older permissions end: unix seconds of the
        signing. 0 if `downgrade_from` is empty.
    :param wheels: file name -> SHA-256 (hex) of each wheel in the payload. Boards do not use it, because
        `payload_sha256` covers the files: it is for people who want to know later what a release contains.
    :param system: whether its folder `system` updates, as root, files outside of releases; root must sign it, too.
    :param payload_sha256: hex, SHA-256 of the payload, which has `payload_bytes` bytes.
    :param unpacked_bytes: the bytes of all files together; `entries`: the number of files and folders. Both are caps.
    """

    version: str
    python: str
    arch: str
    oldest_store: int
    store: int
    downgrade_from: tuple[str, ...]
    downgrade_serial: int
    wheels: Mapping[str, str]
    payload_sha256: str
    payload_bytes: int
    unpacked_bytes: int
    entries: int
    system: bool = False

    def __post_init__(self) -> None:
        require(is_version(self.version), "version", self.version, "such as 0.3.0")
        for name in ("python", "arch"):
            value = getattr(self, name)
            require(_is(str, value) and _WORD.fullmatch(value), name, value, "such as cp313 or aarch64")
        digest = self.payload_sha256
        require(_is(str, digest) and _DIGEST.fullmatch(digest), "payload_sha256", digest, "64 hex digits")
        named, serial = self.downgrade_from, self.downgrade_serial
        are_versions = _is(tuple, named) and len(named) <= _MOST_NAMED and all(map(is_version, named))
        require(are_versions, "downgrade_from", named, f"a list of at most {_MOST_NAMED} versions")
        require(_is(int, serial) and 0 <= serial < 2**53, "downgrade_serial", serial, "a whole number from 0 on")
        require((serial > 0) == bool(named), "downgrade_serial", serial, "0 without downgrade_from, 1 or more with it")
        are_wheels = _is(dict, self.wheels) and all(map(_is_wheel, self.wheels.items()))
        require(are_wheels, "wheels", self.wheels, "the SHA-256 (hex) of each by its name")
        require(_is(bool, self.system), "system", self.system, "true or false")
        for name, cap in _CAPS.items():
            value = getattr(self, name)
            require(_is(int, value) and 0 < value <= cap, name, value, f"a whole number from 1 to {cap}")
        require(self.oldest_store <= self.store, "oldest_store", self.oldest_store, f"at most store = {self.store}")

    @property
    def order(self) -> tuple[int, ...]:
        """The version as numbers, for comparisons: 0.3 is 0.3.0.0."""
        return version_order(self.version)

    def is_downgrade_from(self, version: str) -> bool:
        """Returns whether it is signed as a downgrade from this version."""
        return version_order(version) in map(version_order, self.downgrade_from)

    def to_bytes(self) -> bytes:
        """Encodes the manifest as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Decodes a manifest. Raises `Malformed`, also for missing or unknown keys."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Malformed("the manifest of the release is not JSON") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or content.keys() != known:
            named = sorted(known ^ content.keys()) if isinstance(content, dict) else "no object"
            raise Malformed(f"the manifest of the release has missing or unknown keys: {named}")
        named = content["downgrade_from"]
        return cls(**{**content, "downgrade_from": tuple(named) if isinstance(named, list) else named})

    def require_platform(self, python: str, arch: str) -> None:
        """Raises `BadInput` if the release is for another Python or another processor."""
        if (self.python, self.arch) != (python, arch):
            bits = " (a 32-bit system: write its 64-bit image)" if arch in _OF_32_BITS.values() else ""
            here = f"here is {python} on {arch}{bits}"
            raise BadInput(f"release {self.version} is for {self.python} on {self.arch}; {here}")


@dataclass(frozen=True)
class SignedManifest:
    """The head of a release: its manifest, the bytes that were signed, and the signatures.

    :param signatures: public key (32 bytes) -> signature (64 bytes); at most `MOST_SIGNATURES`, not checked yet.
    """

    manifest: Manifest
    signed: bytes
    signatures: Mapping[bytes, bytes]

    @classmethod
    def sign(cls, manifest: Manifest, *keys: Signer) -> SignedManifest:
        """Signs a manifest with these keys. Like `also_signed`, raises `TooLarge`."""
        body = manifest.to_bytes()
        signed = _START.pack(_MAGIC, _FORMAT, 0, len(body)) + body
        return cls(manifest, signed, {}).also_signed(*keys)

    def also_signed(self, *keys: Signer) -> SignedManifest:
        """Returns the same head with the signatures of these keys added.

        Raises `TooLarge` for more than `MOST_SIGNATURES`.
        """
        signatures = {**self.signatures, **{key.public_key: key.sign(self.signed) for key in keys}}
        if len(signatures) > MOST_SIGNATURES:
            raise TooLarge(f"a release has at most {MOST_SIGNATURES} signatures, not {len(signatures)}")
        return SignedManifest(self.manifest, self.signed, signatures)

    def to_bytes(self) -> bytes:
        """Encodes the head, at most `HEAD_CAP` bytes."""
        signatures = b"".join(key + signature for key, signature in sorted(self.signatures.items()))
        return self.signed + bytes([len(self.signatures)]) + signatures

    @classmethod
    def from_bytes(cls, head: bytes) -> SignedManifest:
        """Reads a head without its payload; no signature is checked yet. Raises `Malformed`, `TooLarge`."""
        found, length = cls.read(head)
        if length != len(head):
            raise Malformed(f"the head of a release has {len(head)} bytes, unlike the lengths in it")
        return found

    @classmethod
    def read(cls, data: bytes) -> tuple[SignedManifest, int]:
        """Reads the head at the beginning of `data`; also returns its length in bytes.

        Raises `Malformed`, `OtherVersion`, `TooLarge`.
        """
        if len(data) < _START.size or data[:2] != _MAGIC:
            raise Malformed("the file is not a release: it does not begin like a .hfr file")
        _, version, zero, length = _START.unpack_from(data)
        if version != _FORMAT:
            raise OtherVersion(
                f"the release has format {version}; this software reads format {_FORMAT}. Build the release again with "
                "the version of Hushfleet that wrote the board's card, or write a new card"
            )
        if zero:
            raise Malformed("the release's fourth byte is not zero")
        if length > MANIFEST_CAP:
            raise TooLarge(f"the release's manifest has {length} bytes; at most {MANIFEST_CAP} are allowed")
        at = _START.size + length
        if not data[at : at + 1] or data[at] > MOST_SIGNATURES:
            raise Malformed(f"the release must have 0 to {MOST_SIGNATURES} signatures")
        ends = range(at + 1 + _KEY_AND_SIGNATURE, at + 2 + data[at] * _KEY_AND_SIGNATURE, _KEY_AND_SIGNATURE)
        each = [data[end - _KEY_AND_SIGNATURE : end] for end in ends]
        signatures = {one[:KEY_BYTES]: one[KEY_BYTES:] for one in each}
        if any(len(one) != _KEY_AND_SIGNATURE for one in each):
            raise Malformed(f"the head of a release has {len(data)} bytes, unlike the lengths in it")
        if list(signatures) != sorted(signatures) or len(signatures) != len(each):
            raise Malformed("the signatures of the release are not in the order of their keys, each key once")
        head = cls(Manifest.from_bytes(data[_START.size : at]), data[:at], signatures)
        return head, at + 1 + len(each) * _KEY_AND_SIGNATURE

    def verify(self, keys: Iterable[str], threshold: int = 1) -> Manifest:
        """Returns the manifest. Raises `BadSignature` if fewer than `threshold` of `keys` have signed it.

        :param keys: public keys that are trusted, 64 hex digits each; other texts are ignored.
        """
        trusted = {bytes.fromhex(key) for key in keys if _DIGEST.fullmatch(key.lower())}
        valid = [key for key in trusted if has_signed(key, self.signatures, self.signed)]
        if len(valid) < max(1, threshold):
            by = "any key" if threshold <= 1 else f"{threshold} of the keys"
            found = f": {len(valid)} have signed it" if valid else ""
            raise BadSignature(f"release {self.manifest.version} is not signed by {by} that this device trusts{found}")
        return self.manifest

    def is_signed_by(self, key: str) -> bool:
        """Returns whether this public key, 64 hex digits, has signed it."""
        return has_signed(bytes.fromhex(key), self.signatures, self.signed)


def has_signed(key: bytes, signatures: Mapping[bytes, bytes], signed: bytes) -> bool:
    """Returns whether this Ed25519 key's signature is there and valid."""
    try:
        verify(key, signed, signatures[key])
    except (BadSignature, KeyError):
        return False
    return True


def version_order(version: str) -> tuple[int, ...]:
    """Returns four numbers for the comparison of versions: 0.3 is 0.3.0.0; none for an empty text, below all others.

    >>> version_order("0.3")
    (0, 3, 0, 0)
    """
    if not version:
        return ()
    numbers = [int(number) for number in version.split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def highest(versions: Iterable[str]) -> str:
    """Returns the highest of these versions; empty if there is none.

    >>> highest(["0.3.0", "0.10.0", "0.9.1"])
    '0.10.0'
    """
    return max(versions, key=version_order, default="")


def this_platform() -> tuple[str, str]:
    """Returns the Python and the processor of this process in the manifests' form: ("cp313", "aarch64").

    A 32-bit system on a 64-bit kernel gets the name that wheels use, because `platform.machine()` gives the kernel's.
    """
    machine = platform.machine()
    arch = machine if sys.maxsize > 2**32 else _OF_32_BITS.get(machine, machine)
    return f"cp{sys.version_info[0]}{sys.version_info[1]}", arch


def is_version(value: object) -> TypeGuard[str]:
    """Returns whether this is a text such as `0.3.0`."""
    return isinstance(value, str) and VERSION.fullmatch(value) is not None


def _is_wheel(item: tuple[object, object]) -> bool:
    name, digest = item
    if not isinstance(name, str) or not isinstance(digest, str):
        return False
    return _WHEEL.fullmatch(name) is not None and _DIGEST.fullmatch(digest) is not None


def _is(kind: type, value: object) -> bool:
    return type(value) is kind  # isinstance accepts JSON's true as an int


def require(holds: object, name: str, value: object, accepted: str, *, of: str = "the release's manifest") -> None:
    """Raises `Malformed` with the value unless the rule holds."""
    if not holds:
        raise Malformed(f"{of} has {name} = {str(value)[:80]!r}; accepted is {accepted}")
