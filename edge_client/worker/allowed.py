"""A plan on this device before anything is trained: its charge, whether the owner allows it, and its secure
aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hushfleet.durations import Period
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.board.consent import allowed_charge, check_trust
from hushfleet.edge_client.optional import agreement as key_agreement
from hushfleet.edge_client.optional import question, secure_round, unmasking_share
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.errors import BadInput, Malformed, PrivacyError
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.task_method import TaskMethod
from hushfleet.privacy.charge import Charge
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.storage.arrays import RoundStore
    from hushfleet.secure.membership_list import MembershipList


@dataclass(kw_only=True, eq=False)
class Party:
    """One task on one device: everything about it that decides about its rounds.

    :param store: keeps the state, the ledger and the update; what is committed there is what is sent.
    :param method: the method of `spec`.
    :param limits: what the device's owner allows, and how many times the standard noise the owner wants.
    :param make_secure_round: creates a round with secure aggregation; a simulation of the sums only may omit the masks.
    :param now: returns counted unix seconds; 0 in simulations whose devices have no clock.
    """

    device: str
    store: RoundStore
    spec: TaskSpec
    method: TaskMethod
    limits: LimitsSection
    make_secure_round: Callable[..., secure_round.SecureRound] = lambda *given, size: secure_round.SecureRound(
        *given, size=size
    )
    now: Callable[[], int] = lambda: 0

    @property
    def package(self) -> bytes:
        """SHA-256 of the task package."""
        return self.spec.digest

    @cached_property
    def agreement(self) -> key_agreement.KeyAgreement:
        """The device's keys with its peers in secure aggregation."""
        return key_agreement.KeyAgreement(self.store.identity, task=self.package)


class AllowedRound:
    """The round of one plan on one device, as far as nothing is trained.

    :param membership_list: the membership list that the plan names, if the round has secure aggregation.
    """

    def __init__(self, party: Party, plan: RoundPlan, membership_list: MembershipList | None = None) -> None:
        self.party, self.plan, self.membership_list = party, plan, membership_list
        self.store, self.asks = party.store, party.spec.asks(plan.round)
        self.spec, self.method = party.spec, party.method
        if self.asks:
            self.spec, self.method = question.rules_of(party.spec, party.method, plan.round)
        preference = party.limits.noise_preference
        # A question has its own noise, which no plan changes.
        self.terms = RoundTerms() if self.asks else RoundTerms(plan.noise_split, plan.controls, preference)

    @cached_property
    def at(self) -> int:
        """The counted time at which the round begins, and is checked against the owner's limits."""
        return self.party.now()

    @property
    def window(self) -> Period | None:
        """The window of data that the round trains on; None for all data, also if the round asks a question."""
        return Period.of(self.at, self.spec.data_window_s) if self.spec.data_window_s and not self.asks else None

    @cached_property
    def charge(self) -> Charge:
        """The charge of the round to this device, known before any training.

        Nothing is trained without it, so a round is refused only here. Raises `BudgetExceeded` or `Declined` if the
        device's owner does not allow the round, and `Malformed` if the plan contradicts the task.
        """
        plan, spec = self.plan, self.spec
        if plan.task != spec.task or plan.rounds != spec.rounds:
            raise Malformed(f"the plan of round {plan.round} is for {plan.task!r}, not {spec.task!r}")
        # With the unit `record`, gradients depend on what the device has kept, which must contain noise; if it comes
        # from another package, it may contain none.
        package = self.store.package_of(plan.task)
        if package not in (None, self.party.package):
            raise Declined("error", f"this device has trained for {plan.task} by another package")
        if package is None and self.method.by_record and self.store.load_state(plan.task) is not None:
            raise Declined("error", f"an earlier client has trained for {plan.task}, and did not note by which package")
        if (plan.secure is None) != (spec.privacy.secure is None):
            raise Malformed(
                f"the plan of round {plan.round} has {'no ' if plan.secure is None else ''}secure aggregation, unlike "
                "the task"
            )
        limits, ledger = self.party.limits, self.store.ledger
        return allowed_charge(plan, spec, self.method, self.terms, limits=limits, ledger=ledger, now=self.at)

    @property
    def is_hidden(self) -> bool:
        """Whether noise hides what the round sends."""
        return self.charge.noise_multiplier > 0 and not self.charge.raw

    @cached_property
    def secure(self) -> secure_round.SecureRound:
        """Cohort and committee of a round with secure aggregation.

        Raises `Declined` if the task assumes more trust than the owner allows, and `BadInput` if task, plan or
        membership list define no secure aggregation or too few honest devices.
        """
        spec, plan = self.spec.privacy.secure, self.plan
        if spec is None or self.membership_list is None:
            raise BadInput(
                f"round {plan.round} of {plan.task} has no secure aggregation: task and plan must both have one"
            )
        check_trust(spec, self.party.limits)
        return self.party.make_secure_round(spec, plan, self.membership_list, size=self.method.newcomer_shares)

    @cached_property
    def mask_keys(self) -> tuple[bytes, ...]:
        """The keys of this round that the device shares with the committee; none without secure aggregation."""
        return () if self.plan.secure is None else self.secure.keys(self.party.agreement, self.party.device)

    def answer(self) -> AnswerEntry | None:
        """Returns this device's answer as a committee member, one per round; None if it is no member.

        For the same set of devices it returns the same bytes again. Raises `PrivacyError` for another set, and
        `Malformed` for a set that does not fit the cohort or is too small.
        """
        plan, device, store = self.plan, self.party.device, self.store
        if device not in self.secure.members or plan.secure is None:
            return None
        included = plan.secure.included
        header = unmasking_share.AnswerHeader.of(plan.task, plan.round, device, included, self.secure.spec.bits)
        stored = store.answers.of(plan.task, plan.round)
        if stored is None:
            values = self.secure.answer(self.party.agreement, device, included)
            data = unmasking_share.encode_answer(header, values, identity=store.identity)
            return store.answers.commit(plan.task, plan.round, included=header.included, data=data)
        if stored.included != header.included:
            raise PrivacyError(
                f"the aggregator asks for a second sum of round {plan.round} of {plan.task}, over another set of "
                "devices. Two such sums would tell what single devices sent, so nothing more is answered"
            )
        return stored
