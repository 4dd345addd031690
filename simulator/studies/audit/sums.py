"""Plays the game for a secure sum: is this device's update, or this record of the device, in the sum?

The adversary is a server with as many corrupt devices as the task tolerates: it knows their updates, and sees the sum.
Only the parts of the honest devices that the task assumes are hidden. One of them runs the code of a board:
`DeviceRound` with its store, ledger, release and ring, without the masks, which cancel. The adversary knows the results
of the other honest devices' training. So their updates are zero here, and they only add noise by the ring. For a
device, the canary is the result of its training; for a record, it is the only record that it trains on, with the
gradient's clipping and the round's step. The server requests each round twice, and uses the mean if the bytes differ.

The score is the likelihood ratio of two normal distributions, as in `device`; variances are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.errors import BadInput
from hushfleet.methods.state import DeviceState
from hushfleet.privacy.ring import Ring
from hushfleet.secure.prime_field import from_bytes
from hushfleet.secure.ring_of import ring_of
from hushfleet.secure.roster import Roster
from hushfleet.simulator.engines.fast.sums import UnmaskedRound
from hushfleet.simulator.studies.audit.canary import LENGTH, CanaryGradient, WorstData, canary_update, disjoint_blocks
from hushfleet.simulator.studies.audit.subject import FLOOR, ROUNDS_A_LIFE, KeepGoing, Moments, Scores, Subject
from hushfleet.training.local_round import Trained
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import decode_masked

SUM = "server, with all corrupt devices: the sum"
MEASURED = 32  # trials of each world in which variances are measured
_OTHERS = 1 << 40  # first number for the other devices' noise


def play(subject: Subject, trials: int, keep_going: KeepGoing) -> dict[str, Scores]:
    """Returns the scores of a server that sees sums: `trials` rounds per world, or fewer if `keep_going` ends it."""
    game, moments = _Game(subject), {True: Moments(), False: Moments()}
    for seen, inside in game.trials(1, MEASURED, lambda _: True):
        moments[inside].add(seen)
    variances = sum(each.spread for each in moments.values()) / (2 * MEASURED - 2)
    weights = game.expected / np.maximum(variances, FLOOR * game.expected**2 + 1e-300)
    weights /= weights @ game.expected
    scores: dict[bool, list[float]] = {True: [], False: []}
    for seen, inside in game.trials(2, trials, keep_going):
        scores[inside].append(float(weights @ seen))
    return {SUM: Scores(np.array(scores[True]), np.array(scores[False]))}


class _Game:
    def __init__(self, subject: Subject) -> None:
        """Prepares the game. Raises `BadInput` for a task without secure sums."""
        if subject.spec.privacy.secure is None:
            raise BadInput("the game for a sum needs a task of secure sums")
        self.subject, self.secure = subject, subject.spec.privacy.secure
        self.cost = subject.method.cost(subject.terms)
        layout, rng = subject.spec.model.layout, np.random.default_rng(subject.seed)
        clip_norm = subject.spec.privacy.clip_norm
        self.update = canary_update(layout, clip_norm, rng)
        blocks = disjoint_blocks(layout, 1, rng)
        self.gradient = CanaryGradient(classes=subject.classes, blocks=blocks, length=LENGTH * clip_norm)
        self.data = WorstData(subject.classes, rng)
        self.shared = ~subject.method.init_state().public.mask
        with self.device(0, inside=True) as trainer:
            trained = self._round(trainer, subject.plan(1), inside=True).train(subject.initial)
            noise = trainer.randomness.noise(1)  # the ring adds noise, and not the release
            released = subject.method.release(trained.context, trained.update, noise)
        self.expected = released.values[self.shared].astype(np.float64)

    @contextmanager
    def device(self, life: int, *, inside: bool) -> Iterator[Trainer]:
        """Opens a device with the canary, or without any record."""
        canary = np.full(int(inside), self.subject.classes)
        with self.subject.device(
            life,
            gradient=self.gradient,
            samples=zero_samples(self.subject.spec.model, canary),
            logits_of=lambda params, x: self.data.logits(params),
        ) as trainer:
            trainer.make_secure_round = UnmaskedRound
            yield trainer

    def _round(self, trainer: Trainer, plan: RoundPlan, *, inside: bool) -> _SumRound:
        """Returns a round of such a device. With the unit `device`, training returns the canary, or no change."""
        scripted = self.subject.spec.privacy.unit == "device"
        moves = (self.update * np.float32(inside), self.data) if scripted else None
        return _SumRound(trainer, plan, self.subject.roster, moves)

    def trials(self, stage: int, count: int, keep_going: KeepGoing) -> Iterator[tuple[np.ndarray, bool]]:
        """Yields sums of both worlds in turn, each world on its own devices, and whether the canary was in."""
        rounds, life = min(self.subject.spec.rounds, ROUNDS_A_LIFE), stage << 32
        for first in range(0, count, rounds):
            life += 2
            with self.device(life, inside=True) as one, self.device(life + 1, inside=False) as other:
                for round in range(1, min(rounds, count - first) + 1):
                    if not keep_going(first + round - 1):
                        return
                    yield self._seen(one, round, inside=True), True
                    yield self._seen(other, round, inside=False), False

    def _seen(self, trainer: Trainer, number: int, *, inside: bool) -> np.ndarray:
        """Returns the sum of a round that the server requests twice, float64 `[k]`."""
        subject, cost, plan = self.subject, self.cost, self.subject.plan(number)
        round = self._round(trainer, plan, inside=inside)
        sent = [round.run(subject.initial).data for _ in range(2)]
        ring = ring_of(subject.spec, plan, round.secure, cost.bound, cost.noise_multiplier, cost.records)
        others = self._others(ring, trainer)
        sums = []
        for data in dict.fromkeys(sent):
            _, values = decode_masked(data, public_key=trainer.store.identity.public_key)
            own = from_bytes(values, self.secure.bits)[: ring.size].astype(np.int64)
            sums.append(ring.decode(((own + others) % ring.prime).astype(np.uint32)))
        seen: np.ndarray = np.mean(sums, axis=0)
        return seen

    def _others(self, ring: Ring, trainer: Trainer) -> np.ndarray:
        nothing, total = np.zeros(ring.size), np.zeros(ring.size, np.int64)
        for number in range(self.secure.honest_devices - 1):
            total += ring.encode(nothing, trainer.randomness.noise(_OTHERS + number))
        return total


class _SumRound(DeviceRound):
    """A round that a device starts as if it had never taken part, so that all rounds are equal.

    :param moves: update that replaces training, and answers to a method's questions about the data; None to train.
    """

    def __init__(
        self, trainer: Trainer, plan: RoundPlan, roster: Roster | None, moves: tuple[np.ndarray, WorstData] | None
    ) -> None:
        super().__init__(trainer, plan, roster)
        self._moves = moves

    def state(self) -> DeviceState:
        return self.method.init_state()

    def train(self, published: np.ndarray, *_: object, **how: Any) -> Trained:
        if self._moves is None:
            return super().train(published, **how)
        update, data = self._moves
        begun = self.begun(published, data)
        context = begun.context
        return begun.ended(context.start + update, context.global_params, 0.0, {})
