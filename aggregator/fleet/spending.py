"""The privacy that each board has spent against its limit, by the charges that the aggregator noted.

The board's own ledger is what counts, and its own file says what it may spend. What is known here is what was noted
before each round, which is too small in one case alone (`devices.charge_book`), and what the card was written with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.fleet.view import PrivacyLeft
from hushfleet.aggregator.results.result import Lifetime
from hushfleet.privacy.ledger import epsilon_server_of, rounds_left
from hushfleet.privacy.mechanism import Charge
from hushfleet.schema import unpack

DEFAULT_DELTA = 1e-5  # as in DEVICE.toml
MOST_ROUNDS = 1000  # so many more are counted


class Spending:
    """Epsilons of boards; each is computed again only when its charges have changed.

    :param limits: of the cards: `[device.limits]` in fleet.toml.
    """

    def __init__(self, limits: dict[str, Any]) -> None:
        limit = limits.get("epsilon_server")
        self.limit = float(limit) if isinstance(limit, int | float) else None
        self.delta = float(limits.get("delta", DEFAULT_DELTA))
        self._known: dict[str, tuple[int, float]] = {}  # id -> hash of its charges, which would be many MB; epsilon
        self._is_known = False
        self._most: tuple[tuple[str, str, int], tuple[Lifetime, PrivacyLeft]] | None = None

    def update(self, register: DeviceRegister) -> dict[str, float]:
        """Gives epsilon_server over all tasks by id, at the cards' delta. Raises `StoreError`."""
        if register.was_changed() or not self._is_known:
            self._is_known = False  # also after a `StoreError`, since a change is told once
            self._known = {device: self._of(device, register) for device in register.charged_devices()}
            self._is_known = True
        return {device: epsilon for device, (_, epsilon) in self._known.items()}

    def _of(self, device: str, register: DeviceRegister) -> tuple[int, float]:
        counts = register.charge_counts(device)
        digest, known = hash(tuple(counts)), self._known.get(device)
        if known is not None and known[0] == digest:
            return known
        return digest, epsilon_server_of(_charges(counts), delta=self.delta)

    def with_charge(self, charge: Charge, device: str, register: DeviceRegister | None) -> float:
        """Gives epsilon_server of a board after one more charge. Raises `StoreError`.

        :param register: None where nothing was charged yet.
        """
        counts = [] if register is None else register.charge_counts(device)
        return epsilon_server_of([*_charges(counts), charge], delta=self.delta)

    def most(self, task: str, register: DeviceRegister) -> tuple[Lifetime, PrivacyLeft] | None:
        """Gives what the board that has spent most has spent, and what is left to it for rounds of `task`.

        Rounds of the task cost as its first. It holds as of the last `update`; None: nothing was charged. Raises
        `StoreError`.
        """
        if not self._known:
            return None
        device = max(self._known, key=lambda device: self._known[device][1])
        digest, spent = self._known[device]
        key = device, task, digest
        if self._most is None or self._most[0] != key:
            first, rounds = register.charges(device, after=(task, -1), at_most=1), None
            if self.limit is not None and first and first[0][0] == task:
                following, before = unpack(Charge, first[0][2], what="a charge"), register.charge_counts(device)
                rounds = rounds_left(
                    _charges(before), following, delta=self.delta, limit=self.limit, at_most=MOST_ROUNDS
                )
            found = self._lifetime(device, register), PrivacyLeft(device, spent, self.limit, rounds)
            self._most = key, found
        return self._most[1]

    def _lifetime(self, device: str, register: DeviceRegister) -> Lifetime:
        """Counts all tasks and cards of this id that are noted."""
        charges = _charges(register.charge_counts(device))
        return Lifetime(
            epsilon_server=epsilon_server_of(charges, delta=self.delta),
            exchange_server=epsilon_server_of(charges, delta=self.delta, adjacency="exchange"),
            delta=self.delta,
        )

    def lifetimes(self, register: DeviceRegister) -> Mapping[str, Lifetime]:
        """Gives the lifetime of each board that was charged, by id. Raises `StoreError`."""
        return {device: self._lifetime(device, register) for device in register.charged_devices()}


def _charges(counts: Sequence[tuple[bytes, int]]) -> list[Charge]:
    return [_times(unpack(Charge, packed, what="a charge"), rounds) for packed, rounds in counts]


def _times(charge: Charge, rounds: int) -> Charge:
    """Joins rounds that cost the same: a fleet may have a thousand boards, each with hundreds of rounds."""
    return replace(charge, steps=charge.steps * rounds)
