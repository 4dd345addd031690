"""One board, as everybody beside the broker knows it: `Board` is what the fleet decides, hears and counts of it.

Who writes which part decides who is trusted. `FleetRegistry` writes the key, the standing and what was heard; no
aggregator can write there. `ActivityStore` has what an aggregator writes: charges, and which boards it has blocked. A
run without a fleet has both in `DeviceRegister`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from hushfleet.public_keys import can_have_owner
from hushfleet.wire.format.health import Health, Problem

Standing = Literal["new", "pending", "enrolled", "blocked", "expected", "pinned", "known"]
"""In a fleet `new`: no card has come yet; `pending`: it waits for `approve`; `enrolled`. In a run without a fleet
`expected`: the broker's access list binds its id to a certificate, and no key was seen yet; `pinned`: by the first key
that was seen; `known`: by a key that its operator gave. In both `blocked`."""
Activity = Literal[
    "absent", "ready", "fetching", "training", "sending", "accepted", "late", "declined", "refused", "sleeping", "lost"
]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
THERE: frozenset[Activity] = frozenset(ACTIVITIES) - {"absent", "sleeping", "lost"}


@dataclass(frozen=True)
class Rejection:
    """A board's newest decline, or the aggregator's newest refusal of its update.

    :param reason: the sender's own text, which is never markup.
    """

    round: int
    code: str
    reason: str


@dataclass(frozen=True)
class Board:
    """One board. Times are unix seconds; None means not known, and is never shown as zero.

    :param board: its profile, as `hushfleet boards` lists them.
    :param wifi: name of the Wi-Fi profile on its card.
    :param public_key: of its identity; None while no key is accepted.
    :param reason: why it is blocked, or waits.
    :param state: its part in the run, or how it was seen last.
    :param session: of its newest message.
    :param seen: when its last message came.
    :param health: its newest `Health` message, and `health_at` when that came.
    :param rounds: how many of its updates were accepted in this run.
    :param epsilon: epsilon_server of this task, as the board's latest update says.
    :param spent: epsilon_server over all tasks and cards of this id, as the aggregator has noted it (`Spending`);
        `limit`: the limit on its card. Both at the card's delta.
    :param undecided: whether `spent` counts the open round, whose outcome the board has not reported yet.
    :param sent_bytes: size of its accepted updates.
    """

    device: str
    board: str = ""
    place: str = ""
    wifi: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    public_key: bytes | None = None
    standing: Standing = "new"
    reason: str | None = None
    certificate_end: float | None = None
    enrolled: float | None = None
    state: Activity = "absent"
    session: int = 0
    version: str = ""
    seen: float | None = None
    health: Health | None = None
    health_at: float | None = None
    rounds: int = 0
    epsilon: float | None = None
    spent: float | None = None
    limit: float | None = None
    undecided: bool = False
    sent_bytes: int = 0
    decline: Rejection | None = None
    refusal: Rejection | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def is_blocked(self) -> bool:
        return self.standing == "blocked"

    @property
    def is_there(self) -> bool:
        return self.state in THERE

    @property
    def is_approved(self) -> bool:
        """True if its operator has approved it, and it has not asked again yet."""
        return self.standing == "pending" and self.reason is None

    @property
    def is_above_limit(self) -> bool:
        """True if it has spent more than its card allows, as only its owner can permit; open rounds do not count."""
        return self.spent is not None and self.limit is not None and self.spent > self.limit and not self.undecided

    @property
    def is_urgent(self) -> bool:
        return any(problem.urgent for problem in self.problems)

    def blocked(self, reason: str) -> Board:
        return replace(self, standing="blocked", reason=reason)


def with_blocked(boards: Iterable[Board], blocked: Mapping[str, str]) -> list[Board]:
    """Returns the boards, with those blocked that the aggregator has blocked.

    :param blocked: its reasons, by id.
    """
    return [board.blocked(blocked[board.device]) if board.device in blocked else board for board in boards]


def membership_list_keys(boards: Sequence[Board]) -> dict[str, bytes]:
    """Returns the keys of the accepted boards, by id, for a roster.

    An earlier version may have added a board with a key that nobody can own: it can never take part.
    """
    accepted = {board.device: board.public_key for board in boards if board.standing in ("enrolled", "pinned", "known")}
    return {device: key for device, key in accepted.items() if key is not None and can_have_owner(key)}
