"""The game for what a device sends: is the canary in this update or answer, or in this secure aggregation, or nothing?

In one world local training ends with the canary update, in the other with no change at all (add or remove, as in the
ledger); in a round that asks, the device answers with the longest answer, or with an empty one. With the unit `record`
and secure aggregation, the canary is the only record that the device trains on, with the gradient's clipping and the
round's step.

The adversary is the server. It decodes each update as the aggregator does, and has its header and report; if the bytes
of a round differ when it requests them again, it uses the mean of both. Under secure aggregation it has as many corrupt
devices as the task tolerates: it knows their updates, and sees the sum. Only the parts of the honest devices that the
task assumes are hidden. One of them runs the code of a board without the masks, which cancel; the results of the
others' training are known, so their updates are zero here, and they only add noise by the ring.

The score is the likelihood ratio of two normal distributions with the same variances: the projection on the values that
the method sends without noise, weighted by each value's precision; a round with more noise than another has less
weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hushfleet.edge_client.worker.trainer import Trainer
from hushfleet.methods.local_round import LocalRound, Trained
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.privacy.noise import NoiseSource, SeededNoise
from hushfleet.secure.prime_field import from_bytes
from hushfleet.simulator.studies.audit import game
from hushfleet.simulator.studies.audit.canary import LENGTH, CanaryGradient, WorstData, canary_update
from hushfleet.simulator.studies.audit.game import FLOOR, CanaryRound, Game, Moments, lives
from hushfleet.simulator.studies.audit.subject import Subject
from hushfleet.wire.format.update_values import decode_masked, decode_update

SERVER = "server: update, header, report"
VALUES = "server: noised values alone"
SUM = "server, with all corrupt devices: the sum"
_EARLIER_ROUNDS = 2
_OTHERS = 1 << 40  # first number for the other devices' noise
_SHOWN_OUTRIGHT = 1e6
_LEAST_FACTOR = 1e-4


class Seen(NamedTuple):
    """The server's view of a round: float64 values `[n]`, and the header's fields about the noise."""

    round: int
    vector: np.ndarray
    header: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Canary:
    """The canary in the rounds with the same terms.

    :param ends_with: the end of training with the canary, or the answer; None if the device trains on it.
    :param shared: bool `[d]`, the sent entries.
    :param expected: float64 `[n]`, the server's view of it without noise.
    :param nothing: the report that is sent with an empty update, without noise; 0 for the values.
    :param noise: standard deviation of the charged noise, up to a factor that all rounds have in common.
    :param weight: of these rounds in the score; 1 for those with the least noise.
    """

    ends_with: Trained | None
    shared: np.ndarray
    expected: np.ndarray
    nothing: np.ndarray
    noise: float
    weight: float


class UpdateGame(Game):
    """The game; `VALUES` sees the noised values only, as a paper counts them."""

    def __init__(self, subject: Subject, rounds: Sequence[int]) -> None:
        spec, self._method = subject.rules(rounds[0])
        self._layout, self._clip_norm = spec.model.layout, spec.privacy.clip_norm
        self._secure = subject.spec.privacy.secure
        super().__init__(subject, rounds, {SUM: None} if self._secure else {SERVER: None, VALUES: self._layout.size})
        self._inserted: CanaryGradient | None = None
        if spec.privacy.unit == "record":
            rng = np.random.default_rng(subject.seed)
            self._inserted = subject.canary_records(1, rng, length=LENGTH * self._clip_norm)
        self._least_noise = min(map(subject.noise, rounds))
        self._canaries: dict[Hashable, Canary] = {}
        self._measured = MeasuredNoise()
        self._headers = defaultdict[tuple[int, bool], set[tuple[float, ...]]](set)

    def measure(self) -> None:
        for pair in self._pairs(1, game.MEASURED):
            for seen, inside in zip(pair, (True, False), strict=True):
                canary = self._canary(seen.round)
                noise = (seen.vector - canary.expected * inside) / canary.noise
                self._measured.add(self.subject.kind(seen.round), inside, noise)
                self._headers[seen.round, inside].add(seen.header)

    def trials(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for pair in self._pairs(2, count):
            yield np.array([True, False]), np.array([self._score(seen) for seen in pair]).T

    def _pairs(self, stage: int, count: int) -> Iterator[tuple[Seen, Seen]]:
        """Yields rounds of both worlds: with the canary, and without."""
        life = (stage << 32) + 1
        for rounds in lives(self.rounds, count):
            with self._device(life, inside=True) as one, self._device(life + 1, inside=False) as other:
                for round in rounds:
                    yield self._see(one, round, inside=True), self._see(other, round, inside=False)
            life += 2

    def _device(self, life: int, *, inside: bool) -> AbstractContextManager[Trainer]:
        records = None if self._inserted is None else (self._inserted, np.arange(int(inside)))
        return self.subject.device(life, records)

    def _score(self, seen: Seen) -> list[float]:
        """Returns each adversary's score: without noise 1/2 for the canary and -1/2 for an empty update, in a round
        with the least noise."""
        canary, factor = self._canary(seen.round), self._measured.factor(self.subject.kind(seen.round))
        means, floor = canary.expected, np.maximum(FLOOR * canary.expected**2, 1e-300)
        weights = means / np.maximum(self._measured.variances * factor * canary.noise**2, floor)
        projected, signal = weights * seen.vector, weights * means
        with_canary, without = self._headers[seen.round, True], self._headers[seen.round, False]
        tells = len(with_canary) == len(without) == 1 and seen.header in with_canary - without
        ends = self.adversaries.values()
        shares = (float(projected[:end].sum() / max(signal[:end].sum(), 1e-300)) for end in ends)
        scores = [canary.weight / factor * (share - 0.5) for share in shares]
        return [score + _SHOWN_OUTRIGHT * tells * (end is None) for score, end in zip(scores, ends, strict=True)]

    def _canary(self, round: int) -> Canary:
        key = self.subject.kind(round)
        if key not in self._canaries:
            self._canaries[key] = self._make_canary(round)
        return self._canaries[key]

    def _make_canary(self, round: int) -> Canary:
        rng, size, start = np.random.default_rng(self.subject.seed), self._layout.size, self.subject.initial
        if self._inserted is not None:
            with self._device(0, inside=True) as trainer:
                trained = CanaryRound(trainer, self.subject, round).train(start)
        else:
            if self.subject.spec.asks(round):
                start = np.zeros(size, np.float32)
                setting = self._method.setting(self.subject.terms(round))
                context = RoundContext(setting, self._method.init_state(), start, start)
            else:
                context = self._context_of_a_member(round, rng)
            trained = Trained(context, start + canary_update(self._layout, self._clip_norm, rng), start, 0.0)

        def without_noise(update: np.ndarray) -> np.ndarray:
            noised = self._method.privatize(trained.context, update, _Silence())
            return np.concatenate((noised.values.astype(np.float64), noised.report))

        expected, nothing = without_noise(trained.update), without_noise(trained.update * 0)
        nothing[:size] = 0
        shared = ~trained.context.state.public.mask
        if self._secure:
            expected, nothing = expected[:size] * shared, nothing[:size]
        noise = self.subject.noise(round)
        return Canary(
            trained if self._inserted is None else None,
            shared,
            expected,
            nothing,
            float(np.linalg.norm(expected[:size])) * noise,
            (self._least_noise / noise) ** 2,
        )

    def _context_of_a_member(self, round: int, rng: np.random.Generator) -> RoundContext:
        """Returns the round of a device that has taken part before: its personal part and its clip norms have changed.

        It has no personalized model, so its training starts with the global one, and the sent values are the update. It
        is a newcomer under secure aggregation.
        """
        subject, method = self.subject, self.subject.method
        initial, state, data = subject.initial, method.init_state(), WorstData(subject.classes, rng)

        def ended(state: DeviceState) -> RoundContext:
            """Returns the context after a training that has changed nothing."""
            begun = LocalRound(method, state, initial, subject.terms(round), data)
            return begun.ended(initial, initial, 0.0, {}).context

        for earlier in range(1, 1 if self._secure else 1 + _EARLIER_ROUNDS):
            update = canary_update(method.layout, subject.spec.privacy.clip_norm, rng) * np.float32(earlier)
            context = ended(state)
            noised = method.privatize(context, update, SeededNoise(subject.seed, 0, earlier))
            state = replace(method.advance(context, update=update, trained=initial, sent=noised.values), own=None)
        return ended(state)

    def _see(self, trainer: Trainer, round: int, *, inside: bool) -> Seen:
        """Plays a round that is requested twice."""
        canary = self._canary(round)
        ends_with = canary.ends_with
        if ends_with is not None and not inside:
            ends_with = ends_with._replace(end=ends_with.own)  # where it began
        begun = [CanaryRound(trainer, self.subject, round, ends_with) for _ in range(2)]
        sent = list(dict.fromkeys(each.run(self.subject.initial).data for each in begun))
        read = self._read_sum if self._secure else self._read_update
        vectors, header = read(sent, begun[0], canary.shared)
        seen = np.mean(vectors, axis=0)
        return Seen(round, seen if inside else seen - canary.nothing, header)

    def _read_update(
        self, sent: Sequence[bytes], begun: CanaryRound, shared: np.ndarray
    ) -> tuple[list[np.ndarray], tuple[float, ...]]:
        counts = [int(shared[span.start : span.stop].sum()) for span in self._layout.layers]
        key, vectors = begun.store.identity.public_key, []
        decoded = [decode_update(data, public_key=key, counts=counts) for data in sent]
        for each in decoded:
            values = np.zeros(self._layout.size)
            values[shared] = each.values
            vectors.append(np.concatenate((values, each.header.report)))
        header = decoded[0].header
        noise = (*header.steps, *header.noise_stds, *header.clip_norms, header.multiplier_server)
        return vectors, (*noise, float(header.noise_split))

    def _read_sum(
        self, sent: Sequence[bytes], begun: CanaryRound, shared: np.ndarray
    ) -> tuple[list[np.ndarray], tuple[float, ...]]:
        assert self._secure is not None
        cost, secure, noise = begun.method.cost(begun.terms), begun.secure, begun.trainer.randomness.noise
        ring = secure.ring(cost.bound, cost.noise_multiplier, cost.records)
        honest, nothing = self._secure.honest_devices - 1, np.zeros(ring.size)
        others = sum(ring.encode(nothing, noise(_OTHERS + number)).astype(np.int64) for number in range(honest))
        vectors = []
        for data in sent:
            _, coded = decode_masked(data, public_key=begun.store.identity.public_key)
            own, values = from_bytes(coded, secure.spec.bits)[: ring.length], np.zeros(self._layout.size)
            values[shared] = ring.decode(((own.astype(np.int64) + others) % ring.prime).astype(np.uint32))
            vectors.append(values)
        return vectors, ()


class MeasuredNoise:
    """Measures the noise of a game's rounds, in units of the noise that is charged.

    Each value has a variance, measured in rounds of all kinds; each kind has a factor on it, measured in all values.
    """

    def __init__(self) -> None:
        self._worlds = {True: Moments(), False: Moments()}
        self._kinds: defaultdict[Hashable, list[float]] = defaultdict(list)

    def add(self, kind: Hashable, inside: bool, noise: np.ndarray) -> None:
        """:param noise: float64 `[n]`, in units of the charged noise."""
        self._worlds[inside].add(noise)
        self._kinds[kind].append(float(np.mean(noise * noise)))

    @cached_property
    def variances(self) -> np.ndarray:
        """The variance of each value, float64 `[n]`, over rounds of all kinds."""
        inside, outside = self._worlds[True], self._worlds[False]
        return (inside.spread + outside.spread) / (inside.count + outside.count - 2)

    def factor(self, kind: Hashable) -> float:
        """Returns the factor for rounds of this kind; 1 if none of them was measured."""
        every = [square for squares in self._kinds.values() for square in squares]
        mean = sum(every) / len(every)
        own = self._kinds[kind] or [mean]
        return max(sum(own) / len(own) / mean, _LEAST_FACTOR) if mean > 0 else 1.0


class _Silence(NoiseSource):
    """A noise source that adds no noise."""

    def normal(self, size: int) -> np.ndarray:
        return np.zeros(size)

    def words(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint64)
