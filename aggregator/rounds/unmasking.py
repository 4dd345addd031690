"""The second phase of a secure sum: its set of devices is settled and stored, and a committee answers for it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hushfleet.aggregator.rounds.policy import ClosingRule, Decision
from hushfleet.aggregator.rounds.secure_sum import SecureSum
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.wire.format.messages import RoundPlan


class Unmasking:
    """Which answers are taken, and when the sum is opened.

    :param responses: who is waited for; of members now.
    :param monotonic: seconds.
    """

    def __init__(self, store: AggregatorStore, responses: ClosingRule, *, monotonic: Callable[[], float]) -> None:
        self._store, self._responses, self._monotonic = store, responses, monotonic

    def begin(self, collected: SecureSum, plan: RoundPlan, *, excluded: Collection[str]) -> None:
        """:param plan: with the set of devices, which is stored."""
        collected.ask(plan)
        least = collected.round.rule.threshold
        self._responses.begin_answers(collected.round.members, least=least, now=self._monotonic())
        self._responses.answer(*excluded)
        for member in collected.answered:
            self._responses.accept(member)
        self._hasten(collected)

    def take(self, collected: SecureSum, member: str, data: bytes, *, digest: bytes) -> None:
        """An answer that is expected. Raises `Refusal` or `StoreFull`."""
        answer = collected.read_answer(member, data)
        self._store.put_answer(answer.header.round, member, data, digest=digest)
        collected.add_answer(member, answer)
        self._responses.accept(member)
        self._hasten(collected)

    def closing(self, collected: SecureSum, now: float) -> Decision:
        """Nobody is waited for: what is there opens the sum, or somebody else may still answer."""
        contradicted = collected.masked and bool(collected.answered) and not collected.open()
        return "extend" if contradicted and self._responses.wait_longer(now) else "close"

    def _hasten(self, collected: SecureSum) -> None:
        """Enough members have answered: the others' answers would only show who lies."""
        if len(collected.answered) >= collected.round.rule.threshold:
            self._responses.close_by(self._monotonic() + self._responses.answers_grace_s)
