"""Measures the costs of a task's work by a short trial on this machine, with the field's own code.

`Trainer` runs a few rounds of a device with the task's own graph: with few batches and with many, of the task's batch
size and of a quarter of it. This separates the costs of a batch, of a sample and of the rest of a round. The updates go
through an aggregator's `RoundEngine`. CPU seconds are counted and not wall time, so that other work on the machine
matters little. The fastest of several repetitions counts, because disturbances only make a computer slower. The times
are scaled by this machine's speed to the reference board of the profiles.
"""

from __future__ import annotations

import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import LabelledSamples, Samples, inputs_of
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import HushfleetError
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.learning.linear import LinearGradient
from hushfleet.losses import loss_of
from hushfleet.methods import method_of
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.committee import committee_rule
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.prime_field import PRIMES
from hushfleet.secure.unmasking_share import unmasking_share
from hushfleet.simulator.world.times import Costs
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.spec import ModelSpec

Value = TypeVar("Value")

_FEW = 2  # batches
_MANY = (6, 80)  # at least, at most
_MANY_S = 0.3  # of the longer rounds: enough to separate a small network's batches from the rest
_REPETITIONS = 3
_DISTINCT = 64  # samples; they are repeated, because features of thousands of images take minutes
_ROUNDS = 1 + 2 * _REPETITIONS

_CLIENT = ("hushfleet.edge_client.agent", "hushfleet.edge_client.worker.runtime", "hushfleet.wire.link.mqtt")
_WORKER = ("hushfleet.edge_client.worker.main", "hushfleet.edge_client.worker.work")
_GRAPHS = ("hushfleet.edge_client.worker.task_graphs",)

_REFERENCE_GFLOP_S = 96.0
"""Float32 speed of one core of `generic-x86`, the unit of `relative_cpu_speed`: 32 operations per cycle at 3 GHz."""

_SIZE = 512
_TIMES = 15
# Runs in a separate process, because the libraries of this process already have their threads.
_PRODUCTS = f"""
import time
import numpy as np
a = np.random.default_rng(0).random(({_SIZE}, {_SIZE}), dtype=np.float32)
out = np.empty_like(a)
np.matmul(a, a, out=out)
for _ in range({_TIMES}):
    began = time.thread_time()
    np.matmul(a, a, out=out)
    print(time.thread_time() - began)
"""


@cache
def machine_speed() -> float:
    """Returns one core's speed here at float32 matrix products, in cores of `generic-x86`; measured once per process.

    Raises `HushfleetError` if it cannot be measured.
    """
    environment = {**os.environ, **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}}
    measured = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], env=environment, capture_output=True, text=True, check=False
    )
    if measured.returncode:
        raise HushfleetError(f"the speed of this machine could not be measured: {measured.stderr[-300:]}")
    seconds = statistics.median(float(line) for line in measured.stdout.split())
    return 2 * _SIZE**3 / seconds / 1e9 / _REFERENCE_GFLOP_S


