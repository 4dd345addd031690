"""The game for a device: does this update, or answer, contain the device's data, or nothing?

In one world local training ends with the canary update, in the other with no change at all (add or remove, as in the
ledger). In a round that asks, the device answers with the longest answer, or with an empty one. The adversary is the
server: it decodes each update as the aggregator does and has its header and report.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.methods.local_round import LocalRound, Trained
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.privacy.noise import NoiseSource, SeededNoise
from hushfleet.simulator.studies.audit.canary import WorstData, canary_update
from hushfleet.simulator.studies.audit.game import Canary, Seen, TwoWorlds
from hushfleet.simulator.studies.audit.subject import Subject
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import decode_update

SERVER = "server: update, header, report"
VALUES = "server: noised values alone"
_EARLIER_ROUNDS = 2


@dataclass(frozen=True, eq=False)
class CanaryUpdate(Canary):
    """:param start: where training starts; `update` is where it ends with the canary, relative to that.
    :param nothing: the report that is sent with an empty update, without noise; 0 for the values.
    """

    context: RoundContext
    start: np.ndarray
    update: np.ndarray
    nothing: np.ndarray


class UpdateGame(TwoWorlds[CanaryUpdate]):
    """The game; `VALUES` sees the noised values only, as a paper counts them."""

    def __init__(self, subject: Subject, rounds: Sequence[int]) -> None:
        self._spec, self._method = subject.rules(rounds[0])
        self._layout = self._spec.model.layout
        super().__init__(subject, rounds, {SERVER: None, VALUES: self._layout.size})

    def device(self, life: int, *, inside: bool) -> AbstractContextManager[Trainer]:
        return self.subject.device(life)

    def make_canary(self, round: int) -> CanaryUpdate:
        subject, size = self.subject, self._layout.size
        rng, start = np.random.default_rng(subject.seed), subject.initial
        if subject.spec.asks(round):
            start = np.zeros(size, np.float32)
            setting = self._method.setting(subject.terms(round))
            context = RoundContext(setting, self._method.init_state(), start, start)
        else:
            context = _round_of_a_member(subject, round, rng)
        update = canary_update(self._layout, self._spec.privacy.clip_norm, rng)

        def without_noise(update: np.ndarray) -> np.ndarray:
            noised = self._method.privatize(context, update, _Silence())
            return np.concatenate((noised.values.astype(np.float64), noised.report))

        expected, nothing = without_noise(update), without_noise(update * 0)
        nothing[:size] = 0
        terms = self.noise_and_weight(round, expected[:size])
        return CanaryUpdate(expected, *terms, context, start, update, nothing)

    def see(self, trainer: Trainer, round: int, *, inside: bool) -> Seen:
        canary, plan = self.canary(round), self.subject.plan(round)
        ends_with = Trained(canary.context, canary.start + canary.update * np.float32(inside), canary.start, 0.0)
        sent = [_ScriptedRound(trainer, plan, ends_with).run(self.subject.initial).data for _ in range(2)]
        shared = ~canary.context.mask
        counts = [int(shared[span.start : span.stop].sum()) for span in self._layout.layers]
        vectors, headers = [], []
        for data in dict.fromkeys(sent):
            decoded = decode_update(data, public_key=trainer.store.identity.public_key, counts=counts)
            values, header = np.zeros(self._layout.size), decoded.header
            values[shared] = decoded.values
            vectors.append(np.concatenate((values, header.report)))
            noise = (header.multiplier_server, float(header.noise_split))
            headers.append((*header.steps, *header.noise_stds, *header.clip_norms, *noise))
        seen = np.mean(vectors, axis=0)
        return Seen(round, seen if inside else seen - canary.nothing, headers[0])


def _round_of_a_member(subject: Subject, round: int, rng: np.random.Generator) -> RoundContext:
    """Returns the round of a device that has taken part before: its personal part and its clip norms have changed.

    It has no own model, so its training starts with the global one, and the sent values are the update.
    """
    method, initial = subject.method, subject.initial
    state, data = method.init_state(), WorstData(subject.classes, rng)

    def ended(state: DeviceState) -> RoundContext:
        """Returns the context after a training that has changed nothing."""
        begun = LocalRound(method, state, initial, subject.terms(round), data)
        return begun.ended(initial, initial, 0.0, {}).context

    for earlier in range(1, _EARLIER_ROUNDS + 1):
        update = canary_update(method.layout, subject.spec.privacy.clip_norm, rng) * np.float32(earlier)
        context = ended(state)
        noised = method.privatize(context, update, SeededNoise(subject.seed, 0, earlier))
        state = replace(method.advance(context, update=update, trained=initial, sent=noised.values), own=None)
    return ended(state)


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
