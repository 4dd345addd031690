"""Sums the updates of a round so that only their sum is opened, and no single update (`hushfleet.secure`).

Masked values and corrections are added modulo a prime, in any order of arrival. Once the set of devices is fixed and
stored, the committee answers for that set, and the answers open the sum.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.aggregator.payloads.checks import UpdateChecks, terms_of
from hushfleet.aggregator.rounds.policy import ClosingRule, Decision
from hushfleet.aggregator.rounds.round_sum import AnswerCounts, RoundSum
from hushfleet.aggregator.rounds.server_half import ServerRound
from hushfleet.aggregator.storage.store import AggregatorStore, UpdateRow
from hushfleet.array_api import Array
from hushfleet.errors import BadInput, BadSignature, Malformed, StoreError, WireError
from hushfleet.secure.masking import Masked
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.prime_field import add_into, from_bytes
from hushfleet.secure.secure_round import SecureRound
from hushfleet.secure.unmasking_share import AnswerHeader, UnmaskingShare, answer_bytes, decode_answer
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import SecureSpec
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import decode_masked

_ABSURD = 4.0  # times the largest norm of honest updates with their noise

log = logging.getLogger("hushfleet.aggregator")


class SecureAggregation(RoundSum):
    """The sums of one round, and the committee's answers.

    :param plan: in the phase `open`, or in `unmask` with the set of devices.
    :param responses: the devices that are expected; in the second phase, the members of the committee.
    :param monotonic: the clock of the deadline, in seconds.
    :param masked: False, FOR SIMULATION ONLY: devices send zeros for masks, and no answers are needed.

    Raises `BadInput` if this membership list gives no sum in this round.
    """

    def __init__(
        self,
        plan: RoundPlan,
        server: ServerRound,
        spec: SecureSpec,
        membership_list: MembershipList,
        *,
        checks: UpdateChecks,
        store: AggregatorStore,
        responses: ClosingRule,
        monotonic: Callable[[], float],
        masked: bool = True,
    ) -> None:
        self._responses, self._monotonic = responses, monotonic
        self._plan, self._server, self._checks, self._store = plan, server, checks, store
        self._shared = ~checks.newcomer.mask
        self._counts = checks.counts(self._shared)
        self.round = SecureRound(spec, plan, membership_list, size=sum(self._counts))
        self.masked = masked
        self.cohort: Collection[str] = frozenset(self.round.devices)
        self._keys = {membership_list.devices[index]: membership_list.key(index) for index in self.round.cohort}
        self._cost = server.method.cost(terms_of(plan))
        corrections = (self.round.rule.may_miss, self.round.width)
        self._sums = Masked(np.zeros(self.round.length, np.uint32), np.zeros(corrections, np.uint32))
        self._included: set[str] = set()
        self._answers: dict[str, np.ndarray] = {}
        self._tried = -1  # this number of answers did not open the sum
        self._total: np.ndarray | None = None

    # updates

    @property
    def count(self) -> int:
        return len(self._included)

    def read(self, update: CheckedUpdate) -> None:
        device, data = update.device, update.data
        self._checks.check_terms(update.header, self._plan)
        update.summed = self._checks.update_format.summed(data)
        if update.summed is None:
            update.values = self._values(update.header, data)
        update.before, update.counts = self._checks.held(device), self._counts
        update.after = self._checks.state_after(update.before, np.zeros(self._checks.layout.size, np.float32))
        digest, size = hashlib.sha256(data).digest(), self.round.size
        update.row = UpdateRow(
            device, digest, update.digest, self._checks.update_format.sent_bytes(data), size, 0.0, 0.0, 0.0
        )

    def add(self, update: CheckedUpdate) -> None:
        self._add(update.device, update.values if update.summed is None else ())

    def merge(self, partial: np.ndarray) -> None:
        """Adds the values of updates that `add` has taken without values, and without corrections."""
        add_into(self._sums.values, partial, self.round.prime)

    def resume(self) -> list[str]:
        for update in self._store.updates(self._plan.round):
            stored = self._store.update_data(self._plan.round, update.device)
            if stored is None:
                raise StoreError(f"the update of {update.device} in round {self._plan.round} has lost its bytes")
            header, _ = self._decoded(update.device, stored[0])
            self._add(update.device, self._values(header, stored[0]))
        for member, data in self._store.answers(self._plan.round).items():
            self._answers[member] = self._read_answer(member, data).values
        return sorted(self._included)

    # the committee

    @property
    def asks_members(self) -> bool:
        """True if the set of devices must be fixed before the sum can be opened."""
        return self.masked and self._plan.phase == "open"

    @property
    def answers(self) -> AnswerCounts:  # type: ignore[override]  # counted at each call: answers come one by one
        """The committee's answers; without masks, as if all members had answered."""
        members = self.round.members
        if self.masked:
            sizes = self._store.answer_sizes(self._plan.round)
            return AnswerCounts(len(members), len(sizes), sum(sizes))
        task, number, bits = self._plan.task, self._plan.round, self.round.spec.bits
        headers = [AnswerHeader.of(task, number, member, b"", bits) for member in members]
        return AnswerCounts(len(members), len(headers), sum(answer_bytes(each, self.round.width) for each in headers))

    def fixed(self) -> RoundPlan:
        """Returns the plan that asks the committee to open the updates that were added so far."""
        included = self.round.pack_included(self._included)
        if self._plan.secure is None:
            raise BadInput(f"the plan of round {self._plan.round} has no secure aggregation")
        return replace(self._plan, phase="unmask", secure=replace(self._plan.secure, included=included))

    def ask(self, plan: RoundPlan, *, excluded: Collection[str]) -> None:
        """Takes the stored plan with the set of devices, and starts to wait for the committee's answers."""
        self._plan = plan
        rule = self.round.rule
        self._responses.begin_answers(self.round.members, least=rule.threshold, now=self._monotonic())
        self._responses.answer(*excluded)
        for member in self._answers:
            self._responses.accept(member)
        self._hasten()

    def take_answer(self, update: CheckedUpdate) -> None:
        """Checks, stores and keeps an expected answer. Raises `Refusal` or `StoreFull`."""
        member, data = update.device, update.data
        answer = self._read_answer(member, data)
        self._store.put_answer(answer.header.round, member, data, digest=update.digest)
        self._answers[member] = answer.values
        self._responses.accept(member)
        self._hasten()

    def closing(self, now: float) -> Decision:
        """Decides once no member is expected: the present answers open the sum, or another member may still answer,
        such as a lost member that comes back before the deadline."""
        if not self.masked or not self._answers:
            return "close"
        if len(self._answers) != self._tried:
            if self.open():
                return "close"
            self._tried = len(self._answers)
        elif now < self._responses.deadline:
            return "wait"
        return "extend" if self._responses.wait_longer(now) else "close"

    def _hasten(self) -> None:
        """Shortens the wait once enough members have answered: further answers would only show which members lie."""
        if len(self._answers) >= self.round.rule.threshold:
            self._responses.close_by(self._monotonic() + self._responses.answers_grace_s)

    def _read_answer(self, member: str, data: bytes) -> UnmaskingShare:
        """Checks a member's answer. Raises `Refusal`."""
        secure = self._plan.secure
        if member not in self.round.members or secure is None or not secure.included:
            raise Refusal("not-in-cohort", f"no answer of {member} is expected in round {self._plan.round}")
        try:
            answer = decode_answer(data, public_key=self._keys[member])
        except BadSignature as error:
            raise Refusal("bad-signature", str(error), final=False) from error
        except WireError as error:
            raise Refusal("malformed", str(error), final=False) from error
        header = answer.header
        if (header.task, header.round, header.device) != (self._plan.task, self._plan.round, member):
            raise Refusal("bad-signature", f"an answer of {header.device} for round {header.round} of {header.task}",
                          final=False)  # fmt: skip
        if header.included != hashlib.sha256(secure.included).digest() or header.bits != self.round.spec.bits:
            raise Refusal("malformed", "the answer is for another set of devices, or of another width")
        if answer.values.shape != (self.round.width,):
            raise Refusal("wrong-shape", f"{answer.values.size} values, but {self.round.width} are needed")
        return answer

    # the sum

    def open(self) -> bool:
        if self._total is None:
            try:
                summed = self._unmasked() if self.masked else self._sums.values
            except BadInput as error:
                log.warning("the sum of round %d is not opened: %s", self._plan.round, error)
                return False
            cost = self._cost
            ring = self.round.ring(cost.bound, cost.noise_multiplier, cost.records)
            total = ring.decode(summed)
            if not self._is_plausible(total):
                return False
            self._total = total
            self._count_wraps(ring.suspected_wraps(summed))
        return True

    @property
    def noise_stds(self) -> list[float]:
        return [self._noise_std / self.count] * len(self._counts)

    def totals(self) -> tuple[Array, Array]:
        sums, weights = np.zeros((2, self._checks.layout.size))
        if self._total is not None:
            sums[self._shared] = self._total
            weights[self._shared] = self.count
        return sums, weights

    @property
    def _noise_std(self) -> float:
        """The standard deviation of the noise in each value of the sum."""
        parts = self.count / self.round.spec.honest_devices
        return self._cost.bound * self._cost.noise_multiplier * math.sqrt(parts)

    def _unmasked(self) -> np.ndarray:
        """Returns the sum modulo the prime, uint32 `[k]`. Raises `BadInput` if too few answers fit."""
        summed, wrong = self.round.opened(self._sums, self._answers)
        if wrong:  # or a device has masked with another key than it shares with this member: no proof against either
            log.warning(
                "round %d: the answers of %s do not fit, and the sum is opened without them",
                self._plan.round, ", ".join(wrong),
            )  # fmt: skip
        return summed

    def _count_wraps(self, count: int) -> None:
        self.suspected_wraps = count
        if count:
            log.warning(
                "round %d: %d of %d values of the sum are so large that they may have wrapped around, which costs "
                "accuracy and no privacy; of honest devices hardly ever one is, so suspect a device that does not clip",
                self._plan.round, count, self.round.size,
            )  # fmt: skip

    def _is_plausible(self, total: np.ndarray) -> bool:
        """Returns whether a sum is plausible: a wrong mask, or an undetected wrong answer, gives uniform values."""
        norm = float(np.linalg.norm(total))
        most = self.count * self._cost.largest + self._noise_std * math.sqrt(self.round.size)
        if norm <= _ABSURD * most:
            return True
        log.error(
            "round %d: the sum has the norm %.3g, and %d honest updates with their noise come to %.3g at most: a "
            "device or a member of the committee lied, and the model stays as it is",
            self._plan.round, norm, self.count, most,
        )  # fmt: skip
        return False

    def _add(self, device: str, values: Iterable[np.ndarray]) -> None:
        for total, each in zip(self._sums, values, strict=False):
            add_into(total, each, self.round.prime)
        self._included.add(device)

    def _decoded(self, device: str, data: bytes) -> tuple[UpdateHeader, memoryview]:
        """Reads an update. Raises `Refusal` unless the membership list's key signed it: its masks come from that
        key."""
        try:
            return decode_masked(data, public_key=self._keys[device])
        except BadSignature as error:
            raise Refusal(
                "bad-signature", f"{error}, with the membership list's key of {device}", final=False
            ) from error

    def _values(self, header: UpdateHeader, data: bytes) -> Masked:
        _, section = self._decoded(header.device, data)
        try:
            values = from_bytes(section, self.round.spec.bits)
        except BadInput as error:
            raise Refusal("malformed", str(error)) from error
        size, length, corrections = self.round.size, self.round.length, self._sums.corrections
        if header.value_count != size or len(values) != length + corrections.size:
            raise Refusal(
                "wrong-shape",
                f"{header.value_count} values and {len(values)} with corrections; {size} and "
                f"{length + corrections.size} are needed",
            )
        return Masked(values[:length], values[length:].reshape(corrections.shape))


def membership_list_of(store: AggregatorStore, *, excluded: Collection[str] = ()) -> MembershipList:
    """Returns a membership list of all devices that the store knows. Raises `BadInput` if there are none."""
    keys = {row.device: row.public_key for row in store.devices() if row.device not in excluded}
    if not keys:
        raise BadInput("no device is known, so secure aggregation has no membership list")
    return MembershipList.of(keys)


def stored_membership_list(data: bytes) -> MembershipList:
    """Reads the membership list of the open round. Raises `StoreError` if an earlier version has stored one with other
    rules."""
    try:
        return MembershipList.from_bytes(data)
    except Malformed as error:
        raise StoreError(
            "an earlier version of Hushfleet has opened a round of this run, with a membership list that boards take "
            "no more: let that version close the round, or begin another run"
        ) from error
