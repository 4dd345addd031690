"""What a round of a computed fleet came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Arrival(NamedTuple):
    """An update that was accepted. :param at_s: when; :param update_bytes: its predicted size."""

    device: str
    at_s: float
    update_bytes: int


class Note(NamedTuple):
    """An event as the coordinator writes it; of `update` and `run`, what only a trained run knows is missing.

    `scenario` is what the schedule did, as the live engine's director writes it: `action` and `target`.
    """

    at_s: float
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class RoundOutcome:
    """A closed round; times in virtual seconds since the run's start.

    Every member of the cohort is in one of `arrivals` (accepted in time, in this order), `late` (committed and
    charged, but not accepted), `given_up` (ended by the close before anything was spent), `declined`, or `lost`
    (absent, or gone before it had committed).

    :param used: whether there were enough updates for a new global model.
    :param notes: events up to the close, in order of time; empty where nobody asked for them.
    """

    round: int
    opened_s: float
    closed_s: float
    cohort: tuple[str, ...]
    arrivals: tuple[Arrival, ...]
    late: tuple[str, ...]
    given_up: tuple[str, ...]
    declined: tuple[str, ...]
    lost: tuple[str, ...]
    extensions: int
    used: bool
    notes: tuple[Note, ...]

    @property
    def wall_s(self) -> float:
        return self.closed_s - self.opened_s
