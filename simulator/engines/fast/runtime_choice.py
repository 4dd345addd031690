"""Which runtime is the quickest here, for this network and this batch size: a short measured trial decides.

Runtimes round differently, so the choice is written into the run folder and a resumed run keeps it. A short run takes
the devices' own graphs, whose results are the live engine's: the trial would cost more than it gains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hushfleet.methods.state import RoundTerms
from hushfleet.models import get_model
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.jobs import JobFiles
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.runtimes import ON_DEVICES, RUNTIMES, VMAP, make_optimizer, unavailable
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.engines.vmap.jobs import cohort_trainer
from hushfleet.simulator.engines.vmap.training import Member
from hushfleet.simulator.run_folder import RunFolder, Simulation
from hushfleet.training.draws import Inputs, samples_trained
from hushfleet.training.local_round import train_round

WORTH_A_TRIAL_S = 20.0
_TRIAL_S = 0.4  # for each runtime
_TURNS = 4
_BATCHES = 2
_MOST_MEMBERS = 32


@dataclass(frozen=True)
class Trial:
    """What was chosen, and why.

    :param samples_per_s: training throughput of one core, by runtime.
    :param missing: why others were not tried.
    """

    runtime: str
    samples_per_s: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """For people, in one line."""
        if len(self.samples_per_s) < 2:
            return f"gradients by {self.runtime}, the devices' own graphs"
        measured = ", ".join(f"{name} {rate:,.0f}" for name, rate in sorted(self.samples_per_s.items()))
        line = f"gradients by {self.runtime}; samples a second on one core: {measured}"
        return line + "".join(f"; no {name}: {reason}" for name, reason in self.missing.items())


@dataclass(frozen=True)
class _Job:
    path: Path
    device: str
    runtimes: tuple[str, ...]

    @property
    def files(self) -> JobFiles:
        folder = RunFolder(self.path)
        return JobFiles((*folder.task_files, folder.device(self.device).train))


def choose_runtime(simulation: Simulation, workers: WorkerPool) -> Trial:
    """The choice that this run was begun with, or a new one."""
    path = simulation.folder.trial
    if path.exists():
        return Trial(**json.loads(path.read_text()))
    trial = _choose(simulation, workers)
    path.write_text(json.dumps(asdict(trial), indent=1))
    return trial


def _choose(simulation: Simulation, workers: WorkerPool) -> Trial:
    on_devices = _measure(simulation, workers, (ON_DEVICES,))
    expected_s = _samples_in_all(simulation) / on_devices[ON_DEVICES] / workers.count
    if expected_s < WORTH_A_TRIAL_S:
        return Trial(ON_DEVICES, on_devices)
    missing = {name: reason for name in RUNTIMES if (reason := unavailable(name, simulation.prepared.spec.model.name))}
    one_by_one = tuple(name for name in RUNTIMES if name not in missing and name != VMAP)
    rates = _measure(simulation, workers, one_by_one)
    rates[VMAP] = _rate_of_vmap(simulation) / workers.count
    return Trial(max(rates, key=rates.__getitem__), rates, missing)


def _samples_in_all(simulation: Simulation) -> float:
    devices, rules = simulation.fleet.devices, simulation.task.round
    cohort_share = min(rules.cohort_size or len(devices), len(devices)) / len(devices)
    config = simulation.prepared.method.config
    return rules.rounds * cohort_share * sum(samples_trained(len(device.train), config) for device in devices)


def _measure(simulation: Simulation, workers: WorkerPool, runtimes: tuple[str, ...]) -> dict[str, float]:
    largest = max(simulation.fleet.devices, key=lambda device: len(device.train))
    (rates,) = workers.map(_measure_here, [_Job(simulation.folder.path, largest.name, runtimes)])
    return rates


def _rate_of_vmap(simulation: Simulation) -> float:
    """Of the whole machine, samples a second: it has one process, and all cores or the accelerator to itself."""
    run = LoadedRun(simulation.folder.path, VMAP)
    spec, method = run.spec, simulation.prepared.method
    cohort = simulation.fleet.devices[: min(simulation.task.round.cohort_size or _MOST_MEMBERS, _MOST_MEMBERS)]
    few = [run.train(d.name).take(slice(0, _BATCHES * method.config.batch_size)) for d in cohort]
    trainer, start = cohort_trainer(simulation.folder.path), simulation.prepared.initial

    def train() -> int:
        members = [Member(method.init_state(), samples, np.random.default_rng(0)) for samples in few]
        trainer.train(method, members, start, inputs=Inputs(spec.model.dropout, spec.augment))
        return sum(samples_trained(len(each), method.config) for each in few)

    return _rates({VMAP: train})[VMAP]


def _measure_here(job: _Job) -> dict[str, float]:
    return _rates({runtime: _step(LoadedRun(job.path, runtime), job.device) for runtime in job.runtimes})


def _rates(steps: Mapping[str, Callable[[], int]]) -> dict[str, float]:
    """Samples a second of each. In turns, so that whatever else the machine does hits all; the best turn counts."""
    for step in steps.values():
        step()  # loads, compiles, touches its memory
    rates = dict.fromkeys(steps, 0.0)
    for _ in range(_TURNS):
        for runtime, step in steps.items():
            done, began = 0, time.perf_counter()
            while time.perf_counter() - began < _TRIAL_S / _TURNS:
                done += step()
            rates[runtime] = max(rates[runtime], done / (time.perf_counter() - began))
    return rates


def _step(run: LoadedRun, device: str) -> Callable[[], int]:
    """Local training on the first batches of a device; gives how many samples it took."""
    spec, samples, method = run.spec, run.train(device), run.method
    few = samples.take(slice(0, _BATCHES * method.config.batch_size))
    state, start = method.init_state(), get_model(spec.model.name, classes=len(spec.model.class_names)).init(0)

    def step() -> int:
        train_round(
            method,
            state,
            start,
            run.gradient,
            few,
            terms=RoundTerms(),
            logits_of=run.inference,
            inputs=Inputs(spec.model.dropout, spec.augment),
            rng=np.random.default_rng(0),
            noise=SeededNoise(0, 0, 0),
            make_optimizer=make_optimizer,
        )
        return samples_trained(len(few), method.config)

    return step