def measure_costs(prepared: PreparedTask, *, machine_speed: float) -> Costs:
    """Runs the trials, and returns the measured costs.

    :param machine_speed: speed of one core of this machine, in cores of generic-x86.
    """
    model, blobs = prepared.spec.model, prepared.blobs
    objective = model.targets.objective(prepared.method.objective)
    (gradient, inference), opening_s = _measured(lambda: _network(model, objective, blobs))
    batch = prepared.method.config.batch_size
    small = max(1, batch // 4)
    step_s, release_s, accept_s, close_s = _trial(prepared, gradient, inference, batch)
    small_step_s = _trial(prepared, gradient, inference, small)[0] if small < batch else 0.0
    sample_s = min(max(0.0, step_s - small_step_s) / (batch - small), step_s / batch) if small < batch else step_s
    return Costs(
        batch_s=(step_s - batch * sample_s) * machine_speed,
        sample_s=sample_s * machine_speed,
        release_s=release_s * machine_speed,
        start_s=_start_s(*_CLIENT) * machine_speed,
        load_s=(_start_s(*_WORKER, *(() if model.is_linear else _GRAPHS)) + opening_s) * machine_speed,
        accept_s=accept_s,
        close_s=close_s,
        pair_s=_pair_s(prepared) * machine_speed,
    )


def _network(model: ModelSpec, objective: Objective, blobs: Mapping[bytes, bytes]) -> tuple[GradientFunction, LogitsOf]:
    """Opens what a board computes gradients and logits with."""
    if model.is_linear:
        linear = LinearGradient(model.layout, objective)
        return linear, linear.logits
    gradient, inference = blobs[model.gradient.digest], blobs[model.inference.digest]
    return GradientGraph(gradient, model.layout, objective=objective), InferenceGraph(inference, model.layout)


def _trial(
    prepared: PreparedTask, gradient: GradientFunction, inference: LogitsOf, batch_size: int
) -> tuple[float, float, float, float]:
    """Returns CPU seconds of a batch, of the rest of a device's round, of accepting its update and of closing a round.

    Each batch size has its own stores, because a device trains for only one package of a task.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hushfleet-trial-") as folder,
        AggregatorStore(Path(folder) / "aggregator", durable=False) as server,
        DeviceStore(Path(folder) / "store.sqlite", device="trial", durable=False) as store,
    ):
        trial = _Trial(prepared, server, store, gradient, inference, batch_size)
        return *trial.step_and_rest(), min(trial.accept_s), min(trial.close_s)


class _Trial:
    """A fleet of one device."""

    def __init__(
        self,
        prepared: PreparedTask,
        server: AggregatorStore,
        store: DeviceStore,
        gradient: GradientFunction,
        inference: LogitsOf,
        batch_size: int,
    ) -> None:
        self.accept_s: list[float] = []
        self.close_s: list[float] = []
        # More rounds than the task may have, so that the trial never runs out of them.
        rules = replace(prepared.task.round, cohort_size=0, patience=0)
        task = replace(prepared.task, round=rules)
        spec = prepared.spec.local_only()
        spec = replace(spec, rounds=max(spec.rounds, _ROUNDS))
        method = method_of(spec)
        self._prepared = replace(prepared, task=task, spec=spec, method=method)
        self._of_device = replace(spec, method_config={**spec.method_config, "batch_size": batch_size})
        self._method = method_of(self._of_device)
        # the trial goes through its samples once, also if the method only accepts a number of steps
        object.__setattr__(self._method.config, "local_steps", 0)
        self._gradient, self._inference, self._store, self._batch_size = gradient, inference, store, batch_size
        self._engine = RoundEngine(server, self._prepared)
        server.add_device("trial", public_key=store.identity.public_key)
        self._membership_list = (
            None if spec.privacy.secure is None else _membership_list(prepared, store.identity.public_key)
        )

    def step_and_rest(self) -> tuple[float, float]:
        """Returns CPU seconds of one batch, and of a device's round without its batches."""
        config, privacy = self._prepared.method.config, self._prepared.spec.privacy
        # How often a round goes through the samples.
        passes = privacy.batches * privacy.sample_rate if privacy.unit == "record" else config.local_epochs
        first_s = self._round(_FEW)  # also warms caches, so it is not counted
        many = min(max(_MANY[0], int(_MANY_S * _FEW / first_s)), _MANY[1])
        seconds = [(self._round(_FEW), self._round(many)) for _ in range(_REPETITIONS)]
        few_s, many_s = map(min, zip(*seconds, strict=True))
        step_s = max(0.0, many_s - few_s) / ((many - _FEW) * passes)
        return step_s, max(0.0, few_s - _FEW * passes * step_s)

    def _round(self, batches: int) -> float:
        engine, spec = self._engine, self._of_device
        samples = _samples(self._prepared, batches * self._batch_size)
        plan, params = engine.open_round(["trial"], membership_list=self._membership_list), engine.model.published
        trainer = Trainer(
            device="trial",
            store=self._store,
            spec=spec,
            gradient=self._gradient,
            logits_of=self._inference,
            samples=lambda: samples,
            randomness=SeededRandomness(0, 0),
            limits=LimitsSection.of_simulation(spec.privacy),
            method=self._method,
        )
        entry, seconds = _measured(lambda: DeviceRound(trainer, plan, self._membership_list).run(params))
        verdict, accept_s = _measured(lambda: engine.accept("trial", entry.data))
        if not verdict.acknowledged:
            raise HushfleetError(f"the trial's update was refused ({verdict.code}): {verdict.reason}")
        self.accept_s.append(accept_s)
        self.close_s.append(_measured(engine.close)[1])
        return seconds


def _membership_list(prepared: PreparedTask, key: bytes) -> MembershipList:
    """Returns a membership list with the trial's device, and with others that only have keys."""
    others = {f"other-{number}": _key(number).public_key for number in range(prepared.task.data.devices - 1)}
    return MembershipList.of({**others, "trial": key})


def _key(number: int) -> Identity:
    return Identity.from_bytes(hashlib.sha256(b"%d" % number).digest())


def _pair_s(prepared: PreparedTask) -> float:
    """Returns CPU seconds of a committee member for one device of secure aggregation."""
    secure = prepared.spec.privacy.secure
    if secure is None:
        return 0.0
    task, prime = prepared.task, PRIMES[secure.bits]
    rule = committee_rule(task.cohort_size, honest_fraction=secure.honest_fraction, membership_list=task.data.devices)
    width, agreement = rule.width(secure.length(prepared.spec.model.layout.size)), KeyAgreement(_key(0))
    peers = [_key(number).public_key for number in range(1, 9)]
    _, seconds = _measured(lambda: unmasking_share([agreement.key(peer, b"trial") for peer in peers], width, prime))
    return seconds / len(peers)


def _samples(prepared: PreparedTask, count: int) -> LabelledSamples:
    """Returns `count` samples, which repeat a few of the task's data, or random ones if there are none."""
    distinct = min(count, _DISTINCT)
    if prepared.dataset is not None and (stored := len(prepared.dataset.train)):
        distinct = min(distinct, stored)
        samples = prepared.dataset.train.take(np.arange(distinct) * stored // distinct)
    else:
        model, rng = prepared.spec.model, np.random.default_rng(0)
        images = rng.integers(0, 256, (distinct, *model.image_shape), dtype=np.uint8)
        labels = loss_of(model.targets.objective(CROSS_ENTROPY)).random(distinct, len(model.class_names), rng)
        samples = Samples(images, labels, model.mean, model.std, model.targets)
    return inputs_of(samples, prepared.features).take(np.arange(count) % distinct)


def _start_s(*modules: str) -> float:
    """Returns CPU seconds from the start of a process until it has imported these modules."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    imports = f"import {', '.join(modules)}"
    # a separate session: Ctrl-C reaches only this process, and the child ends with it
    subprocess.run([sys.executable, "-c", imports], check=True, stdin=subprocess.DEVNULL, start_new_session=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measured(work: Callable[[], Value]) -> tuple[Value, float]:
    """Runs the work; returns its value, and the CPU seconds that this thread took."""
    began = time.thread_time()
    value = work()
    return value, time.thread_time() - began
