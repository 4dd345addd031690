"""Advice on the problems of boards and aggregator: a short form of the codes in docs/field.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hushfleet.aggregator.devices.board import Board
from hushfleet.aggregator.results.report.readable import epsilon_number, number
from hushfleet.secure.roster import SEEN_NEWER
from hushfleet.wire.format.health import Problem, alarms

DECLINES = {
    "budget": "Nothing: the board's privacy budget is spent, with limits.per until the next period, or it has just "
    "started and waits for an hour at most. More noise in the task, or its owner raises the limit.",
    "memory": "A smaller network, or limits.memory_mib on the board.",
    "no-data": "Look at data.path on the board and at the names of its folders.",
    "no-privacy": "The task asks for what the board's owner does not allow: more noise, or the board's [limits].",
    "graph": "A smaller method.batch_size or network; else suspect the aggregator.",
    "disk": "Free space on the board's card.",
    "busy": "A longer round.deadline_s, or fewer local_epochs.",
    "paused": "Nothing: its owner lets it leave rounds out while it has too few new samples.",
    "error": "The board's log has the cause: journalctl -u hushfleet-client.",
}
"""The advice for each code of a decline."""
REFUSALS = {
    "late": "A longer round.deadline_s, or a lower quorum; in buffered rounds a higher round.max_staleness.",
    "not-in-cohort": "Nothing.",
    "unknown-device": "It passes by itself, unless the board is locked out.",
    "bad-signature": "Two boards have one id, or its card was written anew: hushfleet fleet renew DIR ID --new-card.",
    "malformed": "Compare the versions of board and aggregator; else suspect an attack.",
    "wrong-shape": "Compare the versions of board and aggregator; else suspect an attack.",
    "non-finite": "Compare the versions of board and aggregator; else suspect an attack.",
    "out-of-bounds": "A client that was modified.",
    "below-noise": "A client that was modified: it does not add its noise.",
    "state-unknown": "Nothing.",
    "duplicate": "Two boards with a copy of one state directory, or an old copy put back.",
    "store-full": "Free space beside the aggregator.",
}
"""The advice for each code of a refusal."""
DAY_S = 86400.0
CERTIFICATE_DAYS = 14
OWN_CERTIFICATE_DAYS = 30
AUTHORITY_DAYS = 365
SILENT_S = 600.0
_HARMLESS = {"not-in-cohort", "state-unknown", "unknown-device", "late"}


def with_problems(board: Board, *, now: float, newest_round: int, service_runs: bool) -> Board:
    """Adds the board's problems.

    :param newest_round: newest round of the run; an older decline or refusal is no problem any more.
    :param service_runs: whether the fleet service runs, and so receives the boards' health.
    """
    return replace(board, problems=tuple(_problems(board, now, newest_round, service_runs)))


def certificate_problems(own: Mapping[str, float], authority: float | None, *, now: float) -> list[Problem]:
    """Finds certificates of the fleet's own processes that end soon.

    :param own: end of each certificate, unix seconds.
    :param authority: end of the authority's certificate; no other certificate is valid longer.
    """
    found = []
    for stem, end in own.items():
        if end - now < OWN_CERTIFICATE_DAYS * DAY_S:
            advice = "hushfleet fleet renew DIR --broker, then start fleet service and aggregator again."
            found.append(Problem(f"the certificate {stem}.pem {_ends(end, now)}", advice, urgent=True))
    if authority is not None and authority - now < AUTHORITY_DAYS * DAY_S:
        advice = "No board connects after it: make a new fleet (hushfleet fleet init) and new cards before."
        found.append(Problem(f"the fleet's authority {_ends(authority, now)}", advice, urgent=True))
    return found


def old_copy_problems(boards: Iterable[Board], *, newest_round: int) -> list[Problem]:
    """Finds boards that refuse the list of boards of this folder, because they have seen a newer one.

    :param newest_round: as in `with_problems`.
    """
    declines = [board.decline for board in boards if board.decline is not None]
    told = sum(
        each.round >= newest_round and each.code == "no-privacy" and SEEN_NEWER in each.reason for each in declines
    )
    if not told:
        return []
    what = f"{told} board{'s know' if told > 1 else ' knows'} a newer roster: this folder is an old copy of the fleet's"
    advice = (
        "Stop it, and start the newest folder. If that one is lost, sign a list with a later number: hushfleet fleet "
        "roster sign."
    )
    return [Problem(what, advice, urgent=True)]


def _ends(end: float, now: float) -> str:
    return "has ended" if end <= now else f"ends in {(end - now) / DAY_S:.0f} days"


def _problems(board: Board, now: float, newest_round: int, service_runs: bool) -> list[Problem]:
    found = []
    if board.standing == "blocked":
        return [Problem("locked out", f"To take it back: hushfleet fleet unblock DIR {board.device}")]
    if board.is_approved:
        return []
    if board.standing == "pending":
        why = board.reason or "waits for approval"
        advice = f"Compare the keys of hushfleet fleet status DIR {board.device} with what status prints on the board"
        return [Problem(why, advice, urgent=True)]
    if board.state == "lost" and board.seen is not None:
        found.append(Problem("was cut off", "Power or network of the board.", urgent=now - board.seen > SILENT_S))
    told = board.health_at
    silent_s = DAY_S if board.state == "training" else SILENT_S  # a board that trains does not report its health
    if board.is_there and service_runs and told is not None and now - told > silent_s:
        found.append(Problem("is connected, but says nothing of itself", DECLINES["error"]))
    end = board.certificate_end
    if end is not None and end - now < CERTIFICATE_DAYS * DAY_S:
        advice = "It renews by itself while the fleet service runs; is its clock right?"
        found.append(Problem(f"its certificate {_ends(end, now)}", advice, end <= now))
    if board.is_above_limit:
        spent = epsilon_number(board.spent, board.limit)
        what = f"has spent epsilon_server {spent}, above the limit of {number(board.limit)} on its card"
        advice = (
            "Its owner has raised limits.epsilon_server, or fleet.toml was changed since; or a round counts here that "
            "it declined after it was asked twice, until its next update: status on the board has the exact number."
        )
        found.append(Problem(what, advice))
    if board.health is not None:
        found += alarms(board.health)
    if board.decline is not None and board.decline.round >= newest_round:
        code = board.decline.code
        found.append(
            Problem(f"declined: {code}", DECLINES.get(code, DECLINES["error"]), urgent=code not in ("budget", "paused"))
        )
    refusal = board.refusal
    if refusal is not None and refusal.round >= newest_round and refusal.code not in _HARMLESS:
        found.append(Problem(f"refused: {refusal.code}", REFUSALS.get(refusal.code, DECLINES["error"]), urgent=True))
    return found
