"""Decides who takes part in a round, when it opens and when it is over, without models, stores or messages.

The aggregator applies these rules in real time, and the simulator's virtual clock applies the same rules to computed
fleets, so that a policy that is compared there is the same as in the field.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import numpy as np

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.wire.format.messages import MAX_COHORT, MAX_MESSAGE_BYTES

LONGEST_GRACE_S = 60.0
LONGEST_ANSWERS_GRACE_S = 10.0
MOST_EXTENSIONS = 3
"""Most extensions of the deadline for a committee's answers: a few silent members must not delay a fleet."""
_STREAM = 0x434F4852
_PLAN_FIXED_BYTES = 2048  # with the most controls and differences that a plan may have
PLAN_ENTRY_BYTES = 20  # and its name

FOR_GOOD = frozenset({"budget", "graph", "no-privacy"})
"""Declines that a device repeats if it is asked again in the same round. Others may change: a longer deadline is enough
for a slow device, and an owner's hours, memory, disk and samples change."""

Decision = Literal["wait", "extend", "close"]


def choose_cohort(present: Iterable[str], *, size: int, seed: int, round: int) -> list[str]:
    """Returns the cohort, sorted; never larger than a round plan can name.

    :param size: the number of devices; 0 for all that are present.

    The result does not depend on the order in which devices appeared, or on the cohorts of other rounds.
    """
    names = sorted(set(present))
    wanted = min(size or len(names), len(names), MAX_COHORT)
    key = np.random.SeedSequence(seed, spawn_key=(_STREAM, round))
    order = np.random.Generator(np.random.Philox(key)).permutation(len(names))
    chosen, room = [], MAX_MESSAGE_BYTES - _PLAN_FIXED_BYTES
    for index in order[:wanted]:
        room -= len(names[index]) + PLAN_ENTRY_BYTES
        if room < 0:
            break
        chosen.append(names[index])
    return sorted(chosen)


def rises_no_more(accuracies: Sequence[float | None], patience: int) -> bool:
    """Returns whether the last `patience` rounds have not reached a higher accuracy than the rounds before them.

    :param accuracies: accuracy of the global model after each round; None if it was not measured.
    """
    if not patience or len(accuracies) <= patience:
        return False
    known = [-math.inf if each is None else each for each in accuracies]
    return max(known[-patience:]) <= max(known[:-patience])


