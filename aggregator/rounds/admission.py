"""Whether what a device offers may be taken at present: one set of rules for offers and for what came."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from hushfleet.aggregator.ingest.checks import Verdict
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.wire.format.messages import Phase

Sort = Literal["update", "answer", "any"]


class Opened(NamedTuple):
    """The open round.

    :param expects: whether a device of the cohort, or a member of the committee, has not answered yet.
    """

    round: int
    phase: Phase
    cohort: Collection[str]
    expects: Callable[[str], bool]


def admission(
    store: AggregatorStore, opened: Opened | None, device: str, *, round: int, digest: bytes, of: Sort
) -> Verdict | None:
    """None, or what to answer instead.

    :param digest: SHA-256 of the bytes, or of an update's header and values alone.
    :param of: what they are; `any` where it is not known yet.
    """
    answered = store.answer_digest(round, device)
    if answered == digest:
        return Verdict("duplicate", acknowledged=True, of="answer")
    known = store.update(round, device)
    if known is not None and digest in (known.digest, known.payload_digest):
        return Verdict("duplicate", acknowledged=True, held=known.digest)
    if opened is not None and (opened.round, opened.phase) == (round, "unmask") and of != "update":
        return _of_answer(opened, device, has_answered=answered is not None)
    if known is not None:
        reason = f"another update of {device} was accepted in round {round}"
        return Verdict("duplicate", reason, held=known.digest)
    if opened is None or round != opened.round:
        at = "no round is open" if opened is None else f"round {opened.round} is open"
        return Verdict("late", f"the update is of round {round}, and {at}")
    if opened.phase != "open":
        return Verdict("late", f"the devices of the sum of round {round} are settled")
    if device not in opened.cohort:
        return Verdict("not-in-cohort", f"{device} does not take part in round {round}")
    return None


def _of_answer(opened: Opened, device: str, *, has_answered: bool) -> Verdict | None:
    if has_answered:
        return Verdict("duplicate", f"another answer of {device} was accepted", of="answer")
    if not opened.expects(device):
        return Verdict("late", "the devices of the sum are settled, and no answer is expected", of="answer")
    return None
