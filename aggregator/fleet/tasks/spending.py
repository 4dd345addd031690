"""Computes the privacy that each board has spent against its limit, from the charges that the aggregator recorded.

The board's own ledger decides, and its own DEVICE.toml has its limit. The aggregator knows only the charges that it
recorded before each round, which are too low in one case only (`devices.charge_book`), and the limit with which the
card was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hushfleet.aggregator.fleet.view import PrivacyLeft
from hushfleet.aggregator.results.result import Lifetime
from hushfleet.aggregator.storage.activity import ActivityStore, counted_charges
from hushfleet.durations import Period, describe_duration
from hushfleet.privacy.budget import DEFAULT_DELTA, Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.spending import describe_period, rounds_that_fit
from hushfleet.schema import unpack

MOST_ROUNDS = 1000  # at most so many further rounds are counted


class Spending:
    """The epsilons of boards; each is computed again only when the board's charges have changed.

    :param limits: of the cards: `[device.limits]` in fleet.toml.
    :param clock: unix seconds.
    """

    def __init__(self, limits: dict[str, Any], *, clock: Callable[[], float] = time.time) -> None:
        self.budget = Budget.of(limits)
        self.limit = None if self.budget is None else self.budget.lifetime
        self.delta = float(limits.get("delta", DEFAULT_DELTA))
        self._clock = clock
        self._known: dict[str, tuple[int, float]] = {}  # id -> hash of its charges (they are many MB), epsilon
        self._is_known = False
        self._most: dict[tuple[str, str, int, int, int, int], tuple[Lifetime, PrivacyLeft]] = {}

    def update(self, register: ActivityStore) -> dict[str, float]:
        """Returns epsilon_server over all tasks by id, at the cards' delta. Raises `StoreError`."""
        if register.was_changed() or not self._is_known:
            self._is_known = False  # also after a `StoreError`, because a change is reported once
            self._known = {device: self._of(device, register) for device in register.charged_devices()}
            self._is_known = True
        return {device: epsilon for device, (_, epsilon) in self._known.items()}

    def _of(self, device: str, register: ActivityStore) -> tuple[int, float]:
        counts = register.charge_counts(device)
        digest, known = hash(tuple(counts)), self._known.get(device)
        if known is not None and known[0] == digest:
            return known
        return digest, epsilon_server_of(counted_charges(counts), delta=self.delta)

    def charges(self, device: str, register: ActivityStore | None) -> list[Charge]:
        """Returns all charges of a board. Raises `StoreError`.

        :param register: None if nothing was charged yet.
        """
        return [] if register is None else counted_charges(register.charge_counts(device))

    def most(
        self,
        task: str,
        register: ActivityStore,
        *,
        among: Iterable[str] | None = None,
        window_s: int = 0,
        following: tuple[float, ...] = (),
    ) -> tuple[Lifetime, PrivacyLeft] | None:
        """Returns what the board that has spent most has spent, and what it has left for rounds of `task`.

        Each training round of the task is taken to cost as much as the first. The result is as of the last `update`;
        None: nothing was charged. Raises `StoreError`.

        :param among: the boards that may take part; None: all that were ever charged.
        :param window_s: length of the windows of data of the task; 0: it has none.
        :param following: the noise of each round that the task has to come, over that of a training round; empty if
            none is to come, or they are not known.
        """
        charged = self._known if among is None else [device for device in among if device in self._known]
        if not charged:
            return None
        device = max(charged, key=lambda device: self._known[device][1])
        digest, spent = self._known[device]
        minute = int(self._clock() // 60)  # a period can end meanwhile, and may be an hour long
        key = device, task, digest, minute, window_s, len(following)
        if key not in self._most:
            first, rounds = register.charges(device, after=(task, -1), at_most=1), None
            if self.budget is not None and first and first[0][0] == task:
                train = unpack(Charge, first[0][2], what="a charge")
                noise = following or (1.0,) * MOST_ROUNDS
                costs = [replace(train, noise_multiplier=train.noise_multiplier * each) for each in noise]
                rounds = min(
                    rounds_that_fit(charges, costs, delta=self.delta, limit=limit)
                    for charges, limit in self._against_limits(device, register)
                )
            lifetime = self._lifetime(device, register, task, window_s)
            left = PrivacyLeft(device, spent, self.limit, rounds, lifetime.period, lifetime.since)
            kept = {each: known for each, known in self._most.items() if each[1:2] + each[3:] == key[1:2] + key[3:]}
            self._most = {**kept, key: (lifetime, left)}
        return self._most[key]

    def _against_limits(self, device: str, register: ActivityStore) -> Iterator[tuple[list[Charge], float]]:
        """Yields the charges that count against each of the owner's limits, and the limit."""
        assert self.budget is not None
        yield counted_charges(register.charge_counts(device)), self.budget.lifetime
        if self.budget.period_s:
            yield self._in_period(device, register), self.budget.in_period

    def _in_period(self, device: str, register: ActivityStore) -> list[Charge]:
        """Returns the charges of the present period, by the aggregator's clock. The board uses its own clock."""
        assert self.budget is not None
        period = Period.of(self._clock(), self.budget.period_s)
        return counted_charges(register.charge_counts(device, since=period.start))

    def _period(self, device: str, register: ActivityStore) -> str:
        """Describes the present period against its limit; empty if cards have no such limit."""
        if self.budget is None or not self.budget.period_s:
            return ""
        spent = epsilon_server_of(self._in_period(device, register), delta=self.delta)
        now = self._clock()
        return describe_period(spent, self.budget, left_s=Period.of(now, self.budget.period_s).stop - now)

    def _window(self, device: str, register: ActivityStore, task: str, window_s: int) -> str:
        """Describes the privacy spent on samples of the present window alone; empty if the task has no windows.

        It is not known here whether another task had windows, so all of that task's charges count.
        """
        if not window_s:
            return ""
        start = Period.of(self._clock(), window_s).start
        spent = epsilon_server_of(
            counted_charges(register.charge_counts(device, since=start, of=task)), delta=self.delta
        )
        length = describe_duration(window_s)
        return f"whoever appears in the samples of the present window of {length} alone: {spent:.3g}"

    def _lifetime(self, device: str, register: ActivityStore, task: str, window_s: int) -> Lifetime:
        """Returns the figures over all recorded tasks and cards of this id."""
        charges = counted_charges(register.charge_counts(device))
        return Lifetime(
            epsilon_server=epsilon_server_of(charges, delta=self.delta),
            exchange_server=epsilon_server_of(charges, delta=self.delta, adjacency="replace-one"),
            delta=self.delta,
            since=register.first_charged_at(device),
            period=self._period(device, register),
            window=self._window(device, register, task, window_s),
        )

    def lifetimes(self, register: ActivityStore, task: str = "", *, window_s: int = 0) -> Mapping[str, Lifetime]:
        """Returns the lifetime of each board that was charged, by id. Raises `StoreError`.

        :param task: as in `most`.
        :param window_s: as in `most`.
        """
        return {device: self._lifetime(device, register, task, window_s) for device in register.charged_devices()}
