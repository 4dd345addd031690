"""Trains the baseline: each device trains the same network alone; for a linear model, the best of several ways counts.

Each device starts from the run's first global model and trains as many epochs as it would over all rounds, with the
same optimizer, without noise and without other devices. This is the model that it would have without a federation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.learning.draws import Inputs
from hushfleet.learning.evaluation import evaluate
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import Sgd
from hushfleet.methods.local_round import LocalRound
from hushfleet.methods.method import Method
from hushfleet.methods.task_method import bind
from hushfleet.progress import counted
from hushfleet.simulator.engines.fast.after_round import in_groups
from hushfleet.simulator.engines.fast.examples import answers, choose_examples
from hushfleet.simulator.engines.fast.loaded_run import DeviceJob, LoadedRun
from hushfleet.simulator.engines.fast.local_only_on_features import (
    AccuracyByWay,
    Predictions,
    accuracies,
    best_way,
    predict_local_only,
)
from hushfleet.simulator.engines.fast.runtimes import make_optimizer
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import Simulation

ALONE = "each device alone, for comparison"


class DeviceLocalOnly(NamedTuple):
    """One device after training alone: accuracies in 0..1 on the common and on its own test images.

    :param way: how it was trained, if it is not the same network; the same for all devices.
    :param said: the classes that it predicts for the images of `choose_examples`.
    """

    device: str
    accuracy_common: float
    accuracy_local: float
    way: str = ""
    said: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Job(DeviceJob):
    index: int
    seed: int
    initial: np.ndarray


def train_local_only(
    simulation: Simulation, workers: WorkerPool, *, runtime: str = "onnx"
) -> Iterator[DeviceLocalOnly]:
    """Trains each tested device alone; yields them in the fleet's order as they become ready."""
    path, initial = simulation.folder.path.absolute(), simulation.prepared.initial
    jobs = [_Job(path, runtime, d.name, d.index, simulation.seed, initial) for d in simulation.tested]
    if simulation.prepared.spec.model.chooses_head:
        tested = chain.from_iterable(workers.map(_test_group, in_groups(jobs, workers)))
        found = list(counted(tested, ALONE, total=len(jobs)))
        return _best_local_only(found, [job.device for job in jobs])
    return counted(workers.map(_train_one, jobs), ALONE, total=len(jobs))


def _best_local_only(
    found: list[tuple[AccuracyByWay, AccuracyByWay, Predictions]], devices: list[str]
) -> Iterator[DeviceLocalOnly]:
    common, local, said = zip(*found, strict=True)
    best, best_local = best_way(common), best_way(local)
    way = best if best == best_local else f"{best}; {best_local} on own data"
    rows = zip(devices, common, local, said, strict=True)
    return (DeviceLocalOnly(n, c[best], o[best_local], way, tuple(s[best].tolist())) for n, c, o, s in rows)


def _test_group(jobs: Sequence[_Job]) -> list[tuple[AccuracyByWay, AccuracyByWay, Predictions]]:
    """Returns for each device the accuracies on the common test and on the device's own test, and the predictions for
    the examples."""
    run, seed = jobs[0].run, jobs[0].seed
    labels, shown = run.common_test.labels, choose_examples(run.common_test, seed=seed)
    classes, trains = len(run.spec.model.class_names), [run.train(job.device) for job in jobs]
    found = []
    for job, train, said in zip(
        jobs, trains, predict_local_only(trains, run.common_test, classes=classes), strict=True
    ):
        if (part := run.local_indices(job.device)) is not None:
            local = accuracies(_taken(said, part), labels[part])
        else:
            test = run.local_test(job.device)
            (on_own,) = predict_local_only([train], test, classes=classes)
            local = accuracies(on_own, test.labels)
        found.append((accuracies(said, labels), local, _taken(said, shown)))
    return found


def _taken(said: Predictions, indices: np.ndarray) -> Predictions:
    return {way: each[indices] if len(each) else each for way, each in said.items()}


def _train_one(job: _Job) -> DeviceLocalOnly:
    run, inference = job.run, job.run.own_inference(job.device)
    params = trained_local_only(run, job.device, job.initial, SeededRandomness(job.seed, job.index))
    shown = run.common_test.take(choose_examples(run.common_test, seed=job.seed))
    return DeviceLocalOnly(
        job.device,
        evaluate(inference, params, run.common_test).accuracy,
        evaluate(inference, params, run.local_test(job.device)).accuracy,
        said=tuple(answers(inference, params, shown).tolist()) if run.spec.model.targets.are_classes else (),
    )


def trained_local_only(run: LoadedRun, device: str, initial: np.ndarray, randomness: SeededRandomness) -> np.ndarray:
    """Returns the model of a device after as many epochs as in all rounds, without noise, float32 `[d]`."""
    spec, layout = run.spec, run.spec.model.layout
    unbounded: dict[str, Any] = {"clip_norm": math.inf, "noise_multiplier": 0.0}
    plain = replace(spec.privacy, unit="device", accounting="strict", secure=None, noise_split=1, **unbounded)
    # Adds nothing to the loss; a gradient that could distil has no teacher, so it is the cross-entropy's gradient.
    training = Sgd(centred=run.method.training.centred)
    alone = bind(Method(training=training), run.method.config, plain, layout, rounds=spec.rounds)
    state, params, inputs = alone.init_state(), initial, Inputs(spec.model.dropout, spec.augment)
    samples = LoadedSamples(run.train(device), run.gradient, run.inference)
    for round in range(1, spec.rounds + 1):
        begun = LocalRound(alone, state, params, RoundTerms(), samples, round)
        params = begun.train(inputs=inputs, rng=randomness.order(round), make_optimizer=make_optimizer).end
    return run.method.server.final({}, params)
