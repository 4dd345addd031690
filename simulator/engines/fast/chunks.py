"""Trains a chunk of a round's devices in a worker: the same `Trainer` as on a board, for one device after the other.

A worker returns one row for each device, and one exact sum of the chunk's updates. Where the aggregator needs single
updates (robust aggregates, questions), a row has the whole encoded update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.edge_client.storage.declines import Declined, DeclineReason, decline_reason
from hushfleet.edge_client.worker.metrics import own_metrics
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import PrivacyError
from hushfleet.methods.local_round import Trained
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.methods.server import ServerArrays
from hushfleet.simulator.cohort_store import Carried, StateRow
from hushfleet.simulator.engines.fast.compiled_release import CompiledRelease
from hushfleet.simulator.engines.fast.device import CohortDevice, NotKept
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun, loaded_run
from hushfleet.simulator.engines.fast.partial_sum import LIKE, PartialSum
from hushfleet.simulator.engines.fast.runtimes import make_noise, make_optimizer
from hushfleet.simulator.engines.fast.sums import SummedRound, key_of, nobody
from hushfleet.simulator.run_folder import MOST_SHOWN
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import dither_key_of
from hushfleet.wire.format.update_values import Summed

# The errors with which a device may decline a round. Any other error is a bug of this program, and ends the run.
REFUSALS = (PrivacyError, Declined)

KeepMetrics = Callable[[dict[str, object]], None]


@dataclass(frozen=True)
class Client:
    """A device of a round.

    :param epsilon_limit: largest epsilon that the device allows against the server, at the task's delta.
    :param preference: factor on the standard noise that the device adds, if the method allows it.
    :param carried: what it has kept from its earlier rounds.
    """

    device: str
    index: int
    epsilon_limit: float = math.inf
    preference: float = 1.0
    carried: Carried | None = None


@dataclass(frozen=True)
class ClientChunk:
    """Devices of a round that one worker trains, one after the other.

    :param evaluate: whether the devices' personalized models are tested after training.
    :param summed: whether the updates are added up where they are trained.
    :param server: the state of the method's server half, if it weighs updates.
    :param trained: results of the local training, if it was done elsewhere, as `shipped` makes them.
    :param like: as for `PartialSum`.
    """

    path: Path
    runtime: str
    plan: RoundPlan
    seed: int
    clients: Sequence[Client]
    evaluate: bool = True
    summed: bool = True
    server: ServerArrays = field(default_factory=dict)
    trained: Sequence[Trained] = ()
    like: int = LIKE

    @property
    def run(self) -> LoadedRun:
        """The run, loaded once in each process."""
        return loaded_run(self.path, self.runtime)


class ClientRow(NamedTuple):
    """The answer of a device.

    :param refusal: why the device declines; then nothing else is given.
    :param update: the encoded update, without values if they are in the chunk's sum.
    :param summed: what was measured of such values, or is known of masked ones.
    :param state: what the device's store keeps.
    :param metrics: what the device has measured about itself.
    """

    device: str
    refusal: DeclineReason | None = None
    update: bytes = b""
    summed: Summed | None = None
    state: StateRow | None = None
    metrics: dict[str, object] | None = None


class ChunkAnswer(NamedTuple):
    """The answers of a chunk's devices in their order, and the sum of their updates if they are added up there: with
    secure aggregation modulo the prime, uint32."""

    rows: list[ClientRow]
    sum: ExactSum | np.ndarray | None


CHUNKS_PER_WORKER = 3


def divided(chunk: ClientChunk, workers: int) -> list[ClientChunk]:
    """Divides a round among the workers, into some chunks for each, since devices have different numbers of samples."""
    like = chunk.like
    size = like * math.ceil(len(chunk.clients) / (CHUNKS_PER_WORKER * workers * like)) or like
    return [
        replace(chunk, clients=chunk.clients[first : first + size], trained=chunk.trained[first : first + size])
        for first in range(0, len(chunk.clients), size)
    ]


def one_by_one(
    chunk: ClientChunk, first: int, clients: Sequence[Client], published: np.ndarray, total: PartialSum | None
) -> Iterator[ClientRow]:
    """Plays clients one after the other.

    :param first: the first client's number in the chunk.
    :param total: takes the sum of their updates; None: they are encoded and signed.
    """
    for place, client in enumerate(clients, start=first):
        if total is not None:
            total.begin(place)
        yield _answer(chunk, client, total, published, chunk.trained[place] if chunk.trained else None)


def shipped(trained: Trained) -> Trained:
    """Returns a result of training without the vectors that another process has too: they take most of the time on the
    way there."""
    context: Any = trained.context
    start = None if context.start is context.global_params else context.start
    context = replace(context, state=None, global_params=None, start=start, vectors={})
    return trained._replace(context=context, former=None)


def _arrived(trained: Trained, published: np.ndarray, round: DeviceRound) -> Trained:
    """Returns the result of training before it was `shipped`."""
    state, method, context = round.state(), round.method, trained.context
    global_params, vectors = method.split(published)
    start = global_params if context.start is None else context.start
    seen = replace(state, own=None) if method.personalized_model_has_no_noise else state
    context = replace(context, state=seen, global_params=global_params, start=start, vectors=vectors)
    return trained._replace(context=context, former=state.own)


def _answer(
    chunk: ClientChunk, client: Client, total: PartialSum | None, published: np.ndarray, trained: Trained | None
) -> ClientRow:
    run, plan, measured = chunk.run, chunk.plan, list[dict[str, object]]()
    trainer = trainer_for(chunk, client, total, keep=measured.append)
    store = trainer.store
    try:
        round = DeviceRound(trainer, plan, run.membership_list(plan))
        done = round.run(published) if trained is None else round.commit(_arrived(trained, published, round))
    except REFUSALS as error:
        return declined(client, error)
    state = store.row if isinstance(store, CohortDevice) else None
    summed = run.secure.add(done.data) if isinstance(run.secure, SummedRound) else None
    if total is not None and isinstance(store, CohortDevice):
        summed = total.add(store.public, store.changed_state)
    return ClientRow(client.device, None, done.data, summed, state, measured[-1] if measured else None)


def declined(client: Client, error: Exception) -> ClientRow:
    """Returns the decline with the error's own text, which a board in the field does not send."""
    return ClientRow(client.device, DeclineReason(decline_reason(error).code, str(error)))


