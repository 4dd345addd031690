"""Plays the game for a device: does this update contain the device's data, or nothing?

In one world local training ends with the canary update, in the other with no change at all (add or remove, as in the
ledger). Everything else is the code of a board: `DeviceRound.run` with its store and ledger, the method's release, the
codec. The adversary is the server: it decodes each update as the aggregator does and has its header and report. It also
requests each round twice, as after a lost acknowledgement; if the bytes differ, it uses the mean of both.

The score is the likelihood ratio of two normal distributions with the same variances: the projection on the values that
the method sends without noise, weighted by each value's precision. Variances are measured in trials that are not
counted. They are not taken from the header, which may state noise that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.privacy.noise import NoiseSource, SeededNoise
from hushfleet.simulator.studies.audit.canary import WorstData, canary_update
from hushfleet.simulator.studies.audit.subject import FLOOR, ROUNDS_A_LIFE, KeepGoing, Moments, Scores, Subject
from hushfleet.training.local_round import LocalRound, Trained
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, decode_update

SERVER = "server: update, header, report"
VALUES = "server: noised values alone"
MEASURED = 32  # trials of each world in which variances are measured
_EARLIER_ROUNDS = 2
_SHOWN_OUTRIGHT = 1e6


class DecodedRound(NamedTuple):
    """One decoded round: float64 values `[d]` followed by the report, and the header's fields about the noise."""

    vector: np.ndarray
    header: tuple[float, ...]


def play(subject: Subject, trials: int, keep_going: KeepGoing) -> dict[str, Scores]:
    """Returns the scores of two adversaries: one sees everything that is sent, the other only the noised values.

    Plays `trials` rounds in each world, or fewer if `keep_going` returns False.
    """
    game = _Game(subject)
    moments, headers = {True: Moments(), False: Moments()}, {True: set[Any](), False: set[Any]()}
    for seen, inside in game.trials(1, MEASURED, lambda _: True):
        moments[inside].add(seen.vector)
        headers[inside].add(seen.header)
    variances = sum(each.spread for each in moments.values()) / (2 * MEASURED - 2)
    means = game.expected
    weights = means / np.maximum(variances, np.maximum(FLOOR * means**2, 1e-300))
    of_values = np.where(np.arange(len(weights)) < subject.spec.model.layout.size, weights, 0.0)
    # With both weights, the canary without noise then scores 1, and an empty update scores 0.
    weights, of_values = (each / max(float(each @ means), 1e-300) for each in (weights, of_values))
    # The header, if it is constant in the world with the canary and never occurs in the other.
    telling = headers[True] if len(headers[True]) == len(headers[False]) == 1 else set()
    telling = telling - headers[False]
    scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for seen, inside in game.trials(2, trials, keep_going):
        shown = _SHOWN_OUTRIGHT if seen.header in telling else 0.0
        scores[inside].append((float(weights @ seen.vector) + shown, float(of_values @ seen.vector)))
    inside_scores, outside_scores = (np.array(scores[world]).reshape(-1, 2).T for world in (True, False))
    return {name: Scores(inside_scores[at], outside_scores[at]) for at, name in enumerate((SERVER, VALUES))}


class _Game:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        rng = np.random.default_rng(subject.seed)
        self.context = _round_of_a_member(subject, rng)
        self.update = canary_update(subject.spec.model.layout, subject.spec.privacy.clip_norm, rng)
        self.expected = self._without_noise(self.update)
        self.nothing = self._without_noise(self.update * 0)
        self.nothing[: subject.spec.model.layout.size] = 0

    def trials(self, stage: int, count: int, keep_going: KeepGoing) -> Iterator[tuple[DecodedRound, bool]]:
        """Yields trials of both worlds in turn, each world on its own devices, and whether the canary was in."""
        rounds, life = min(self.subject.spec.rounds, ROUNDS_A_LIFE), stage << 32
        for first in range(0, count, rounds):
            with ExitStack() as lives:
                worlds = []
                for update in (self.update, self.update * 0):
                    life += 1
                    start = self.subject.initial
                    trained = Trained(self.context, start + update, start, 0.0)
                    worlds.append((lives.enter_context(self.subject.device(life)), trained))
                for round in range(1, min(rounds, count - first) + 1):
                    if not keep_going(first + round - 1):
                        return
                    yield self._seen(*worlds[0], round), True
                    outside = self._seen(*worlds[1], round)
                    yield outside._replace(vector=outside.vector - self.nothing), False

    def _seen(self, trainer: Trainer, trained: Trained, round: int) -> DecodedRound:
        """Returns the decoded round that the server receives after requesting it twice."""
        plan = self.subject.plan(round)
        sent = [_ScriptedRound(trainer, plan, trained).run(self.subject.initial).data for _ in range(2)]
        seen = [self._decoded(trainer, data) for data in dict.fromkeys(sent)]
        return DecodedRound(np.mean([each.vector for each in seen], axis=0), seen[0].header)

    def _decoded(self, trainer: Trainer, data: bytes) -> DecodedRound:
        layout, shared = self.subject.spec.model.layout, ~self.context.mask
        counts = [int(shared[span.start : span.stop].sum()) for span in layout.layers]
        decoded = decode_update(data, public_key=trainer.store.identity.public_key, counts=counts)
        values = np.zeros(layout.size)
        values[shared] = decoded.values
        return DecodedRound(np.concatenate((values, decoded.header.report)), _about_noise(decoded.header))

    def _without_noise(self, update: np.ndarray) -> np.ndarray:
        release = self.subject.method.release(self.context, update, _Silence())
        return np.concatenate((release.values.astype(np.float64), release.report))


def _round_of_a_member(subject: Subject, rng: np.random.Generator) -> RoundContext:
    """Returns the round of a device that has taken part before: its personal part and its clip norms have changed.

    It has no own model, so its training starts with the global one, and the sent values are the update.
    """
    method, initial = subject.method, subject.initial
    state, data = method.init_state(), WorstData(subject.classes, rng)
    for round in range(1, _EARLIER_ROUNDS + 1):
        update = canary_update(method.layout, subject.spec.privacy.clip_norm, rng) * np.float32(round)
        context = _ended(subject, state, data)
        release = method.release(context, update, SeededNoise(subject.seed, 0, round))
        state = method.advance(context, update=update, trained=initial, sent=release.values)
        state = replace(state, own=None)
    return _ended(subject, state, data)


def _ended(subject: Subject, state: DeviceState, data: WorstData) -> RoundContext:
    """Returns the context after a training that has changed nothing."""
    initial = subject.initial
    return LocalRound(subject.method, state, initial, subject.terms, data).ended(initial, initial, 0.0, {}).context


class _ScriptedRound(DeviceRound):
    """A round whose local training returns a result set by the audit."""

    def __init__(self, trainer: Trainer, plan: RoundPlan, ends_with: Trained) -> None:
        super().__init__(trainer, plan)
        self.ends_with = ends_with

    def train(self, *arguments: Any, **more: Any) -> Trained:
        _ = self.charge  # raises if the device declines the round
        return self.ends_with


class _Silence(NoiseSource):
    """A noise source that adds no noise."""

    def normal(self, size: int) -> np.ndarray:
        return np.zeros(size)

    def words(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint64)


def _about_noise(header: UpdateHeader) -> tuple[float, ...]:
    return (*header.steps, *header.noise_stds, *header.clip_norms, header.multiplier_server, float(header.noise_split))
