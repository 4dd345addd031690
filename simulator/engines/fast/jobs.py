"""Runs one device's part of a round in a worker: the same `Trainer` as on a board, on its files in the run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.declines import Declined, DeclineReason, decline_reason
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.worker.metrics import MetricsFile
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import PrivacyError
from hushfleet.methods.local_round import Trained
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.simulator.engines.fast.device_file import DeviceFile, NotKept
from hushfleet.simulator.engines.fast.loaded_run import DeviceJob, LoadedRun
from hushfleet.simulator.engines.fast.runtimes import VMAP, make_noise, make_optimizer
from hushfleet.simulator.engines.fast.sums import key_of
from hushfleet.simulator.engines.fast.uncoded import UncodedUpdates
from hushfleet.simulator.run_folder import MOST_SHOWN
from hushfleet.wire.format.messages import RoundPlan


@dataclass(frozen=True)
class Job(DeviceJob):
    """A device's part of a round.

    :param evaluate: whether the device's personalized model is tested after training.
    :param epsilon_limit: largest epsilon that the device allows against the server, at the task's delta.
    :param preference: factor on the standard noise that the device adds, if the method allows it.
    :param place: number of the device in its cohort, starting at 0.
    """

    index: int
    seed: int
    plan: RoundPlan
    evaluate: bool
    epsilon_limit: float = math.inf
    preference: float = 1.0
    place: int = 0


@dataclass(frozen=True)
class TrainedJob:
    """A job for a device that was trained elsewhere."""

    job: Job
    trained: Trained


class JobAnswer(NamedTuple):
    """The answer of a device.

    :param update: empty if the device declines the round.
    :param refusal: why the device declines.
    """

    device: str
    public_key: bytes
    update: bytes
    refusal: DeclineReason | None = None


OWN_MODELS_BYTES = 1 << 26
"""Disk space for personalized models that no round reads again; the first `MOST_SHOWN` devices always keep theirs."""

# The errors with which a device may decline a round. Any other error is a bug of this program, and ends the run.
REFUSALS = (PrivacyError, Declined)


def train(job: Job) -> JobAnswer:
    """Trains and commits; a round that the device has already committed receives the same answer as the first time."""
    plan = job.plan
    return _answer(
        job, lambda trainer, run: DeviceRound(trainer, plan, run.membership_list(plan)).run(run.global_params(plan))
    )


def commit(done: TrainedJob) -> JobAnswer:
    """Does the rest of a round after training: clip, noise, encode, store."""
    plan = done.job.plan
    return _answer(
        done.job, lambda trainer, run: DeviceRound(trainer, plan, run.membership_list(plan)).commit(done.trained)
    )


def _answer(job: Job, work: Callable[[Trainer, LoadedRun], OutboxEntry]) -> JobAnswer:
    run = job.run
    with device_of(job, run) as trainer:
        try:
            update = work(trainer, run).data
        except REFUSALS as error:
            return declined(job, trainer, error)
        return JobAnswer(job.device, trainer.store.identity.public_key, update)


def declined(job: Job, trainer: Trainer, error: Exception) -> JobAnswer:
    """Returns the decline with the error's own text, which a board in the field does not send."""
    refusal = DeclineReason(decline_reason(error).code, str(error))
    return JobAnswer(job.device, trainer.store.identity.public_key, b"", refusal)


def store_for(job: Job, run: LoadedRun) -> DeviceFile:
    """Opens the device's file. It keeps the personalized model if a round reads it, and for the first devices."""
    reads = run.method.parts.reads_own or run.runtime == VMAP  # `vmap` uploads the whole states
    first = max(MOST_SHOWN, OWN_MODELS_BYTES // (4 * run.spec.model.layout.size))
    path, identity = run.folder.device(job.device).state, key_of(job.seed, job.index)
    return DeviceFile(path, device=job.device, identity=identity, keeps_own=reads or job.index < first)


@contextmanager
def device_of(job: Job, run: LoadedRun) -> Iterator[Trainer]:
    """Opens the device's store, and yields the device's trainer."""
    privacy = run.spec.privacy
    with store_for(job, run) as store:
        yield trainer_of(
            run,
            job.device,
            SeededRandomness(job.seed, job.index, make_noise),
            evaluate=job.evaluate,
            store=store,
            limits=LimitsSection.of_simulation(
                privacy, epsilon_server=job.epsilon_limit, noise_preference=job.preference
            ),
            make_secure_round=run.secure_round,
            encode=UncodedUpdates(run.folder.updates, job.place).encode,
        )


def trainer_of(
    run: LoadedRun, device: str, randomness: SeededRandomness, *, evaluate: bool, **of_trainer: Any
) -> Trainer:
    """Returns the trainer of a device, on its samples in the run folder.

    :param evaluate: whether its personalized model is tested after training.
    :param of_trainer: the other arguments of `Trainer`, such as store and limits.
    """
    folder, began = run.folder.device(device), time.monotonic()
    common, local = (run.folder.common_test, folder.local_test) if evaluate else (None, None)
    metrics = MetricsFile(folder.metrics, common, local, run.features)

    def observe(round: DeviceRound, trained: Trained, noised: NoisedUpdate) -> None:
        # If training has diverged, the personalized model is still the former one. If that was not kept, it is not
        # tested.
        file = replace(metrics, common_test=None, local_test=None) if isinstance(trained.own, NotKept) else metrics
        file.write(round, trained, noised, train_s=time.monotonic() - began)

    return Trainer(
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
