"""Advice on the problems of boards and aggregator: a short form of the codes in docs/field.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hushfleet.aggregator.storage.board import Board
from hushfleet.secure.membership_list import SEEN_NEWER
from hushfleet.wire.format.health import Problem

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
OWN_CERTIFICATE_DAYS = 30
AUTHORITY_DAYS = 365
HARMLESS = {"not-in-cohort", "state-unknown", "unknown-device", "late"}


def certificate_problems(own: Mapping[str, float], authority: float | None, *, now: float) -> list[Problem]:
    """Finds certificates of the fleet's own processes that end soon.

    :param own: end of each certificate, unix seconds.
    :param authority: end of the authority's certificate; no other certificate is valid longer.
    """
    found = []
    for stem, end in own.items():
        if end - now < OWN_CERTIFICATE_DAYS * DAY_S:
            advice = "hushfleet fleet renew DIR --broker, then start fleet service and aggregator again."
            found.append(Problem(f"the certificate {stem}.pem {describe_end(end, now)}", advice, urgent=True))
    if authority is not None and authority - now < AUTHORITY_DAYS * DAY_S:
        advice = "No board connects after it: make a new fleet (hushfleet fleet init) and new cards before."
        found.append(Problem(f"the fleet's authority {describe_end(authority, now)}", advice, urgent=True))
    return found


def old_copy_problems(boards: Iterable[Board], *, newest_round: int) -> list[Problem]:
    """Finds boards that refuse the list of boards of this folder, because they have seen a newer one.

    :param newest_round: newest round of the run; an older decline is no problem any more.
    """
    declines = [board.decline for board in boards if board.decline is not None]
    told = sum(
        each.round >= newest_round and each.code == "no-privacy" and SEEN_NEWER in each.reason for each in declines
    )
    if not told:
        return []
    what = (
        f"{told} board{'s know' if told > 1 else ' knows'} a newer membership list: this folder is an old copy of "
        "the fleet's"
    )
    advice = (
        "Stop it, and start the newest folder. If that one is lost, sign a list with a later number: hushfleet fleet "
        "roster sign."
    )
    return [Problem(what, advice, urgent=True)]


def describe_end(end: float, now: float) -> str:
    """Describes when a certificate ends: `ends in 9 days`."""
    return "has ended" if end <= now else f"ends in {(end - now) / DAY_S:.0f} days"
