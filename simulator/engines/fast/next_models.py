"""Tests the model with which each device's next round starts: its own part in the new global model.

FedRep's code tests all clients this way after each aggregation, and so do the papers that use its settings. In
contrast, a device's own metrics measure its model after training, before aggregation, and only in the round's cohort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from hushfleet.learning.evaluation import accuracies_on_parts, evaluate
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local_round import LocalRound
from hushfleet.simulator.engines.fast.after_round import AfterRound, in_groups
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import Simulation


def next_models_accuracy(simulation: Simulation, workers: WorkerPool, round: int, *, runtime: str) -> float:
    """Returns the mean accuracy over all devices, trained or not, on test images with the device's own label mix.

    :param round: the last closed round; no device has trained since.
    """
    path = simulation.folder.path.absolute()
    jobs = [AfterRound(path, runtime, device.name, round) for device in simulation.fleet.devices]
    return math.fsum(chain.from_iterable(workers.map(_test, in_groups(jobs, workers)))) / len(jobs)


def _test(jobs: Sequence[AfterRound]) -> list[float]:
    """Returns each device's accuracy, by one of two ways with the same result."""
    run = jobs[0].run
    models: Iterator[np.ndarray] = map(begin_of, jobs)  # one at a time, because the network may be large
    parts = [part for job in jobs if (part := run.local_indices(job.device)) is not None]
    at_once = getattr(run.gradient, "logits_of_models", None)
    if at_once is not None and len(parts) == len(jobs):
        compact = list(models)  # compiled networks are small
        if run.spec.model.layout.layers_alike(compact):
            return accuracies_on_parts(at_once, compact, run.common_test, parts)
        models = iter(compact)
    tests = zip(models, jobs, strict=True)
    return [evaluate(run.inference, params, run.local_test(job.device)).accuracy for params, job in tests]


def begin_of(job: AfterRound) -> np.ndarray:
    """Returns the model with which the device's next round starts, float32 `[d]`."""
    run, params = job.run, job.global_params()
    method, spec = run.method, run.spec
    state = method.init_state()
    if run.folder.has_store(job.device):
        with store_of(run.folder, job.device) as store:
            state = store.load_state(spec.task) or state
    if method.parts.own_training is not None:  # the personalized model is a second one, which is not aggregated
        return params if state.own is None else state.own
    samples = LoadedSamples(run.train(job.device), run.gradient, run.inference)
    start: np.ndarray = LocalRound(method, state, params, RoundTerms(), samples).context.start
    return start
