"""Plays the game for a secure sum: is this device's update, or this record of the device, in the sum?

The adversary is a server with as many corrupt devices as the task tolerates: it knows their updates, and sees the sum.
Only the parts of the honest devices that the task assumes are hidden. One of them runs the code of a board:
`DeviceRound` with its store, ledger, release and ring, without the masks, which cancel. The adversary knows the results
of the other honest devices' training. So their updates are zero here, and they only add noise by the ring. For a
device, the canary is the result of its training; for a record, it is the only record that it trains on, with the
gradient's clipping and the round's step. The server requests each round twice, and uses the mean if the bytes differ.

The score is the likelihood ratio of two normal distributions, as in `device`; variances are measured. In a round that
asks, the device answers with the longest answer, or with an empty one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.errors import BadInput
from hushfleet.methods.state import DeviceState
from hushfleet.privacy.ring import Ring
from hushfleet.secure.prime_field import from_bytes
from hushfleet.secure.roster import Roster
from hushfleet.simulator.engines.fast.sums import UnmaskedRound
from hushfleet.simulator.studies.audit.canary import LENGTH, CanaryGradient, WorstData, canary_update, disjoint_blocks
from hushfleet.simulator.studies.audit.measured import MeasuredNoise
from hushfleet.simulator.studies.audit.subject import FLOOR, KeepGoing, Scores, Subject, lives
from hushfleet.training.local_round import Trained
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import decode_masked

SUM = "server, with all corrupt devices: the sum"
MEASURED = 32  # trials of each world in which variances are measured
_OTHERS = 1 << 40  # first number for the other devices' noise


def play(subject: Subject, rounds: Sequence[int], trials: int, keep_going: KeepGoing) -> dict[str, Scores]:
    """Returns the scores of a server that sees sums: `trials` rounds per world, or fewer if `keep_going` ends it.

    :param rounds: numbers of rounds that all train or all ask; they are played in turn.
    """
    game, measured = _Game(subject, rounds), MeasuredNoise()
    for round, seen, inside in game.trials(1, MEASURED, lambda _: True):
        kind = game.of(round)
        measured.add(subject.kind(round), inside, (seen - kind.expected * inside) / kind.noise)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for round, seen, inside in game.trials(2, trials, keep_going):
        kind, factor = game.of(round), measured.factor(subject.kind(round))
        floor = FLOOR * kind.expected**2 + 1e-300
        weights = kind.expected / np.maximum(measured.variances * factor * kind.noise**2, floor)
        share = float(weights @ seen) / float(weights @ kind.expected)
        scores[inside].append(kind.weight / factor * (share - 0.5))
    return {SUM: Scores(np.array(scores[True]), np.array(scores[False]))}


class _RoundKind(NamedTuple):
    """The rounds with the same terms.

    :param expected: float64 `[k]`, the sum with the canary without noise.
    :param noise: the charged noise's standard deviation, up to a factor that all rounds have in common.
    :param weight: as in `device`: less for a round with more noise than another.
    """

    expected: np.ndarray
    noise: float
    weight: float


class _Game:
    def __init__(self, subject: Subject, rounds: Sequence[int]) -> None:
        """Prepares the game. Raises `BadInput` for a task without secure sums."""
        if subject.spec.privacy.secure is None:
            raise BadInput("the game for a sum needs a task of secure sums")
        self.subject, self.rounds, self.honest_devices = subject, rounds, subject.spec.privacy.secure.honest_devices
        spec, method = subject.rules(rounds[0])
        layout, rng = spec.model.layout, np.random.default_rng(subject.seed)
        clip_norm = spec.privacy.clip_norm
        self.update = canary_update(layout, clip_norm, rng)
        blocks = disjoint_blocks(layout, 1, rng)
        self.gradient = CanaryGradient(classes=subject.classes, blocks=blocks, length=LENGTH * clip_norm)
        self.data = WorstData(subject.classes, rng)
        self.shared = ~method.init_state().public.mask
        self.scripted = spec.privacy.unit == "device"
        self._least_noise = min(map(subject.noise, rounds))
        self._kinds: dict[Hashable, _RoundKind] = {}

    def of(self, number: int) -> _RoundKind:
        key, noise = self.subject.kind(number), self.subject.noise(number)
        if key not in self._kinds:
            with self.device(0, inside=True) as trainer:
                round = self._round(trainer, self.subject.plan(number), inside=True)
                trained = round.trained(self.subject.initial)
                source = trainer.randomness.noise(1)  # the ring adds noise, and not the release
                released = round.method.release(trained.context, trained.update, source)
            expected = released.values[self.shared].astype(np.float64)
            deviation, weight = float(np.linalg.norm(expected)) * noise, (self._least_noise / noise) ** 2
            self._kinds[key] = _RoundKind(expected, deviation, weight)
        return self._kinds[key]

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
        moves = (self.update * np.float32(inside), self.data) if self.scripted else None
        return _SumRound(trainer, plan, self.subject.roster, moves)

    def trials(self, stage: int, count: int, keep_going: KeepGoing) -> Iterator[tuple[int, np.ndarray, bool]]:
        """Yields sums of both worlds in turn, each world on its own devices, and whether the canary was in."""
        life, done = stage << 32, 0
        for rounds in lives(self.rounds, count):
            life += 2
            with self.device(life, inside=True) as one, self.device(life + 1, inside=False) as other:
                for round in rounds:
                    if not keep_going(done):
                        return
                    yield round, self._seen(one, round, inside=True), True
                    yield round, self._seen(other, round, inside=False), False
                    done += 1

    def _seen(self, trainer: Trainer, number: int, *, inside: bool) -> np.ndarray:
        """Returns the sum of a round that the server requests twice, float64 `[k]`."""
        subject, plan = self.subject, self.subject.plan(number)
        round = self._round(trainer, plan, inside=inside)
        sent = [round.run(subject.initial).data for _ in range(2)]
        cost = round.method.cost(round.terms)
        ring = round.secure.ring(cost.bound, cost.noise_multiplier, cost.records)
        others = self._others(ring, trainer)
        sums = []
        for data in dict.fromkeys(sent):
            _, values = decode_masked(data, public_key=trainer.store.identity.public_key)
            own = from_bytes(values, round.secure.spec.bits)[: ring.size].astype(np.int64)
            sums.append(ring.decode(((own + others) % ring.prime).astype(np.uint32)))
        seen: np.ndarray = np.mean(sums, axis=0)
        return seen

    def _others(self, ring: Ring, trainer: Trainer) -> np.ndarray:
        nothing, total = np.zeros(ring.size), np.zeros(ring.size, np.int64)
        for number in range(self.honest_devices - 1):
            total += ring.encode(nothing, trainer.randomness.noise(_OTHERS + number))
        return total


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
