"""What each device's next round begins with, tested in a simulation: the part that is its own, in the new global model.

FedRep's code tests all clients so, after each aggregation, and so do the papers that take their settings from it. A
device's own metrics are of its model after training instead, before aggregation, and of the round's cohort alone.
"""

from __future__ import annotations

import math

from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.methods.state import RoundTerms
from hushfleet.model.evaluation import evaluate
from hushfleet.simulator.engines.fast.after_round import AfterRound
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import Simulation
from hushfleet.training.own_samples import LoadedSamples


def next_models_accuracy(simulation: Simulation, workers: WorkerPool, round: int, *, runtime: str) -> float:
    """The mean over all devices, trained or not, of the accuracy on test images with the device's own mix of labels.

    :param round: the last one that is closed; no device has trained since.
    """
    path = simulation.folder.path.absolute()
    jobs = [AfterRound(path, runtime, device.name, round) for device in simulation.fleet.devices]
    return math.fsum(workers.map(_test_one, jobs)) / len(jobs)


def _test_one(job: AfterRound) -> float:
    run, params = job.run, job.global_params()
    method, spec, store = run.method, run.spec, run.folder.device(job.device).store
    state = method.init_state()
    if store.exists():
        with DeviceStore(store, device=job.device, durable=False) as opened:
            state = opened.load_state(spec.task) or state
    if method.parts.own_training is not None:  # the own model is a second one, which is not aggregated
        begin = params if state.own is None else state.own
    else:
        samples = LoadedSamples(run.train(job.device), run.gradient, run.inference)
        begin = method.begin(state, params, RoundTerms(), samples).start
    return evaluate(run.inference, begin, run.local_test(job.device)).accuracy
