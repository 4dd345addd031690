"""The duties of a board besides training, as the agent's loop sees them."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.wire.format.topics import ParsedTopic
from hushfleet.wire.link.interface import Link


class Duty:
    """One duty. It must not wait for anything: between its calls the board trains.

    `due_at` is when `advance` has something to do, monotonic seconds; infinity: nothing at present.
    """

    due_at: float
    filters: Sequence[str] = ()
    """Topic filters that it needs."""

    def connected(self) -> None:
        """Called when the link is there (again)."""

    def lost(self) -> None:
        """Called when the link is gone, or could not be made. May raise what ends the agent."""

    def take(self, topic: ParsedTopic, payload: bytes) -> None:
        """Takes a message that is not about rounds, of this duty or another's. Raises a `WireError` for a wrong one."""

    def advance(self, link: Link, now: float, *, busy: bool) -> None:
        """Does what is due, while the link is up. Raises `LinkLost`; it is then called again after `connected`.

        Never between the announced beginning and end of a training: moments must not tell how long it took.

        :param busy: a round has something under way: parts of its model come, or an update goes.
        """
        raise NotImplementedError
