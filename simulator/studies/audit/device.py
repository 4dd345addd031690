"""Plays the game for a device: does this update, or answer, contain the device's data, or nothing?

In one world local training ends with the canary update, in the other with no change at all (add or remove, as in the
ledger). In a round that asks, the device answers with the longest answer, or with an empty one. Everything else is the
code of a board: `DeviceRound.run` with its store and ledger, the method's stages, the codec. The adversary is the
server: it decodes each update as the aggregator does and has its header and report. It also requests each round twice,
as after a lost acknowledgement; if the bytes differ, it uses the mean of both.

The score is the likelihood ratio of two normal distributions with the same variances: the projection on the values that
the method sends without noise, weighted by each value's precision; a round with more noise than another has less
weight. Variances are measured in trials that are not counted. They are not taken from the header, which may state noise
that is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.privacy.noise import NoiseSource, SeededNoise
from hushfleet.simulator.studies.audit.canary import WorstData, canary_update
from hushfleet.simulator.studies.audit.measured import MeasuredNoise
from hushfleet.simulator.studies.audit.subject import FLOOR, KeepGoing, Scores, Subject, lives
from hushfleet.training.local_round import LocalRound, Trained
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, decode_update

SERVER = "server: update, header, report"
VALUES = "server: noised values alone"
MEASURED = 32  # trials of each world in which variances are measured
_EARLIER_ROUNDS = 2
_SHOWN_OUTRIGHT = 1e6

Headers = dict[tuple[int, bool], set[tuple[float, ...]]]
"""The headers that were seen, by round and world."""


class DecodedRound(NamedTuple):
    """One decoded round: float64 values `[d]` followed by the report, and the header's fields about the noise."""

    round: int
    vector: np.ndarray
    header: tuple[float, ...]


def play(subject: Subject, rounds: Sequence[int], trials: int, keep_going: KeepGoing) -> dict[str, Scores]:
    """Returns the scores of two adversaries: one sees everything that is sent, the other only the noised values.

    Plays `trials` rounds in each world, or fewer if `keep_going` returns False.

    :param rounds: numbers of rounds that all train or all ask; they are played in turn.
    """
    game = _Game(subject, rounds)
    measured = MeasuredNoise()
    headers: Headers = defaultdict(set)
    for seen, inside in game.trials(1, MEASURED, lambda _: True):
        measured.add(subject.kind(seen.round), inside, game.of(seen.round).noise_in(seen, inside))
        headers[seen.round, inside].add(seen.header)
    scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for seen, inside in game.trials(2, trials, keep_going):
        factor = measured.factor(subject.kind(seen.round))
        all_seen, of_values = game.of(seen.round).scores(seen, measured.variances, factor)
        scores[inside].append((all_seen + _SHOWN_OUTRIGHT * _tells(seen, headers), of_values))
    inside_scores, outside_scores = (np.array(scores[world]).reshape(-1, 2).T for world in (True, False))
    return {name: Scores(inside_scores[at], outside_scores[at]) for at, name in enumerate((SERVER, VALUES))}


def _tells(seen: DecodedRound, headers: Headers) -> bool:
    """Returns whether a round's header is constant in the world with the canary, and never occurs in the other."""
    inside, outside = headers[seen.round, True], headers[seen.round, False]
    return len(inside) == len(outside) == 1 and seen.header in inside - outside


class _Game:
    def __init__(self, subject: Subject, rounds: Sequence[int]) -> None:
        self.subject, self.rounds = subject, rounds
        self._least_noise = min(map(subject.noise, rounds))
        self._kinds: dict[Hashable, _RoundKind] = {}

    def of(self, round: int) -> _RoundKind:
        key = self.subject.kind(round)
        if key not in self._kinds:
            self._kinds[key] = _RoundKind(self.subject, round, least_noise=self._least_noise)
        return self._kinds[key]

    def trials(self, stage: int, count: int, keep_going: KeepGoing) -> Iterator[tuple[DecodedRound, bool]]:
        """Yields trials of both worlds in turn, each world on its own devices, and whether the canary was in."""
        life, done = stage << 32, 0
        for rounds in lives(self.rounds, count):
            with self.subject.device(life + 1) as one, self.subject.device(life + 2) as other:
                for round in rounds:
                    if not keep_going(done):
                        return
                    yield self._seen(one, round, inside=True), True
                    outside = self._seen(other, round, inside=False)
                    yield outside._replace(vector=outside.vector - self.of(round).nothing), False
                    done += 1
            life += 2

    def _seen(self, trainer: Trainer, round: int, *, inside: bool) -> DecodedRound:
        """Returns the decoded round that the server receives after requesting it twice."""
        subject, kind = self.subject, self.of(round)
        plan, trained = subject.plan(round), kind.trained(inside)
        sent = [_ScriptedRound(trainer, plan, trained).run(subject.initial).data for _ in range(2)]
        seen = [kind.decoded(trainer, data) for data in dict.fromkeys(sent)]
        vectors, headers = zip(*seen, strict=True)
        return DecodedRound(round, np.mean(vectors, axis=0), headers[0])


