"""Defines signed statements about releases: which keys sign them, and which release is the newest.

Each is one line of JSON, with the signatures beside the statement. Only one form of a statement is accepted: the form
that `to_line` gives. The root key signs `ReleaseKeys` and is kept offline; a key that `ReleaseKeys` names signs
`Newest` once a day. `Trust` holds the keys that a board trusts because of these statements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from hushfleet.errors import BadInput, BadSignature, Malformed, TooLarge
from hushfleet.public_keys import can_have_owner, parse_public_key
from hushfleet.release.manifest import Manifest, SignedManifest, Signer, has_signed, is_version, require

ROOT_FILE = "root_key"
"""The file with root's public key, 64 hex digits, on a memory card and on a board."""
KEYS_FILE = "release_keys"
"""The file with `Signed[ReleaseKeys]`, one per line: the newest, and before it those that named another root."""
MOST_KEYS = 8
LINE_CAP = 8192  # bytes of a statement with its signatures
TEXT_CAP = 32 * 1024  # bytes of several statements
_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_PLATFORM = re.compile(r"[a-z0-9_]{1,32}-[a-z0-9_]{1,32}")
_MOST_NUMBER = 2**53
_require = partial(require, of="a signed statement")


@dataclass(frozen=True)
class ReleaseKeys:
    """Root's statement on the keys that sign releases: Ed25519 public keys, 64 hex digits. Raises `Malformed`.

    A statement has no end date, because boards have no reliable clock: it is valid until a higher number comes.

    :param number: rises by one with each statement; a board accepts no lower one.
    :param root: signs this statement.
    :param keys: sign releases; `threshold` of them must have signed each release.
    :param newest_key: signs `Newest`, but nothing that is installed.
    :param next_root: replaces `root` from the next statement on, and signs this one, too; empty: root stays.
    """

    context: ClassVar[str] = "hushfleet release keys 1"
    number: int
    root: str
    keys: tuple[str, ...]
    threshold: int
    newest_key: str
    next_root: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys) if isinstance(self.keys, list) else self.keys)
        _require(_is_number(self.number) and self.number > 0, "number", self.number, "a whole number above zero")
        _require(
            isinstance(self.keys, tuple) and 0 < len(self.keys) <= MOST_KEYS, "keys", self.keys, f"1 to {MOST_KEYS}"
        )
        named = [self.root, self.newest_key, *self.keys, *([self.next_root] if self.next_root != "" else [])]
        for key in named:
            fits = isinstance(key, str) and _KEY.fullmatch(key) and can_have_owner(bytes.fromhex(key))
            _require(fits, "a key", key, "a public key that somebody can own, 64 hex digits in lower case")
        # an online key, or the key of one of several persons, must not have more than one role
        _require(len(set(named)) == len(named), "keys", min(named, key=named.index), "another key for each part")
        fits = _is_number(self.threshold) and 0 < self.threshold <= len(self.keys)
        _require(fits, "threshold", self.threshold, f"1 to {len(self.keys)}, as many as there are keys")

    @property
    def root_afterwards(self) -> str:
        """The root key that signs the statement after this one."""
        return self.next_root or self.root

    @property
    def signers(self) -> tuple[str, ...]:
        """The keys that must all sign the statement."""
        return (self.root, self.next_root) if self.next_root else (self.root,)


@dataclass(frozen=True)
class Newest:
    """The fleet service's statement on the newest release, made once a day. Raises `Malformed`.

    :param said_at: unix seconds on the service's clock; higher with each statement.
    :param versions: the version that boards should run, by platform (`cp313-aarch64`).
    """

    context: ClassVar[str] = "hushfleet newest release 1"
    said_at: int
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(_is_number(self.said_at) and self.said_at > 0, "said_at", self.said_at, "unix seconds")
        _require(isinstance(self.versions, dict), "versions", self.versions, "an object")
        for platform, version in self.versions.items():
            _require(_PLATFORM.fullmatch(platform), "a platform", platform, "such as cp313-aarch64")
            _require(is_version(version), "a version", version, "such as 0.3.0")


S = TypeVar("S", ReleaseKeys, Newest)


