"""Runs the runtime `vmap`: a cohort's local training as arrays in this process, on the accelerator if there is one.

Where `released_together` allows it, the updates are released and added there as well, and the host makes only a row of
numbers for each device. Other rounds are finished in the workers, while the next group is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from hushfleet.aggregator.payloads.exact_sum import SCALE_BITS, ExactSum
from hushfleet.array_api import Array
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.learning.draws import Inputs
from hushfleet.methods.local_round import LocalRound
from hushfleet.methods.privatize import Bounds
from hushfleet.methods.stages import ScaleWhole
from hushfleet.methods.state import RoundContext
from hushfleet.models import get_model
from hushfleet.models.cuda import computing_device
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import NoiseSource, SeededNoise
from hushfleet.simulator.engines.fast.alike import released_alike, train
from hushfleet.simulator.engines.fast.chunks import (
    REFUSALS,
    ChunkAnswer,
    Client,
    ClientChunk,
    ClientRow,
    declined,
    divided,
    shipped,
    trainer_for,
)
from hushfleet.simulator.engines.fast.coded_size import coded_bytes, sample_places, sample_stride
from hushfleet.simulator.engines.fast.device import CohortDevice, NotKept
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.partial_sum import LIKE
from hushfleet.simulator.engines.fast.vmap.release import ReleasedCohort, ReleaseTerms, release
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member, TrainedGroup
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.wire.format.codecs import steps_for
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader, dither_key_of
from hushfleet.wire.format.update_values import EncodedUpdate, LayerMagnitudes, Summed, unsigned

RELEASED_ON = ("cuda",)
"""Where updates are released together. On a processor the compiled release in the workers is faster."""


class _Begun(NamedTuple):
    """A device whose round is allowed.

    :param metrics: what it has measured about itself, after the round.
    """

    client: Client
    round: DeviceRound
    member: Member
    metrics: list[dict[str, object]]


def train_at_once(cohort: ClientChunk, workers: WorkerPool) -> Iterator[ChunkAnswer]:
    """Trains the cohort like `alike.train`; yields the answers of one chunk after the other."""
    before: Iterator[ChunkAnswer] = iter(())
    first = 0
    while first < len(cohort.clients):
        size = _group_size(cohort, cohort.clients[first])
        for result in _train(replace(cohort, clients=cohort.clients[first : first + size])):
            if isinstance(result, ChunkAnswer):
                yield result
            else:
                yield from before
                before = workers.map(train, divided(result, workers.count))
        first += size
    yield from before


@lru_cache(maxsize=2)
def cohort_trainer(files: LoadedRun) -> CohortTrainer:
    """Returns this process's trainer for a run; the clients' images stay on its device from round to round."""
    spec = files.spec.model
    what: Any = {"classes": spec.outputs, "input_shape": spec.input_shape, "vocabulary": spec.form.vocabulary}
    model, device = get_model(files.network, **what), computing_device()
    return CohortTrainer(TorchGradient(model, device=device, objective=files.objective), device)


def released_together(cohort: ClientChunk) -> bool:
    """Returns whether the updates of a round are released as arrays of PyTorch, which does not scale updates."""
    return released_alike(cohort) and not any(isinstance(each, ScaleWhole) for each in cohort.run.method.parts.stages)


def _group_size(cohort: ClientChunk, client: Client) -> int:
    run = cohort.run
    spec, method = run.spec, run.method
    member = Member(method.init_state(), run.train(client.device), np.random.default_rng(0))
    return cohort_trainer(run).clients_at_once(method, [member], inputs=Inputs(spec.model.dropout, spec.augment))


def begun(group: ClientChunk) -> tuple[list[_Begun], list[ClientRow]]:
    """Begins the rounds of the devices; returns those that take part, and the rows of those that decline."""
    taking_part: list[_Begun] = []
    refused: list[ClientRow] = []
    for client in group.clients:
        metrics: list[dict[str, object]] = []
        own = trainer_for(group, client, None, keep=metrics.append)
        round = DeviceRound(own, group.plan)
        try:
            _ = round.charge
        except REFUSALS as error:
            refused.append(declined(client, error))
            continue
        rng, noise = own.randomness.order(group.plan.round), own.randomness.noise(group.plan.round)
        number = group.run.spec.training_number(group.plan.round)
        member = Member(round.state(), own.samples(), rng, round.terms, noise, number)
        taking_part.append(_Begun(client, round, member, metrics))
    return taking_part, refused


def _train(group: ClientChunk) -> Iterator[ChunkAnswer | ClientChunk]:
    """Yields the answers of devices, or a chunk with the training of devices whose round is to be finished."""
    run, done = group.run, set[int]()
    clients, refused = begun(group)
    if refused:
        yield ChunkAnswer(refused, None)
    members, inputs = [each.member for each in clients], Inputs(run.spec.model.dropout, run.spec.augment)
    trainer = cohort_trainer(run)
    together = trainer.device.type in RELEASED_ON and released_together(group)
    try:
        for places, trained in trainer.groups(run.method, members, run.global_params(group.plan), inputs=inputs):
            some = [clients[place] for place in places]
            if together:
                yield from _released(group, some, trained)
            else:
                yield replace(
                    group, clients=[each.client for each in some], trained=list(map(shipped, trained.fetched()))
                )
            done.update(places)
    except REFUSALS as error:
        if len(clients) == 1:
            yield ChunkAnswer([declined(clients[0].client, error)], None)
            return
        # Each device alone, so that only devices that must decline do so.
        for place, each in enumerate(clients):
            if place not in done:
                yield from _train(replace(group, clients=[each.client]))


def _released(cohort: ClientChunk, group: Sequence[_Begun], trained: TrainedGroup) -> Iterator[ChunkAnswer]:
    """Releases a group's updates together; yields their rows and their sum."""
    layout, context = cohort.run.spec.model.layout, trained.context
    mask = np.asarray(trained.rounds[0].context.mask)
    personal, shared = (context.mask[0], ~mask) if mask.any() else (None, None)
    counts = [
        span.size if shared is None else int(np.count_nonzero(shared[span.start : span.stop])) for span in layout.layers
    ]
    devices = [_Device(cohort, each, local) for each, local in zip(group, trained.rounds, strict=True)]
    found = release(
        trained.end,
        context.start,
        [device.terms() for device in devices],
        layout,
        personal=personal,
        sampled=torch.from_numpy(sample_places(counts, sample_stride(sum(counts)))).to(trained.end.device),
    )
    left = np.flatnonzero(found.refused).tolist()
    total = ExactSum(layout.size)
    added = found.total.cpu().numpy()
    if shared is not None:
        added, sent = np.zeros(layout.size, np.int64), added
        added[shared] = sent
    bound = int(found.peaks[~found.refused].max(1, initial=0).sum() * 2.0**SCALE_BITS) + len(group)
    total.add_total(added, len(group) - len(left), shared, bound=bound)
    yield ChunkAnswer(rows_of(devices, trained, found), total)
    if left:
        clients = [group[row].client for row in left]
        yield train(replace(cohort, clients=clients, trained=list(map(shipped, trained.fetched(left)))))