class _RoundKind:
    """The rounds with the same terms.

    :param round: one of them.
    :param least_noise: the smallest noise multiplier of all rounds that are played.
    """

    def __init__(self, subject: Subject, round: int, *, least_noise: float) -> None:
        self._spec, self._method = subject.rules(round)
        rng, layout = np.random.default_rng(subject.seed), self._spec.model.layout
        self._size = layout.size
        if subject.spec.asks(round):
            self._start = np.zeros(layout.size, np.float32)
            setting = self._method.setting(subject.terms(round))
            self._context = RoundContext(setting, self._method.init_state(), self._start, self._start)
        else:
            self._start = subject.initial
            self._context = _round_of_a_member(subject, round, rng)
        self._update = canary_update(layout, self._spec.privacy.clip_norm, rng)
        self.expected = self._without_noise(self._update)
        self.nothing = self._without_noise(self._update * 0)
        self.nothing[: self._size] = 0
        noise = subject.noise(round)
        self._noise = float(np.linalg.norm(self.expected[: self._size])) * noise
        self._weight = (least_noise / noise) ** 2

    def trained(self, inside: bool) -> Trained:
        """Returns the round after its training, in the world with the canary or in the other."""
        return Trained(self._context, self._start + self._update * np.float32(inside), self._start, 0.0)

    def decoded(self, trainer: Trainer, data: bytes) -> tuple[np.ndarray, tuple[float, ...]]:
        """Returns the vector and the header of `DecodedRound`."""
        layout, shared = self._spec.model.layout, ~self._context.mask
        counts = [int(shared[span.start : span.stop].sum()) for span in layout.layers]
        decoded = decode_update(data, public_key=trainer.store.identity.public_key, counts=counts)
        values = np.zeros(layout.size)
        values[shared] = decoded.values
        return np.concatenate((values, decoded.header.report)), _about_noise(decoded.header)

    def noise_in(self, seen: DecodedRound, inside: bool) -> np.ndarray:
        """Returns the noise in what was sent, in units of the charged noise, so that all kinds have equal variances."""
        noise: np.ndarray = (seen.vector - self.expected * inside) / self._noise
        return noise

    def scores(self, seen: DecodedRound, variances: np.ndarray, factor: float) -> tuple[float, float]:
        """Returns the score by everything that was sent, and by the noised values alone.

        Without noise both are 1/2 for the canary and -1/2 for an empty update, in a round with the least noise.

        :param variances: of `noise_in`, over rounds of all kinds; `factor`: of this kind.
        """
        means, weight = self.expected, self._weight / factor
        weights = means / np.maximum(variances * factor * self._noise**2, np.maximum(FLOOR * means**2, 1e-300))
        projected, signal = weights * seen.vector, weights * means
        shares = (projected[:end].sum() / max(signal[:end].sum(), 1e-300) for end in (len(means), self._size))
        all_seen, alone = (weight * (float(share) - 0.5) for share in shares)
        return all_seen, alone

    def _without_noise(self, update: np.ndarray) -> np.ndarray:
        noised = self._method.privatize(self._context, update, _Silence())
        return np.concatenate((noised.values.astype(np.float64), noised.report))


def _round_of_a_member(subject: Subject, round: int, rng: np.random.Generator) -> RoundContext:
    """Returns the round of a device that has taken part before: its personal part and its clip norms have changed.

    It has no own model, so its training starts with the global one, and the sent values are the update.
    """
    method, initial = subject.method, subject.initial
    state, data = method.init_state(), WorstData(subject.classes, rng)
    for earlier in range(1, _EARLIER_ROUNDS + 1):
        update = canary_update(method.layout, subject.spec.privacy.clip_norm, rng) * np.float32(earlier)
        context = _ended(subject, round, state, data)
        noised = method.privatize(context, update, SeededNoise(subject.seed, 0, earlier))
        state = method.advance(context, update=update, trained=initial, sent=noised.values)
        state = replace(state, own=None)
    return _ended(subject, round, state, data)


def _ended(subject: Subject, round: int, state: DeviceState, data: WorstData) -> RoundContext:
    """Returns the context after a training that has changed nothing."""
    begun = LocalRound(subject.method, state, subject.initial, subject.terms(round), data)
    return begun.ended(subject.initial, subject.initial, 0.0, {}).context


class _ScriptedRound(DeviceRound):
    """A round whose local training, or answer, is a result set by the audit."""

    def __init__(self, trainer: Trainer, plan: RoundPlan, ends_with: Trained) -> None:
        super().__init__(trainer, plan)
        self.ends_with = ends_with

    def train(self, *arguments: Any, **more: Any) -> Trained:
        _ = self.charge  # raises if the device declines the round
        return self.ends_with

    def answer_question(self, published: np.ndarray) -> Trained:
        return self.train()


class _Silence(NoiseSource):
    """A noise source that adds no noise."""

    def normal(self, size: int) -> np.ndarray:
        return np.zeros(size)

    def words(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint64)


def _about_noise(header: UpdateHeader) -> tuple[float, ...]:
    return (*header.steps, *header.noise_stds, *header.clip_norms, header.multiplier_server, float(header.noise_split))
