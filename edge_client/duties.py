"""The duties of a board besides training, as the agent's loop sees them."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.wire.format.topics import ParsedTopic
from hushfleet.wire.link.interface import Link


class Duty:
    """One duty. It must not wait for anything: between its calls the board trains.

    `due_at` is when `advance` has something to do, monotonic seconds; infinity if there is nothing at present.
    """

    due_at: float
    filters: Sequence[str] = ()
    """Topic filters that it needs."""

    def connected(self) -> None:
        """Called when the link is there (again)."""

    def lost(self) -> None:
        """Called when the link is lost, or could not be opened. May raise an error that ends the agent."""

    def take(self, topic: ParsedTopic, payload: bytes) -> None:
        """Handles a message that is not about rounds, for this or another duty. Raises a `WireError` if it is wrong."""

    def advance(self, link: Link, now: float, *, busy: bool) -> None:
        """Does what is due, while the link is up. Raises `LinkLost`; it is then called again after `connected`.

        It is never called between the announced start and end of a training: times must not reveal how long it took.

        :param busy: true while a round transfers data: it receives parts of its model, or sends an update.
        """
        raise NotImplementedError