def device_of(chunk: ClientChunk, client: Client) -> CohortDevice:
    """Returns a device's store."""
    run = chunk.run
    return CohortDevice(
        client.device,
        client.index,
        client.carried,
        run.slots,
        task=run.spec.task,
        package=run.package,
        newcomer=run.method.init_state().public,
        make_identity=nobody if chunk.summed else lambda: key_of(chunk.seed, client.index),
        keeps_own=keeps_own(chunk, client),
    )


def keeps_own(chunk: ClientChunk, client: Client) -> bool:
    """Returns whether a device keeps its personalized model: if a round reads it, and the first devices."""
    return chunk.run.method.parts.reads_own or client.index < MOST_SHOWN


def trainer_for(
    chunk: ClientChunk, client: Client, total: PartialSum | None, *, keep: KeepMetrics = lambda line: None
) -> Trainer:
    """Returns the trainer of a device for one round.

    :param total: adds up the updates; None: they are encoded and signed.
    :param keep: takes the device's metrics.
    """
    run = chunk.run
    how: dict[str, Any] = {}
    if total is not None:
        key = dither_key_of(chunk.plan.task, chunk.plan.round, client.device)
        how["release"] = release = CompiledRelease(run.spec.wire, key)
        how["encode"] = partial(total.encode, release=release)
    return trainer_of(
        run,
        client.device,
        SeededRandomness(chunk.seed, client.index, make_noise),
        evaluate=chunk.evaluate,
        keep=keep,
        store=device_of(chunk, client),
        limits=run.limits(client.epsilon_limit, client.preference),
        make_secure_round=run.secure_round,
        **how,
    )


def trainer_of(
    run: LoadedRun, device: str, randomness: SeededRandomness, *, evaluate: bool, keep: KeepMetrics, **of_trainer: Any
) -> Trainer:
    """Returns the trainer of a device, on its samples in the run folder.

    :param evaluate: whether its personalized model is tested after training.
    :param keep: takes the device's metrics of a round.
    :param of_trainer: the other arguments of `Trainer`, such as store and limits.
    """
    began = time.monotonic()

    def observe(round: DeviceRound, trained: Trained, noised: NoisedUpdate) -> None:
        tested = {}
        # If training has diverged, the own model is still the former one; if that was not kept, it is not tested.
        if evaluate and not isinstance(trained.own, NotKept):
            tested = run.tested(device, trained.own)
        keep(own_metrics(round, trained, noised, tested, train_s=time.monotonic() - began))

    trainer = Trainer(
        device=device,
        spec=run.spec,
        method=run.method,
        gradient=run.gradient,
        logits_of=run.inference,
        samples=lambda: run.train(device),
        held_out=lambda: run.held_out(device),
        randomness=randomness,
        observer=observe,
        make_optimizer=make_optimizer,
        **of_trainer,
    )
    trainer.__dict__["package"] = run.package  # the same for all devices
    return trainer
