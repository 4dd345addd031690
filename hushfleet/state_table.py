"""Tables of states: each row says what happens to an event in a state. Board and aggregator each have one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Transition(NamedTuple):
    """One row: in `state`, `event` leads to `action`, and then to the state `then`.

    :param action: the name of the method that does it; empty: nothing is done.
    """

    state: str
    event: str
    action: str
    then: str


class StateTable:
    """The rows of one side of the protocol. Raises `ValueError` for two rows of one state and event."""

    def __init__(self, rows: Iterable[Transition]) -> None:
        self.rows = tuple(rows)
        self._by_event = {(row.state, row.event): row for row in self.rows}
        if len(self._by_event) < len(self.rows):
            raise ValueError("a state has two rows for one event")

    def find(self, state: str, event: str) -> Transition | None:
        """Returns the row of an event; None if this state ignores it."""
        return self._by_event.get((state, event))

    def row(self, state: str, event: str) -> Transition:
        """Returns the row of an event. Raises `KeyError` if the event cannot happen in this state."""
        return self._by_event[state, event]

    def diagram(self) -> str:
        """Returns the table as a Mermaid state diagram: an arrow for each two states, with its events.

        >>> print(StateTable([Transition("closed", "enough devices", "open", "open")]).diagram())
        stateDiagram-v2
            closed --> open: enough devices
        """
        events: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            events.setdefault((row.state, row.then), []).append(row.event)
        arrows = (f"    {state} --> {then}: {', '.join(names)}" for (state, then), names in events.items())
        return "\n".join(("stateDiagram-v2", *arrows))