@dataclass(frozen=True)
class Signed(Generic[S]):
    """A statement and its signatures, which are not checked yet: public key -> signature, both in hex."""

    statement: S
    signatures: Mapping[str, str] = field(default_factory=dict)

    def with_signature(self, key: Signer) -> Signed[S]:
        """Adds the signature of this key, and replaces an earlier one of the same key."""
        signature = key.sign(_signed_bytes(self.statement)).hex()
        return replace(self, signatures={**self.signatures, key.public_key.hex(): signature})

    def is_signed_by(self, public_key: str) -> bool:
        """Returns whether this public key, 64 hex digits, has signed it."""
        signatures = {bytes.fromhex(key): bytes.fromhex(signature) for key, signature in self.signatures.items()}
        return has_signed(bytes.fromhex(public_key), signatures, _signed_bytes(self.statement))

    def to_line(self) -> str:
        """Returns the line, without its newline."""
        return _json({"signatures": dict(self.signatures), "statement": asdict(self.statement)})

    @classmethod
    def from_line(cls, kind: type[S], line: str) -> Signed[S]:
        """Parses a line. Raises `Malformed`, `TooLarge`."""
        if len(line) > LINE_CAP:
            raise TooLarge(f"a signed statement has {len(line)} characters; at most {LINE_CAP} are allowed")
        try:
            content = json.loads(line)
            statement, signatures = content["statement"], content["signatures"]
            known = {each.name for each in fields(kind)}
            if statement.keys() != known:
                raise Malformed(f"a signed statement has missing or unknown keys: {sorted(known ^ statement.keys())}")
            for key, signature in signatures.items():
                fits = _KEY.fullmatch(key) and isinstance(signature, str) and _SIGNATURE.fullmatch(signature)
                _require(fits, "a signature", signature, "128 hex digits, by a public key of 64")
            found = Signed(kind(**statement), signatures)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise Malformed(f"{line[:60]!r} is not a signed statement") from error
        if found.to_line() != line:
            raise Malformed("a signed statement is not in the form in which it was signed")
        return found


def read_keys(text: str) -> list[Signed[ReleaseKeys]]:
    """Returns the statements in the lines of `text`. Raises `Malformed`, `TooLarge`."""
    if len(text) > TEXT_CAP:
        raise TooLarge(f"statements about release keys have at most {TEXT_CAP} characters together")
    return [Signed.from_line(ReleaseKeys, line) for line in text.splitlines()]


@dataclass(frozen=True)
class Trust:
    """The keys whose releases a board accepts.

    :param root: public key of root, which signs the next statement.
    :param keys: the valid statement; None: there was none yet, and no release is accepted.
    :param line: the signed form of `keys`.
    """

    root: str
    keys: ReleaseKeys | None = None
    line: str = ""

    @classmethod
    def of_board(cls, folder: Path) -> Trust:
        """Reads a board's trust from the folder of `slots.py`."""
        return cls.read(folder / ROOT_FILE, folder / KEYS_FILE)

    @classmethod
    def read(cls, root_file: Path, keys_file: Path) -> Trust:
        """Reads statements that were checked before they were written to these files. Raises `BadInput` without a
        public key of root.

        An unreadable statement counts as missing: the next one that arrives over the network replaces it.
        """
        try:
            *_, line = keys_file.read_text("utf-8").splitlines()
            keys = Signed.from_line(ReleaseKeys, line).statement
            return cls(keys.root_afterwards, keys, line)
        except (OSError, ValueError, Malformed, TooLarge):
            pass
        try:
            root = root_file.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise BadInput(f"the keys for releases are unknown: {error}") from error
        return cls(parse_public_key(root, f"root's public key in {root_file}").hex())

    @property
    def number(self) -> int:
        return 0 if self.keys is None else self.keys.number

    def in_force(self) -> ReleaseKeys:
        """Returns the valid statement. Raises `BadInput` if there was none yet."""
        if self.keys is None:
            raise BadInput(f"root {self.root[:16]}... has named no release keys yet: no release is taken")
        return self.keys

    def verify(self, head: SignedManifest) -> Manifest:
        """Returns the manifest of a release that may be installed.

        Raises `BadInput`, or `BadSignature` for too few signers.
        """
        keys = self.in_force()
        manifest = head.verify(keys.keys, keys.threshold)
        if manifest.system and not head.is_signed_by(self.root):
            raise BadSignature(
                f"release {manifest.version} renews what runs as root on a board, and root has not signed it"
            )
        return manifest

    def after(self, text: str) -> Trust:
        """Returns the trust after the statements in `text`; numbers up to the present one are skipped.

        Raises `BadSignature` if root has not signed one of them, and `Malformed` or `TooLarge`.
        """
        trust = self
        for signed in read_keys(text):
            keys = signed.statement
            if keys.number <= trust.number:
                continue
            if trust.root not in keys.signers or not all(map(signed.is_signed_by, keys.signers)):
                raise BadSignature(
                    f"statement {keys.number} about release keys is not signed by the root {trust.root[:16]}..., which "
                    "this device trusts"
                )
            trust = Trust(keys.root_afterwards, keys, signed.to_line())
        return trust


def _signed_bytes(statement: ReleaseKeys | Newest) -> bytes:
    """Returns the bytes to sign. They include the context, so a signature is valid for one kind of statement only."""
    return f"{statement.context}\n{_json(asdict(statement))}".encode()


def _json(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NUMBER
