"""The facts that are shown of each board: one list for terminal, page, `/metrics`, Home Assistant and the problems.

To show something new of a board, write one entry of `COLUMNS`; a field of its health, one in `wire/format/health.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hushfleet.aggregator.fleet.watching.advice import DAY_S, DECLINES, HARMLESS, REFUSALS, describe_end
from hushfleet.aggregator.report.readable import ago, epsilon_number, number, size
from hushfleet.aggregator.storage.board import Board
from hushfleet.wire.format.health import SHOWN, Problem, alarms, described, metric_value

CERTIFICATE_DAYS = 14
SILENT_S = 600.0


class Circumstances(NamedTuple):
    """When problems are looked for.

    :param newest_round: newest round of the run; an older decline or refusal is no problem any more.
    :param service_runs: whether the fleet service runs, and so receives the boards' health.
    """

    now: float
    newest_round: int
    service_runs: bool


@dataclass(frozen=True)
class BoardColumn:
    """One fact about a board.

    :param text: for people, at a moment in unix seconds; empty: nothing is known. None: only programs are told.
    :param alone: whether it is shown of a single board only, and not in the tables.
    :param metric: the name after `hushfleet_board_`, with its unit at the end; empty: no metric.
    :param value: of the metric; None: not known. `help`: its meaning.
    :param binary: Home Assistant's device class of a metric that is 0 or 1.
    :param problems: what a person may have to solve; None: there is never a problem.
    """

    name: str
    text: Callable[[Board, float], str] | None = None
    alone: bool = False
    metric: str = ""
    value: Callable[[Board], float | None] = lambda board: None
    help: str = ""
    binary: str = ""
    problems: Callable[[Board, Circumstances], Iterator[Problem]] | None = None


def with_problems(board: Board, moment: Circumstances) -> Board:
    """Adds the board's problems: those of its standing, or else all others."""
    first = tuple(_standing_problems(board))
    if not first and not board.is_approved:
        first = tuple(each for column in COLUMNS if column.problems for each in column.problems(board, moment))
    return replace(board, problems=first)


def state(board: Board, now: float = 0.0) -> str:
    """Describes the board's state in the run, or its standing if it takes no part."""
    if board.standing == "pending":
        return "approved, waits for the board" if board.is_approved else "waits for approval"
    if board.is_blocked:
        return "locked out"
    if board.state == "absent" or (board.standing == "new" and board.seen is None):
        return "not seen yet"
    return board.state


def release(board: Board, now: float = 0.0) -> str:
    """Describes the release: `0.3.0, on trial`."""
    return ", ".join(filter(None, (board.version, *_described(board, "release"))))


def health(board: Board, now: float = 0.0) -> str:
    """Describes the health: `disk 30 %, memory 40 %, 48 °C, trains on the GPU`."""
    return ", ".join(_described(board, "health"))


def spent(board: Board, now: float = 0.0) -> str:
    """Describes privacy spent over all tasks, and its card's limit: `3.2 of 8`; if not known, of this task alone."""
    if board.spent is None:
        return "" if board.epsilon is None else number(board.epsilon)
    if board.is_above_limit:
        return f"{epsilon_number(board.spent, board.limit)}, above its card's {number(board.limit)}"
    told = number(board.spent) if board.limit is None else f"{number(board.spent)} of {number(board.limit)}"
    return f"up to {told}" if board.undecided else told


def day(at: float | None, now: float) -> str:
    """Describes a date, with the time if it has passed."""
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M" if at <= now else "%Y-%m-%d", time.localtime(at))


def _described(board: Board, column: str) -> Iterator[str]:
    return iter(()) if board.health is None else described(board.health, column)


def _standing_problems(board: Board) -> Iterator[Problem]:
    if board.is_blocked:
        yield Problem("locked out", f"To take it back: hushfleet fleet unblock DIR {board.device}")
    elif board.standing == "pending" and not board.is_approved:
        advice = f"Compare the keys of hushfleet fleet status DIR {board.device} with what status prints on the board"
        yield Problem(board.reason or "waits for approval", advice, urgent=True)


def _presence_problems(board: Board, moment: Circumstances) -> Iterator[Problem]:
    now = moment.now
    if board.state == "lost" and board.seen is not None:
        yield Problem("was cut off", "Power or network of the board.", urgent=now - board.seen > SILENT_S)
    silent_s = DAY_S if board.state == "training" else SILENT_S  # a board that trains does not report its health
    if board.is_there and moment.service_runs and board.health_at is not None and now - board.health_at > silent_s:
        yield Problem("is connected, but says nothing of itself", DECLINES["error"])


