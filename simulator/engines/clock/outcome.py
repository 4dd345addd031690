"""What a round of a computed fleet came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass
class OpenRound:
    """A round that is going on. :param declined: by name, in the order in which they did.

    :param closing: it has been decided that it is over; what comes now is late.
    """

    number: int
    opened_s: float
    cohort: list[str]
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    declined: dict[str, None] = field(default_factory=dict)
    closing: bool = False

    @property
    def size(self) -> int:
        return len(self.cohort)

    def closed(
        self,
        at_s: float,
        *,
        late: Iterable[str],
        given_up: Iterable[str],
        lost: Iterable[str],
        extensions: int,
        used: bool,
        notes: Iterable[Note],
    ) -> RoundOutcome:
        late = tuple(late)
        return RoundOutcome(
            round=self.number,
            opened_s=self.opened_s,
            closed_s=at_s,
            cohort=tuple(self.cohort),
            arrivals=tuple(self.arrivals.values()),
            late=late,
            given_up=tuple(given_up),
            declined=tuple(name for name in self.declined if name not in self.arrivals and name not in late),
            lost=tuple(lost),
            extensions=extensions,
            used=used,
            notes=tuple(notes),
        )
