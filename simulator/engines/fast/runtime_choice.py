"""Which runtime is the quickest here, for this network and this batch size: a short measured trial decides.

Runtimes round differently, so the choice is written into the run folder and a resumed run keeps it. A short run takes
the devices' own graphs, whose results are the live engine's: the trial would cost more than it gains.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hushfleet.methods.state import RoundTerms
from hushfleet.models import get_model
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.job_files import JobFiles
from hushfleet.simulator.engines.fast.runtimes import AT_ONCE, ON_DEVICES, RUNTIMES, make_optimizer, unavailable
from hushfleet.simulator.engines.fast.worker_context import Bench
from hushfleet.simulator.engines.fast.workers import Crew
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
    """:param samples_per_s: training throughput of one core, by runtime; :param missing: why others were not tried."""

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


def choose_runtime(simulation: Simulation, workers: Crew) -> Trial:
    """The choice that this run was begun with, or a new one."""
    path = simulation.folder.trial
    if path.exists():
        return Trial(**json.loads(path.read_text()))
    trial = _choose(simulation, workers)
    path.write_text(json.dumps(asdict(trial), indent=1))
    return trial


def _choose(simulation: Simulation, workers: Crew) -> Trial:
    on_devices = _measure(simulation, workers, (ON_DEVICES,))
    expected_s = _samples_in_all(simulation) / on_devices[ON_DEVICES] / workers.count
    if expected_s < WORTH_A_TRIAL_S:
        return Trial(ON_DEVICES, on_devices)
    missing = {name: reason for name in RUNTIMES if (reason := unavailable(name, simulation.prepared.spec.model.name))}
    one_by_one = tuple(name for name in RUNTIMES if name not in missing and name != AT_ONCE)
    rates = _measure(simulation, workers, one_by_one)
    rates[AT_ONCE] = _rate_at_once(simulation) / workers.count
    return Trial(max(rates, key=rates.__getitem__), rates, missing)


def _samples_in_all(simulation: Simulation) -> float:
    devices, rules = simulation.fleet.devices, simulation.task.round
    cohort_share = min(rules.cohort_size or len(devices), len(devices)) / len(devices)
    config = simulation.prepared.method.config
    return rules.rounds * cohort_share * sum(samples_trained(len(device.train), config) for device in devices)


def _measure(simulation: Simulation, workers: Crew, runtimes: tuple[str, ...]) -> dict[str, float]:
    largest = max(simulation.fleet.devices, key=lambda device: len(device.train))
    (rates,) = workers.map(_measure_here, [_Job(simulation.folder.path, largest.name, runtimes)])
    return rates


def _rate_at_once(simulation: Simulation) -> float:
    """Of the whole machine, samples a second: it has one process, and all cores or the accelerator to itself."""
    files = Bench(simulation.folder.path, AT_ONCE)
    spec, method = files.spec, simulation.prepared.method
    cohort = simulation.fleet.devices[: min(simulation.task.round.cohort_size or _MOST_MEMBERS, _MOST_MEMBERS)]
    few = [files.train(d.name).take(slice(0, _BATCHES * method.config.batch_size)) for d in cohort]
    trainer, start = cohort_trainer(simulation.folder.path), simulation.prepared.initial

    def train() -> None:
        members = [Member(method.init_state(), samples, np.random.default_rng(0)) for samples in few]
        trainer.train(method, members, start, inputs=Inputs(spec.model.dropout, spec.augment))

    train()
    best_s = math.inf
    for _ in range(_TURNS):
        began = time.perf_counter()
        train()
        best_s = min(best_s, time.perf_counter() - began)
    return sum(samples_trained(len(each), method.config) for each in few) / best_s


def _measure_here(job: _Job) -> dict[str, float]:
    """Whole steps in turns, so that whatever else the machine does hits all alike; the best turn counts."""
    steps = {runtime: _step(Bench(job.path, runtime), job.device) for runtime in job.runtimes}
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


def _step(files: Bench, device: str) -> Callable[[], int]:
    """Local training on the first batches of a device; gives how many samples it took."""
    spec, samples, method = files.spec, files.train(device), files.method
    few = samples.take(slice(0, _BATCHES * method.config.batch_size))
    state, start = method.init_state(), get_model(spec.model.name, classes=len(spec.model.class_names)).init(0)

    def step() -> int:
        train_round(
            method,
            state,
            start,
            files.gradient,
            few,
            terms=RoundTerms(),
            logits_of=files.inference,
            inputs=Inputs(spec.model.dropout, spec.augment),
            rng=np.random.default_rng(0),
            noise=SeededNoise(0, 0, 0),
            make_optimizer=make_optimizer,
        )
        return samples_trained(len(few), method.config)

    return step
