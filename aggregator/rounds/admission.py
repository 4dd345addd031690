"""Decides whether an update may be accepted at present, with the same rules for an offer and for the update itself."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.wire.format.messages import RoundPlan

NEXT_SUM = "next-sum"
"""The code of an update for the next sum. It is never sent: the device gets no answer, and offers the update again."""
MOST_IN_A_SUM = 2
"""Most updates of one device in a sum that takes those of several models: a stale one, and the one of the open round.
Without this limit a malicious device could fill the sum alone, with updates of many models."""


def is_new(
    update: CheckedUpdate,
    store: AggregatorStore,
    plan: RoundPlan | None,
    *,
    cohort: Collection[str],
    expects: Callable[[str], bool],
    has_answers: bool = True,
) -> bool:
    """Returns whether the update may be accepted; False if it is already in the store, and is acknowledged again.

    :param update: has its round, its digest (of all bytes, or only of header and values) and its kind.
    :param plan: the open round; None if there is none.
    :param has_answers: whether the task has committees, whose members answer.
    :param expects: returns whether a device of the cohort, or a member of the committee, has not answered yet.

    Raises `Refusal`, and sets `update.held` to the update that the store has instead.
    """
    device, round, digest = update.device, update.round, update.digest
    answered = store.answer_digest(round, device) if has_answers else None
    known = store.update(round, device)
    if answered == digest:
        update.kind = "answer"
        update.acknowledge("duplicate")
        return False
    if known is not None and digest in (known.digest, known.payload_digest):
        update.held = known.digest
        update.acknowledge("duplicate")
        return False
    if plan is not None and (plan.round, plan.phase) == (round, "unmask") and update.kind != "update":
        if answered is not None:
            raise Refusal("duplicate", f"another answer of {device} was accepted", final=False)
        if not expects(device):
            raise Refusal("late", "the devices of the sum are settled, and no answer is expected", final=False)
        return True
    if known is not None:
        update.held = known.digest
        raise Refusal("duplicate", f"another update of {device} was accepted in round {round}", final=False)
    if plan is None or not plan.takes(plan.task, round):
        at = "no round is open" if plan is None else f"round {plan.round} is open"
        raise Refusal("late", f"the update is of round {round}, and {at}", final=False)
    if plan.max_staleness:
        _check_versions(device, round, store, plan)
    if plan.phase != "open":
        raise Refusal("late", f"the devices of the sum of round {round} are settled", final=False)
    if device not in cohort:
        raise Refusal("not-in-cohort", f"{device} does not take part in round {round}", final=False)
    return True


def _check_versions(device: str, round: int, store: AggregatorStore, plan: RoundPlan) -> None:
    """Applies the rules of a sum that takes updates of several models. Raises `Refusal`."""
    if (newest := store.newest_update(device, after=round)) > round:
        raise Refusal("late", f"the update is of round {round}, and one of round {newest} was accepted", final=False)
    if round != plan.round and round not in store.controls():  # the task file had a lower round.max_staleness before
        raise Refusal("late", f"the update is of round {round}, whose controls are not kept", final=False)
    if store.count_summed(plan.round, device) >= MOST_IN_A_SUM:
        raise Refusal(NEXT_SUM, f"the sum of round {plan.round} has {MOST_IN_A_SUM} updates of {device}", final=False)
