"""The game for a secure sum: is this device's update, or this record of the device, in the sum?

The adversary is a server with as many corrupt devices as the task tolerates: it knows their updates, and sees the sum.
Only the parts of the honest devices that the task assumes are hidden. One of them runs the code of a board without the
masks, which cancel. The adversary knows the results of the other honest devices' training. So their updates are zero
here, and they only add noise by the ring. For a device, the canary is the result of its training; for a record, it is
the only record that it trains on, with the gradient's clipping and the round's step. In a round that asks, the device
answers with the longest answer, or with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import BadInput
from hushfleet.methods.local_round import Trained
from hushfleet.methods.state import DeviceState
from hushfleet.secure.prime_field import from_bytes
from hushfleet.secure.roster import Roster
from hushfleet.simulator.engines.fast.sums import UnmaskedRound
from hushfleet.simulator.studies.audit.canary import LENGTH, CanaryGradient, WorstData, canary_update, disjoint_blocks
from hushfleet.simulator.studies.audit.game import Canary, Seen, TwoWorlds
from hushfleet.simulator.studies.audit.subject import Subject
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import decode_masked

SUM = "server, with all corrupt devices: the sum"
_OTHERS = 1 << 40  # first number for the other devices' noise


class SumGame(TwoWorlds[Canary]):
    """The game. Raises `BadInput` for a task without secure sums."""

    first_life = 2

    def __init__(self, subject: Subject, rounds: Sequence[int]) -> None:
        super().__init__(subject, rounds, {SUM: None})
        if subject.spec.privacy.secure is None:
            raise BadInput("the game for a sum needs a task of secure sums")
        self._honest_devices = subject.spec.privacy.secure.honest_devices
        spec, method = subject.rules(rounds[0])
        layout, rng, clip_norm = spec.model.layout, np.random.default_rng(subject.seed), spec.privacy.clip_norm
        self._update = canary_update(layout, clip_norm, rng)
        blocks = disjoint_blocks(layout, 1, rng)
        self._gradient = CanaryGradient(classes=subject.classes, blocks=blocks, length=LENGTH * clip_norm)
        self._data = WorstData(subject.classes, rng)
        self._shared = ~method.init_state().public.mask
        self._scripted = spec.privacy.unit == "device"

    @contextmanager
    def device(self, life: int, *, inside: bool) -> Iterator[Trainer]:
        """Opens a device with the canary, or without any record."""
        canary = np.full(int(inside), self.subject.classes)
        with self.subject.device(
            life,
            gradient=self._gradient,
            samples=zero_samples(self.subject.spec.model, canary),
            logits_of=lambda params, x: self._data.logits(params),
        ) as trainer:
            trainer.make_secure_round = UnmaskedRound
            yield trainer

    def make_canary(self, round: int) -> Canary:
        with self.device(0, inside=True) as trainer:
            begun = self._round(trainer, self.subject.plan(round), inside=True)
            trained = begun.trained(self.subject.initial)
            source = trainer.randomness.noise(1)  # the ring adds noise, and not the release
            noised = begun.method.privatize(trained.context, trained.update, source)
        expected = noised.values[self._shared].astype(np.float64)
        return Canary(expected, *self.noise_and_weight(round, expected))

    def _round(self, trainer: Trainer, plan: RoundPlan, *, inside: bool) -> _SumRound:
        """Returns a round of such a device. With the unit `device`, training returns the canary, or no change."""
        moves = (self._update * np.float32(inside), self._data) if self._scripted else None
        return _SumRound(trainer, plan, self.subject.roster, moves)

    def see(self, trainer: Trainer, round: int, *, inside: bool) -> Seen:
        subject, plan = self.subject, self.subject.plan(round)
        begun = self._round(trainer, plan, inside=inside)
        sent = [begun.run(subject.initial).data for _ in range(2)]
        cost = begun.method.cost(begun.terms)
        ring = begun.secure.ring(cost.bound, cost.noise_multiplier, cost.records)
        nothing, others = np.zeros(ring.size), np.zeros(ring.size, np.int64)
        for number in range(self._honest_devices - 1):
            others += ring.encode(nothing, trainer.randomness.noise(_OTHERS + number))
        sums = []
        for data in dict.fromkeys(sent):
            _, values = decode_masked(data, public_key=trainer.store.identity.public_key)
            own = from_bytes(values, begun.secure.spec.bits)[: ring.size].astype(np.int64)
            sums.append(ring.decode(((own + others) % ring.prime).astype(np.uint32)))
        return Seen(round, np.mean(sums, axis=0))


class _SumRound(DeviceRound):
    """A round that a device starts as if it had never taken part, so that all rounds are equal.

    :param moves: update that replaces training, or the answer; and answers to a method's questions about the data. None
        to train.
    """

    def __init__(
        self, trainer: Trainer, plan: RoundPlan, roster: Roster | None, moves: tuple[np.ndarray, WorstData] | None
    ) -> None:
        super().__init__(trainer, plan, roster)
        self._moves = moves

    def state(self) -> DeviceState:
        return self.trainer.method.init_state()

    def trained(self, published: np.ndarray) -> Trained:
        """Returns the round before its release."""
        return self.answer_question(published) if self.asks else self.train(published)

    def train(self, published: np.ndarray, *_: object, **how: Any) -> Trained:
        if self._moves is None:
            return super().train(published, **how)
        update, data = self._moves
        begun = self.begun(published, data)
        context = begun.context
        return begun.ended(context.start + update, context.global_params, 0.0, {})

    def answer_question(self, published: np.ndarray) -> Trained:
        assert self._moves is not None, "an answer protects a device, so it is scripted"
        _ = self.charge  # raises if the device declines the round
        return self._as_update(self._moves[0])