class ClosingRule:
    """Decides which devices are still expected in the open round, and whether to wait for them.

    :param rules: the rules of the task.
    :param least_ready: the number of devices that a next round needs, see `least_devices`.

    Times are seconds of one monotonic clock. `begin` starts a round; lost devices are remembered between rounds.
    """

    def __init__(self, rules: RoundSection, *, least_ready: int) -> None:
        self.rules = rules
        self._least_ready = least_ready
        self._cohort: Collection[str] = ()
        self._answered: set[str] = set()
        self._new_cards: set[str] = set()
        self._declined: set[str] = set()
        self._final: set[str] = set()  # those from which no further update can come
        self._counted: tuple[int, int] | None = None  # of `_open`, until an answer comes
        self._gone: dict[str, float] = {}
        self._least = self._quorum = 0
        self._most_extensions = math.inf
        self._next_min_updates = self.min_updates = rules.min_updates
        self.accepted = 0
        self.extensions = 0
        self.deadline = 0.0

    def begin(self, cohort: Collection[str], *, now: float) -> None:
        """Starts to wait for updates; `min_updates` of them make a model."""
        self.min_updates = self._next_min_updates
        self._begin(cohort, self.min_updates, self._quorum_of(len(cohort)), math.inf, now)

    def require(self, min_updates: int, *, at_once: bool = False) -> None:
        """Sets `min_updates` from the next round on. In a round that waits for updates, a lower number holds at once: a
        higher one could make what devices have paid for worthless.

        :param at_once: whether a higher number also holds at once, if it can still be reached.
        """
        self._next_min_updates, reached = min_updates, at_once and self._most_updates >= min_updates
        if self._collects and (reached or min_updates < self.min_updates):
            self.min_updates = self._least = min_updates
            self._quorum = self._quorum_of(len(self._cohort))

    def _quorum_of(self, cohort: int) -> int:
        """Returns how many updates close a round at once: never fewer than `min_updates`."""
        return self.rules.buffer_size or max(
            math.ceil(self.rules.quorum * cohort - 1e-9), min(self.min_updates, cohort)
        )

    def begin_answers(self, members: Collection[str], *, least: int, now: float) -> None:
        """Starts to wait for the answers of a committee; `least` of them are enough."""
        self._begin(members, least, len(members), MOST_EXTENSIONS, now)

    def _begin(self, names: Collection[str], least: int, quorum: int, most_extensions: float, now: float) -> None:
        self._cohort, self._answered = names, set()
        self._new_cards, self._declined, self._final = set(), set(), set()
        self._counted = None
        self.accepted = self.extensions = 0
        self.deadline = now + self.rules.deadline_s
        self._least, self._quorum, self._most_extensions = least, quorum, most_extensions

    @property
    def grace_s(self) -> float:
        """Seconds to wait for a lost device: a quarter of the deadline, at most a minute."""
        return min(LONGEST_GRACE_S, self.rules.deadline_s / 4)

    @property
    def answers_grace_s(self) -> float:
        """Seconds to wait for other members once enough have answered."""
        return min(LONGEST_ANSWERS_GRACE_S, self.rules.deadline_s / 20)

    @property
    def announced_deadline_s(self) -> float:
        """The deadline in the plan, in seconds: each extension changes it, so that devices see a new plan."""
        return self.rules.deadline_s * (1 + self.extensions)

    def close_by(self, at: float) -> None:
        """Moves the deadline to `at`, if that is earlier."""
        self.deadline = min(self.deadline, at)

    def wait_longer(self, now: float) -> bool:
        """Extends the deadline; returns False if this would be useless."""
        if not self._waiting or self.extensions >= self._most_extensions:
            return False
        self.extensions += 1
        self.deadline = now + self.rules.deadline_s
        return True

    @property
    def missing(self) -> int:
        """The number of updates, or answers, after which the wait ends at once; at least 1."""
        return max(1, self._quorum - self.accepted)

    def expects(self, device: str) -> bool:
        """Returns whether this cohort member has neither been accepted nor given another final answer."""
        return device in self._cohort and device not in self._answered

    @property
    def _open(self) -> tuple[int, int]:
        """The numbers of cohort members that have not answered, and of those that have not done so for good."""
        if self._counted is None or not self.rules.has_cohort:
            answers = self._answered, self._final
            waiting, unsure = (sum(device not in each for device in self._cohort) for each in answers)
            self._counted = waiting, unsure
        return self._counted

    @property
    def _waiting(self) -> int:
        """The number of devices that are waited for: none in particular, if a round has no cohort."""
        return self._open[0] if self.rules.has_cohort else 0

    def keys_changed(self, *devices: str) -> None:
        """Expects answers again from cohort members that have a new key, whatever their former cards did."""
        new = {device for device in devices if device in self._cohort}
        self._new_cards |= new
        for answers in (self._declined, self._final, self._answered):
            answers -= new
        self._counted = None

    def accept(self, device: str) -> None:
        """Counts an accepted update, or answer."""
        self.accepted += 1
        self.answer(device)

    def decline(self, device: str, code: str) -> None:
        """Notes a device that will send no update, unless it is asked again and its reason has gone."""
        self._declined.add(device)
        self.answer(device, is_final=code in FOR_GOOD)

    def ask_again(self) -> None:
        """Expects answers again from devices that have declined: a round that has rested is announced to them again."""
        self._answered -= self._declined
        self._declined, self._counted = set(), None

    def answer(self, *devices: str, is_final: bool = True) -> None:
        """Notes devices that are not waited for, because they gave an answer other than an update.

        :param is_final: False for those that may send an update after all, such as one that was locked out by mistake.
        """
        self._answered.update(devices)
        self._counted = None
        if is_final:
            self._final.update(devices)

    def lost(self, device: str, *, now: float) -> None:
        """Notes a lost connection. If the device is not `back` within the grace period, it is no longer expected.

        A board that reboots after a power cut sends its committed update, and closing without it would waste the
        privacy budget that it spent.
        """
        self._gone.setdefault(device, now)

    def back(self, device: str) -> None:
        """Notes that a lost device is connected again."""
        self._gone.pop(device, None)

    def decide(self, now: float, *, ready: int) -> Decision:
        """Decides whether the round is over; `extend` means that a deadline with too few updates was moved.

        :param ready: how many devices are present for a next round.

        A round is given up as soon as it can have too few updates only (`is_hopeless`). Else it is given up only at a
        deadline, and only if waiting is useless: the whole cohort has answered, or after an extension all present
        devices have, and enough devices are ready for a next round. A round without updates whose cohort are new cards
        that have all declined is given up at once: they may take part in the next one.
        A round without a cohort has no deadline: any device may still come.
        """
        if self.accepted >= self._quorum or not self.rules.has_cohort:
            return "close" if self.accepted >= self._quorum else "wait"
        enough, silent = self.accepted >= self._least, self._is_silent(now)
        if (enough and silent) or self._is_of_new_cards or self.is_hopeless:
            return "close"
        if now < self.deadline:
            return "wait"
        given_up = silent and self.extensions > 0 and ready >= self._least_ready
        return "close" if enough or given_up or not self.wait_longer(now) else "extend"

    @property
    def is_hopeless(self) -> bool:
        """True if a round that waits for updates can no longer have `min_updates`.

        A lost device may still answer: it may come back with an update that it has committed, and paid for. So may a
        device that has declined for a reason that can change, because it is asked again with an extended deadline and
        in the next window.
        """
        return self._collects and self._most_updates < self._least

    @property
    def _most_updates(self) -> int:
        return self.accepted + self._open[1]

    @property
    def _collects(self) -> bool:
        return math.isinf(self._most_extensions)

    @property
    def _is_of_new_cards(self) -> bool:
        both = self._new_cards & self._declined
        return not self.accepted and bool(both) and all(device in both for device in self._cohort)

    def _is_silent(self, now: float) -> bool:
        """Returns whether no device that may still answer is left: all have answered or are lost for good."""
        longest_ago = now - self.grace_s
        lost = sum(at <= longest_ago and self.expects(device) for device, at in self._gone.items())
        return self._waiting == lost


def least_devices(rules: RoundSection, *, devices: int, drawn: bool = False) -> int:
    """Returns how many devices must be present for a round to open: by default the cohort, or the whole fleet; one, if
    a round has no cohort.

    :param drawn: whether the cohort is drawn from all devices, present or not, as for secure aggregation.
    """
    return rules.least_present or (0 if drawn else rules.cohort_size) or devices


def may_open(
    rules: RoundSection, able: int, *, least: int, closed_rounds: int, waited_s: float, rate: float = 1.0
) -> bool:
    """Returns whether a round may open: enough devices can take part, or, if no number is set, some after a deadline.

    :param able: how many devices can take part: they are present, and, if that is known, able to pay.
    :param least: the result of `least_devices`.
    :param waited_s: seconds since the last round closed.
    :param rate: the probability that a present device is drawn.
    """
    if able * rate < rules.min_updates - 1e-9:  # the others would pay for nothing
        return False
    waited = rules.least_present is None and closed_rounds > 0 and waited_s >= rules.deadline_s
    return able >= least or (waited and able * rate >= 1)
