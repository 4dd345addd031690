"""Records the charges of each board of a fleet beside the register, in case its card is lost.

The board's own ledger is authoritative, but it is lost with the card. Therefore the aggregator notes a charge for every
board that may train in a round, before it tells the board; the charge that an accepted update declares replaces it. If
a board declines before training, its note is removed at once, but only if it was told once: a board that is told again,
of an extended round, after a pause or after a restart, may have trained after all. In buffered rounds a board that is
training is told of each version that opens meanwhile, and trains on none of them. Each of a board's updates says how
many rounds of the task it has charged, and additional notes before it are then dropped (a board that lies about this
harms only its own next card).

After any crash the notes are never too small, except in one case: a board that chooses less noise than the standard
(`limits.noise_preference` below 1), and whose update was not accepted, is noted with the standard noise, because only
its lost ledger knows its choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hushfleet.aggregator.payloads.checks import terms_of
from hushfleet.aggregator.rounds.budgets import Budgets
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.store import ChargeRow
from hushfleet.privacy.charge import Charge
from hushfleet.schema import pack, unpack

BEFORE_TRAINING = frozenset({"budget", "memory", "no-data", "no-privacy", "graph", "paused", "busy"})
"""Declines after which nothing was committed, so that the device has spent nothing."""


class ChargeBook:
    """Charges of the run of `engine`.

    :param budgets: which boards can pay for a next round; None if the cards have no limits.
    """

    def __init__(self, register: ActivityStore, engine: RoundEngine, budgets: Budgets | None = None) -> None:
        self._register, self._engine, self.budgets = register, engine, budgets
        self._resumed = None if engine.plan is None else engine.plan.round
        self._round, self._asked, self._noted = 0, Counter[str](), set[str]()
        if engine.closed_rounds:
            self.closed(engine.closed_rounds)  # a crash may have come in between
        if engine.plan is not None and engine.method.max_preference is not None:
            self._note_accepted(engine.plan.round)  # also here

    def expect(self, devices: Iterable[str]) -> None:
        """Notes charges of the cohort's devices among these, which may train in the open round. Raises `StoreError`."""
        plan = self._engine.plan
        if plan is None or plan.phase != "open":
            return
        if self._round != plan.round:
            self._round, self._asked, self._noted = plan.round, Counter(), set()
        cohort = self._engine.cohort
        asked = [device for device in devices if device in cohort]
        new = [device for device in asked if device not in self._noted]
        if new:
            charge = pack(self._engine.kind.method.charge(terms_of(plan)))
            self._register.note_charges(plan.task, plan.round, dict.fromkeys(new, charge), certain=False)
        self._noted.update(new)
        self._asked.update(asked)

    def arrived(self, devices: Iterable[str]) -> None:
        """Notes charges of devices that have arrived after this process continued the round of an earlier process, and
        announced it to all connected devices. Raises `StoreError`."""
        if self._engine.plan is not None and self._engine.plan.round == self._resumed:
            self.expect(devices)

    def declined(self, device: str, code: str) -> None:
        """Removes the noted charge of a device that declined before it trained. Raises `StoreError`."""
        if code in BEFORE_TRAINING:
            self._take_back(self._round, {device})

    def accepted(self, device: str, round: int) -> None:
        """Notes the charge that an accepted update declares, if devices choose their noise: the board's next card may
        ask before the round closes. Raises `StoreError`."""
        if self._engine.method.max_preference is not None:
            charge = pack(charge_of(self._engine.store.charge(device, round)))
            self._register.note_charges(self._engine.spec.task, round, {device: charge}, certain=True)

    def closed(self, round: int) -> None:
        """Notes the charges of a closed round. Raises `StoreError`; it may be called again."""
        store, spent = self._engine.store, self._note_accepted(round)
        self._drop_untrained(round)
        declined = {device for _, device, code, _ in store.declines(round) if code in BEFORE_TRAINING}
        self._take_back(round, declined - spent)

    def _note_accepted(self, round: int) -> set[str]:
        """Notes the charges that a round's accepted updates declare. Returns the devices that were charged for it."""
        spent: dict[int, dict[str, bytes]] = {round: {}}
        for row in self._engine.store.charges(round):  # of a buffered round, some are of earlier ones
            spent.setdefault(row.round, {})[row.device] = pack(charge_of(row))
        for number, charges in spent.items():
            self._register.note_charges(self._engine.spec.task, number, charges, certain=True)
        return set(spent[round])

    def _take_back(self, round: int, declined: set[str]) -> None:
        """Drops the notes of the devices in `declined` that this process has asked exactly once to train."""
        if round != self._round or round == self._resumed:
            return
        new = self._engine.store.new_cards(round)  # an earlier card may have spent what the new one declines
        gone = {device for device in declined & self._noted - new if self._asked[device] == 1}
        if gone:
            self._register.drop_charges(self._engine.spec.task, round, gone)
            self._noted -= gone

    def _drop_untrained(self, round: int) -> None:
        """Drops notes of rounds between two updates of a board in which it did not train, by its own count. Keeps the
        notes with the highest charges, because it may have trained in these."""
        store, task = self._engine.store, self._engine.spec.task
        gone: list[tuple[str, int]] = []
        for row in store.charges(round):
            newest, counted = store.charged_before(row.device, row.round)
            noted = self._register.charges_between(task, row.device, newest, row.round)
            trained = row.device_rounds - 1 - counted
            if 0 <= trained < len(noted):
                noted.sort(key=lambda each: (unpack(Charge, each[1], what="a charge").noise_multiplier, -each[0]))
                gone += [(row.device, number) for number, _ in noted[trained:]]
        if gone:
            self._register.drop_rounds(task, gone)


def charge_of(row: ChargeRow) -> Charge:
    """Returns the charge that an accepted update declared."""
    return Charge(
        unit=row.unit,
        adjacency=row.adjacency,
        mechanism="gaussian" if row.noise_multiplier else "none",
        noise_multiplier=row.noise_multiplier,
        noise_split=row.noise_split,
        sample_rate=row.sample_rate,
        steps=row.steps,
        raw=tuple(row.raw.split("\n")) if row.raw else (),
    )
