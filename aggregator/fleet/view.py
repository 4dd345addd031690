"""The state of a fleet at one moment. Terminal, page and metrics are made from this value.

Times are unix seconds. None means not known; a value that was not measured is never shown as zero.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hushfleet.aggregator.fleet.trust.registry import RefusedRequest
from hushfleet.aggregator.results.answers import EvaluationRow
from hushfleet.aggregator.results.fleet_state import Opening, Shortfall
from hushfleet.aggregator.results.result import Lifetime, LostRounds
from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.aggregator.storage.board import Board
from hushfleet.durations import duration_s
from hushfleet.plain_json import to_json
from hushfleet.wire.format.health import Problem

Process = Literal["running", "stopped", "unknown"]


@dataclass(frozen=True)
class RoundPoint:
    """A closed round."""

    round: int
    participants: int
    uplink_bytes: int
    accuracy: float | None


@dataclass(frozen=True)
class RunView:
    """The present run, or the last one.

    :param open_round: None between two rounds.
    :param asked: number of devices in the open round, 0 if that is not known; `answered` and `accepted` count them.
    :param next_opening: when the next round opens, or an open round that rests goes on; None if it waits for no time.
    :param waiting: what the next round waits for, if too few boards can take part.
    :param lost: the rounds that made no model; None: each did.
    :param accuracy: accuracy of the global model on a public test set; None if the task names none.
    :param evaluation: the newest one; None if the task has none, or had none yet.
    :param epsilon: the largest epsilon_server that a board was charged for in this task; `epsilon_release`: epsilon
        against readers of the models alone.
    :param raw_values: names of the values that leave boards without noise.
    :param declines: counts by code.
    :param refusals: counts by code.
    """

    task: str
    method: str
    unit: str
    rounds: int
    rounds_closed: int
    open_round: int | None = None
    opened: float | None = None
    asked: int = 0
    answered: int = 0
    accepted: int = 0
    finished: bool = False
    next_opening: Opening | None = None
    waiting: Shortfall | None = None
    lost: LostRounds | None = None
    accuracy: float | None = None
    evaluation: EvaluationRow | None = None
    epsilon: float | None = None
    epsilon_release: float | None = None
    delta: float | None = None
    raw_values: tuple[str, ...] = ()
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    declines: tuple[tuple[str, int], ...] = ()
    refusals: tuple[tuple[str, int], ...] = ()
    course: tuple[RoundPoint, ...] = ()


@dataclass(frozen=True)
class RolloutView:
    """A roll-out of a release.

    :param stage: which boards are offered it, in words.
    :param reached: of `wanted` boards, how many run it for good; `returned`: how many went back to the former one.
    """

    version: str
    state: str
    stage: str
    wanted: int
    reached: int
    returned: int
    reason: str = ""


@dataclass(frozen=True)
class SumsView:
    """The secure aggregation of a fleet: what the server sees, and the list of boards that the operator has signed.

    :param server_sees: in words.
    :param roster: its number and date, in words; empty before the first.
    :param boards: number in the roster. `honest`: how many of them at least are honest, by the operator's limit;
        `min_devices`: no smaller sum is opened.
    """

    server_sees: str
    roster: str = ""
    boards: int = 0
    honest: int = 0
    min_devices: int = 0


@dataclass(frozen=True)
class PrivacyLeft:
    """The remaining privacy budget of the board that has spent most, among the boards that may take part.

    :param spent: epsilon_server over all tasks and cards of its id; `limit`: what its card allows, None: not known.
    :param rounds: how many of the task's next rounds fit into that; after the task, how many more like its first,
        `MOST_ROUNDS` at most. None: not known.
    :param period: the present period against its limit, in words; empty if cards have no such limit.
    :param since: when its first charge was noted, unix seconds; 0: not known.
    """

    device: str
    spent: float
    limit: float | None = None
    rounds: int | None = None
    period: str = ""
    since: int = 0


@dataclass(frozen=True)
class SeasonView:
    """The seasons of a task that repeats (`[season]`).

    :param number: of the present season, from 1.
    :param every: length of a season, as in the task.
    :param ends: when it ends and the next one may begin; None: the first season has not begun.
    :param further: how many seasons after it the lifetime limit pays for; None: no limit ends them.
    :param learns_until: when the last of these ends; None: none is the last, or the first season has not begun.
    :param zone: the time zone of the calendar.
    :param obstacle: why the season of the present time does not go on; empty if nothing is wrong.
    """

    number: int
    every: str
    ends: float | None = None
    further: int | None = None
    learns_until: float | None = None
    zone: str = "UTC"
    obstacle: str = ""

    def lasts_s(self, now: float) -> float | None:
        """Returns how long the fleet goes on learning; None: without an end."""
        if self.learns_until is not None:
            return max(0.0, self.learns_until - now)
        begun = self.ends is not None
        return None if begun or self.further is None else (1 + self.further) * duration_s(self.every)


@dataclass(frozen=True)
class FleetView:
    """The fleet at the moment `at`.

    :param aggregator: whether it runs, as the broker says.
    :param service: whether it runs, as the registry says.
    :param certificates_end: when the first of its own certificates ends; None if they cannot be read.
    :param authority_end: when its authority ends; None if it cannot be read.
    :param asking: the requests for a certificate that were not granted.
    :param sums: None if the task has no secure aggregation.
    :param season: None if the task does not repeat.
    :param lifetime: of the board that has spent most over all tasks, even if it has left; `privacy_left`: of the board
        that has spent most among those that may take part. None: nothing was charged.
    :param paused: since when an operator has paused training; None: nobody has.
    :param pay: whether the fleet pays, in one sentence; empty if nothing like its task was measured.
    :param problems: of the fleet as a whole; each board in `boards` has its own.
    """

    federation: str
    at: float
    boards: tuple[Board, ...] = ()
    run: RunView | None = None
    lifetime: Lifetime | None = None
    privacy_left: PrivacyLeft | None = None
    aggregator: Process = "unknown"
    service: Process = "unknown"
    refused_devices: tuple[RefusedBirth, ...] = ()
    asking: tuple[RefusedRequest, ...] = ()
    rollout: RolloutView | None = None
    sums: SumsView | None = None
    season: SeasonView | None = None
    certificates_end: float | None = None
    authority_end: float | None = None
    paused: float | None = None
    pay: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def present(self) -> int:
        return sum(board.is_there for board in self.boards)

    @property
    def pending(self) -> tuple[Board, ...]:
        return tuple(board for board in self.boards if board.standing == "pending" and not board.is_approved)

    @property
    def versions(self) -> dict[str, int]:
        """The number of boards that report each version, the most common version first."""
        return dict(Counter(board.version for board in self.boards if board.version).most_common())

    def to_json(self) -> dict[str, Any]:
        """Returns standard JSON for `--json` (docs/watching.md)."""
        counted = {"present": self.present, "pending": len(self.pending), "versions": self.versions}
        keyed = {
            name: [
                {**asdict(each), "public_key": each.public_key and each.public_key.hex()}
                for each in getattr(self, name)
            ]
            for name in ("boards", "refused_devices", "asking")
        }
        plain: dict[str, Any] = to_json({**asdict(self), **keyed, **counted})
        return plain
