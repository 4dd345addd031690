"""Defines the topic tree: `hushfleet/1/<federation>/...`, at most six slashes (hosted brokers allow seven).

A device writes only below `c/<its id>/up/` and reads `server`, `task`, `round`, `blob/+`, `release/+`,
`c/<its id>/down` and `c/<its id>/fleet`, so a broker's access list needs few patterns (docs/wire.md). A board without a
certificate can use only `enrol/<its id>/`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from hushfleet.errors import BadInput, Malformed

ROOT = "hushfleet/1"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
NAME_RULE = "1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit"
Name = Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z", description=NAME_RULE)]
DIGEST_BYTES = 32

TopicKind = Literal[
    "server", "task", "round", "blob", "state", "msg", "chunk", "down",
    "enrol-up", "enrol-down", "renew", "health", "wants", "fleet", "release",
]  # fmt: skip
UP: dict[str, TopicKind] = {
    "state": "state",
    "msg": "msg",
    "chunk": "chunk",
    "enrol": "renew",
    "health": "health",
    "wants": "wants",
}


class ParsedTopic(NamedTuple):
    """The parts of a topic: its kind, and the device id or the blob's SHA-256 if it has one."""

    kind: TopicKind
    device: str | None = None
    digest: bytes | None = None


def is_name(text: str) -> bool:
    """Returns whether `text` can be a device id or a federation's name.

    >>> is_name("greenhouse-07"), is_name("Greenhouse")
    (True, False)
    """
    return NAME.fullmatch(text) is not None


def check_name(text: str, role: str) -> str:
    """Returns `text` itself. Raises `BadInput` that names the `role` ("device id") if it is not a name.

    >>> check_name("greenhouse-07", "device id")
    'greenhouse-07'
    """
    if not is_name(text):
        raise BadInput(f"{role} {text!r} cannot be used in a topic: it needs {NAME_RULE}")
    return text


def check_new_name(text: str, role: str) -> str:
    """Checks like `check_name`, but a new name has no ".", because RabbitMQ 3.10 delivers it as "/" (measured)."""
    if "." in check_name(text, role):
        instead = text.replace(".", "-")
        raise BadInput(f"{role} {text!r} has a '.', by which some brokers separate topics: take {instead!r}")
    return text


class Topics:
    """All topics of one federation.

    :param federation: its name; raises `BadInput` if it does not match `NAME_RULE`.
    """

    def __init__(self, federation: str) -> None:
        self.federation = check_name(federation, "the federation's name")
        self.prefix = f"{ROOT}/{federation}"
        self.server = f"{self.prefix}/server"
        self.task = f"{self.prefix}/task"
        self.round = f"{self.prefix}/round"
        self.all_states = f"{self.prefix}/c/+/up/state"
        self.all_msgs = f"{self.prefix}/c/+/up/msg"
        self.all_chunks = f"{self.prefix}/c/+/up/chunk"
        self.all_requests = f"{self.prefix}/enrol/+/up"
        self.all_renewals = f"{self.prefix}/c/+/up/enrol"
        self.all_health = f"{self.prefix}/c/+/up/health"
        self.all_wants = f"{self.prefix}/c/+/up/wants"

    def blob(self, digest: bytes) -> str:
        """Returns the topic of the chunks of the blob with this SHA-256 (32 bytes)."""
        if len(digest) != DIGEST_BYTES:
            raise BadInput(f"a blob's digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        return f"{self.prefix}/blob/{digest.hex()}"

    def state(self, device: str) -> str:
        """Returns the topic of a device's presence, retained.

        >>> Topics("greenhouse").state("greenhouse-07")
        'hushfleet/1/greenhouse/c/greenhouse-07/up/state'
        """
        return f"{self._client(device)}/up/state"

    def msg(self, device: str) -> str:
        """Returns the topic of a device's messages."""
        return f"{self._client(device)}/up/msg"

    def chunk(self, device: str) -> str:
        """Returns the topic of the chunks that a device sends."""
        return f"{self._client(device)}/up/chunk"

    def down(self, device: str) -> str:
        """Returns the topic of the messages to a device."""
        return f"{self._client(device)}/down"

    # between a board and the fleet service

    def request(self, device: str) -> str:
        """Returns the topic on which a board without a certificate asks for one."""
        return f"{self.prefix}/enrol/{check_name(device, 'the device id')}/up"

    def answer(self, device: str) -> str:
        """Returns the topic of the answer to such a request."""
        return f"{self.prefix}/enrol/{check_name(device, 'the device id')}/down"

    def renewal(self, device: str) -> str:
        """Returns the topic on which a board asks for a new certificate."""
        return f"{self._client(device)}/up/enrol"

    def health(self, device: str) -> str:
        """Returns the topic of a board's health.

        >>> Topics("greenhouse").health("greenhouse-07")
        'hushfleet/1/greenhouse/c/greenhouse-07/up/health'
        """
        return f"{self._client(device)}/up/health"

    def wants(self, device: str) -> str:
        """Returns the topic on which a board asks the fleet service for chunks of a release."""
        return f"{self._client(device)}/up/wants"

    def fleet(self, device: str) -> str:
        """Returns the topic of the messages from the fleet service to one board."""
        return f"{self._client(device)}/fleet"

    def release(self, digest: bytes) -> str:
        """Returns the topic of the chunks of the release with this SHA-256 (32 bytes)."""
        return f"{self.prefix}/release/{digest.hex()}"

    def parse(self, topic: str) -> ParsedTopic:
        """Parses a topic, the inverse of the methods above. Raises `Malformed` for a topic of another federation.

        >>> Topics("greenhouse").parse("hushfleet/1/greenhouse/c/a/up/msg").device
        'a'
        """
        root, _, rest = topic.partition(f"{self.prefix}/")
        parts = rest.split("/")
        if root == "" and rest:
            match parts:
                case ["server" | "task" | "round" as kind]:
                    return ParsedTopic(kind)
                case ["blob" | "release" as kind, text] if re.fullmatch(r"[0-9a-f]{64}", text):
                    return ParsedTopic(kind, digest=bytes.fromhex(text))
                case ["c", device, "up", name] if name in UP and is_name(device):
                    return ParsedTopic(UP[name], device=device)
                case ["c", device, "down" | "fleet" as kind] if is_name(device):
                    return ParsedTopic(kind, device=device)
                case ["enrol", device, "up" | "down" as way] if is_name(device):
                    return ParsedTopic("enrol-up" if way == "up" else "enrol-down", device=device)
        shown = topic if len(topic) <= 120 else f"{topic[:117]}..."
        raise Malformed(f"{shown!r} is not a topic of the federation {self.federation!r}")

    def _client(self, device: str) -> str:
        return f"{self.prefix}/c/{check_name(device, 'the device id')}"
