"""Defines the two kinds of rounds of a task: rounds that train, and rounds that ask devices a question."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads.checks import AnswerChecks, UpdateChecks
from hushfleet.aggregator.rounds.plain_sum import PlainSum
from hushfleet.aggregator.rounds.server_half import ServerRound
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.at_need import at_need
from hushfleet.errors import StoreError
from hushfleet.methods.question import rules_of
from hushfleet.methods.task_method import TaskMethod
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.update_values import UpdateFormat

if TYPE_CHECKING:
    from hushfleet.aggregator.payloads.prepare import PreparedTask
    from hushfleet.aggregator.rounds import secure_aggregation
    from hushfleet.aggregator.rounds.secure_aggregation import SecureAggregation
else:
    secure_aggregation = at_need("hushfleet.aggregator.rounds.secure_aggregation")


class RoundKind(NamedTuple):
    """A kind of rounds.

    :param checks: the checks of its updates, with the specification and the method of such a round.
    :param question: the question that it asks; None if devices train.
    """

    checks: UpdateChecks
    rules: RoundSection
    question: QuestionSpec | None = None

    @property
    def method(self) -> TaskMethod:
        return self.checks.method

    @property
    def adds_up(self) -> bool:
        """Whether the round needs only the sum of its updates: not each of them, and not under secure aggregation."""
        secure = self.checks.spec.privacy.secure
        return self.rules.aggregation == "mean" and secure is None and self.question is None

    def sum(
        self,
        plan: RoundPlan,
        half: ServerRound,
        *,
        store: AggregatorStore,
        device: str,
        membership_list: bytes | None,
        **of_sums: Any,
    ) -> PlainSum | SecureAggregation:
        """Creates the sum of a round. Raises `BadInput` if this is impossible.

        :param half: the method's server half; answers are averaged.
        :param device: where a plain sum is computed.
        :param of_sums: the other arguments of secure aggregation.
        :param membership_list: the membership list that is stored with the round; None if it has none.
        """
        checks, secure = self.checks, self.checks.spec.privacy.secure
        if self.question is not None:
            half = ServerRound(self.method, np.zeros(checks.layout.size, np.float32), {})
        if secure is None:
            return PlainSum(plan, half, checks=checks, store=store, rules=self.rules, device=device)
        if membership_list is None:
            raise StoreError(f"the membership list of round {plan.round} is not in the store")
        return secure_aggregation.SecureAggregation(
            plan,
            half,
            secure,
            secure_aggregation.stored_membership_list(membership_list),
            checks=checks,
            store=store,
            **of_sums,
        )


class RoundKinds:
    """The kinds of rounds of a run. Answers are always averaged, however updates are aggregated."""

    def __init__(self, prepared: PreparedTask, store: AggregatorStore, update_format: UpdateFormat) -> None:
        spec, rules = prepared.spec, prepared.task.round
        self._spec = spec
        self.training = self._asking = RoundKind(UpdateChecks(spec, prepared.method, store, update_format), rules)
        if spec.question is not None:
            of_answers = rules_of(spec, prepared.method, spec.question.every)
            checks = AnswerChecks(of_answers, self.training.checks, store)
            self._asking = RoundKind(checks, replace(rules, aggregation="mean", trim=None), spec.question)

    def of(self, round: int) -> RoundKind:
        """Returns the kind of a round by its number."""
        return self._asking if self._spec.asks(round) else self.training
