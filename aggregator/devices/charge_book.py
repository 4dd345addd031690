"""What each board of a fleet has spent, kept beside the register for the day on which its card is lost.

The board's own ledger is what counts, and it is gone with the card. So the aggregator notes a round for every board
that may train in it, before that board is told that it may; what an accepted update declares takes its place, and what
a board has declined before training is taken back. Whatever is killed when, the note is never too small.
"""

from __future__ import annotations

from collections.abc import Iterable

from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.rounds.engine import RoundEngine, terms_of
from hushfleet.aggregator.storage.store import ChargeRow
from hushfleet.config.schema import pack
from hushfleet.privacy.mechanism import Charge

BEFORE_TRAINING = frozenset({"budget", "memory", "no-data", "no-privacy", "graph", "paused", "busy"})
"""Declines after which nothing was committed: whoever says so has spent nothing."""


class ChargeBook:
    """Of the run of `engine`."""

    def __init__(self, register: DeviceRegister, engine: RoundEngine) -> None:
        self._register, self._engine = register, engine
        self._noted: tuple[int, set[str]] = 0, set()
        if engine.closed_rounds:
            self.closed(engine.closed_rounds)  # a kill may have come between

    def expect(self, devices: Iterable[str]) -> None:
        """These may train in the open round from now on, as far as they are in its cohort. Raises `StoreError`."""
        plan = self._engine.plan
        if plan is None or plan.phase != "open":
            return
        if self._noted[0] != plan.round:
            self._noted = plan.round, set()
        cohort, noted = self._engine.cohort, self._noted[1]
        new = [device for device in devices if device not in noted and device in cohort]
        if new:
            charge = pack(self._engine.method.charge(terms_of(plan)))
            self._register.note_charges(plan.task, plan.round, dict.fromkeys(new, charge), certain=False)
            noted.update(new)

    def closed(self, round: int) -> None:
        """The round is closed. Raises `StoreError`; it may be called again."""
        store, task = self._engine.store, self._engine.spec.task
        spent = {row.device: pack(_charge(row)) for row in store.charges(round)}
        self._register.note_charges(task, round, spent, certain=True)
        declined = {device for _, device, code, _ in store.declines(round) if code in BEFORE_TRAINING}
        self._register.drop_charges(task, round, declined - spent.keys())


def _charge(row: ChargeRow) -> Charge:
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