def _certificate_problems(board: Board, moment: Circumstances) -> Iterator[Problem]:
    end, now = board.certificate_end, moment.now
    if end is not None and end - now < CERTIFICATE_DAYS * DAY_S:
        advice = "It renews by itself while the fleet service runs; is its clock right?"
        yield Problem(f"its certificate {describe_end(end, now)}", advice, end <= now)


def _budget_problems(board: Board, moment: Circumstances) -> Iterator[Problem]:
    if board.is_above_limit:
        told = epsilon_number(board.spent, board.limit)
        what = f"has spent epsilon_server {told}, above the limit of {number(board.limit)} on its card"
        advice = (
            "Its owner has raised limits.epsilon_server, or fleet.toml was changed since; or a round counts here that "
            "it declined after it was asked twice, until its next update: status on the board has the exact number."
        )
        yield Problem(what, advice)


def _health_problems(board: Board, moment: Circumstances) -> Iterator[Problem]:
    return iter(()) if board.health is None else alarms(board.health)


def _answer_problems(board: Board, moment: Circumstances) -> Iterator[Problem]:
    decline, refusal = board.decline, board.refusal
    if decline is not None and decline.round >= moment.newest_round:
        advice = DECLINES.get(decline.code, DECLINES["error"])
        yield Problem(f"declined: {decline.code}", advice, urgent=decline.code not in ("budget", "paused"))
    if refusal is not None and refusal.round >= moment.newest_round and refusal.code not in HARMLESS:
        yield Problem(f"refused: {refusal.code}", REFUSALS.get(refusal.code, DECLINES["error"]), urgent=True)


def _of_health(name: str) -> BoardColumn:
    shown = SHOWN[name]

    def value(board: Board) -> float | None:
        return None if board.health is None else metric_value(board.health, name)

    return BoardColumn(name, metric=shown.metric, value=value, help=shown.help, binary="problem" if shown.flag else "")


COLUMNS = (
    BoardColumn("board", lambda board, now: board.board, alone=True),
    BoardColumn("place", lambda board, now: board.place),
    BoardColumn("wifi", lambda board, now: board.wifi, alone=True),
    BoardColumn("labels", lambda board, now: "; ".join(f"{k}={v}" for k, v in board.labels.items()), alone=True),
    BoardColumn(
        "state", state, metric="up", value=lambda board: board.is_there, help="1 where the board is connected",
        binary="connectivity", problems=_presence_problems,
    ),
    BoardColumn("reason", lambda board, now: board.reason or "", alone=True),
    BoardColumn(
        "urgent", metric="urgent", value=lambda board: board.is_urgent, help="1 where the board needs somebody",
        binary="problem",
    ),
    BoardColumn(
        "seen", lambda board, now: ago(board.seen, now) if board.seen else "", metric="seen_timestamp_seconds",
        value=lambda board: board.seen, help="when something came from the board last",
    ),
    BoardColumn("release", release),
    BoardColumn("health", health, problems=_health_problems),
    *(_of_health(name) for name, shown in SHOWN.items() if shown.metric),
    BoardColumn(
        "certificate", lambda board, now: f"ends {day(board.certificate_end, now)}" if board.certificate_end else "",
        alone=True, metric="certificate_expiry_timestamp_seconds", value=lambda board: board.certificate_end,
        help="when its certificate ends", problems=_certificate_problems,
    ),
    BoardColumn(
        "rounds", lambda board, now: str(board.rounds), metric="rounds_total", value=lambda board: board.rounds,
        help="rounds in which its update was accepted",
    ),
    BoardColumn(
        "epsilon", metric="epsilon_server", value=lambda board: board.epsilon,
        help="of this task, as the board said with its latest update",
    ),
    BoardColumn(
        "spent", spent, metric="spent_epsilon", value=lambda board: board.spent,
        help="epsilon_server over all tasks, as charged", problems=_budget_problems,
    ),
    BoardColumn("limit", metric="limit_epsilon", value=lambda board: board.limit, help="what its card allows"),
    BoardColumn("answer", problems=_answer_problems),
    BoardColumn(
        "sent", lambda board, now: size(board.sent_bytes) if board.sent_bytes else "", metric="sent_bytes_total",
        value=lambda board: board.sent_bytes, help="of its accepted updates",
    ),
    BoardColumn("key", lambda board, now: board.public_key.hex() if board.public_key else "", alone=True),
    BoardColumn("enrolled", lambda board, now: day(board.enrolled, now), alone=True),
)  # fmt: skip
TABLE = tuple(column for column in COLUMNS if column.text is not None and not column.alone)
