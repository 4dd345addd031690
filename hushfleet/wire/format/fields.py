"""Defines the types of fields that several messages have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.schema import Checked
from hushfleet.wire.format.identity import KEY_BYTES

MAX_REASON = 400
NONCE_BYTES = 16

PublicKey = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
StateDigest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Text = Annotated[str, Meta(pattern=r"^[ -~]{0,64}\Z", description="at most 64 printable ASCII characters")]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
DeclineCode = Literal[
    "budget", "memory", "no-data", "no-privacy", "graph", "disk", "busy", "paused", "error"
]  # fmt: skip


@dataclass(frozen=True)
class WithReason(Checked):
    """Base of answers with a `reason`, which is shortened to one line."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", _one_line(self.reason))  # type: ignore[attr-defined]
        super().__post_init__()


def _one_line(text: str) -> str:
    """Returns `text` as one line of at most `MAX_REASON` characters.

    An error text must never prevent an answer from being sent, nor forge a line of the receiver's log.
    """
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 3]}..."