def rows_of(devices: Sequence[_Device], trained: TrainedGroup, found: ReleasedCohort) -> list[ClientRow]:
    """Commits the rounds of the devices whose updates were added; returns their rows."""
    rows: list[ClientRow] = []
    sizes: dict[object, int] = {}
    for place, device in enumerate(devices):
        if place % LIKE == 0:
            sizes.clear()
        if not found.refused[place]:
            rows.append(device.answer(trained, place, found, sizes))
    return rows


class _Device:
    """A device whose update is released with others: its code for one update is run with zeros in place of the values.

    :param local: its round, for the context.
    """

    def __init__(self, cohort: ClientChunk, begun: _Begun, local: LocalRound) -> None:
        self._cohort, self._begun, self._local = cohort, begun, local
        self._zeros = _zeros(cohort.run.spec.model.layout.size)
        trainer = begun.round.trainer
        trainer.release, trainer.encode = self._release, self._encode

    def terms(self) -> ReleaseTerms:
        """Returns what the device's own code would release its update with."""
        run, plan = self._cohort.run, self._cohort.plan
        noise = self._begun.round.trainer.randomness.noise(plan.round)
        assert isinstance(noise, SeededNoise)
        run.method.privatize(self._local.context, self._zeros, noise, self._release)
        steps = steps_for(run.spec.wire, noise_stds=self._stds.tolist(), layer_rms=())
        key = dither_key_of(plan.task, plan.round, self._begun.client.device)
        return ReleaseTerms(self._bounds, self._stds, np.array(steps, np.float32) if steps else None, key, noise)

    def answer(self, trained: TrainedGroup, row: int, found: ReleasedCohort, sizes: dict[object, int]) -> ClientRow:
        """Commits the round of the device, whose update is released; returns its row.

        :param sizes: of the values on the wire, for devices before it with the same noise and steps.
        """
        begun, run = self._begun, self._cohort.run
        store = begun.round.trainer.store
        assert isinstance(store, CohortDevice)
        tested = self._cohort.evaluate and not run.spec.model.chooses_head
        own: Any = trained.own[row].cpu().numpy() if tested or store.keeps_own else NotKept()
        remembered = {name: array[row].cpu().numpy() for name, array in trained.remembered.items()}
        loss = float(trained.host_losses[row])
        update = begun.round.commit(self._local.ended(self._zeros, own, loss, remembered, self._zeros))
        header, measured = (
            self._header,
            LayerMagnitudes(tuple(found.peaks[row].tolist()), tuple(found.squares[row].tolist())),
        )
        kind = header.noise_stds, header.steps
        if kind not in sizes:
            sizes[kind] = coded_bytes(header.codec, found.levels[row], header.value_count)
        summed = Summed(header, measured, len(update.data) + sizes[kind])
        metrics = begun.metrics[-1] if begun.metrics else None
        return ClientRow(begun.client.device, None, update.data, summed, store.row, metrics)

    def _release(
        self,
        context: RoundContext,
        values: Array,
        bounds: Bounds | None,
        stds: Array,
        mechanism: GaussianMechanism,
        noise: NoiseSource,
    ) -> Array:
        """Notes the terms, in place of `clip_and_noise`."""
        assert bounds is not None
        self._bounds, self._stds = bounds.norms, stds
        return values

    def _encode(
        self, header: UpdateHeader, values: np.ndarray, *, counts: Sequence[int], identity: Identity | None
    ) -> EncodedUpdate:
        self._header = header
        return EncodedUpdate(unsigned(header, b""), values)


@lru_cache(maxsize=1)
def _zeros(size: int) -> np.ndarray:
    zeros = np.zeros(size, np.float32)
    zeros.setflags(write=False)
    return zeros
