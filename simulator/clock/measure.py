"""What a task's work costs, by a short trial on this machine with the field's own code.

A few rounds of a device are run by `edge_client.trainer.Trainer` with the task's own graph, once with few batches and
once with many: the difference is what batches cost, the rest is what a round costs besides. Their updates go through
an aggregator's `RoundEngine`. CPU seconds are counted and not wall time, so that other work on the machine matters
little, and of several repetitions the quickest counts, since nothing makes a computer too quick. They are scaled by
this machine's speed to the reference board of the profiles.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from aggregator.prepare import PreparedTask
from aggregator.rounds import RoundEngine
from aggregator.store import AggregatorStore
from edge_client.store import DeviceStore
from edge_client.trainer import SeededRandomness, Trainer
from hushfleet.data.samples import Samples
from hushfleet.errors import HushfleetError
from hushfleet.graphs import GradientGraph, InferenceGraph
from hushfleet.methods import make_method
from simulator.clock.device_time import Costs

Value = TypeVar("Value")

_FEW = 2  # batches
_MANY = (6, 80)  # at least, at most
_MANY_S = 0.3
"""Of the longer rounds: enough to tell a small network's batches from the rest."""
_REPETITIONS = 3


def measure_costs(prepared: PreparedTask, *, machine_speed: float) -> Costs:
    """:param machine_speed: one core of this machine, in cores of generic-x86."""
    graph, load_s = _measured(lambda: _loaded(prepared))
    with tempfile.TemporaryDirectory(prefix="hushfleet-trial-") as folder:
        step_s, release_s, accept_s, close_s = _rounds(prepared, graph, Path(folder))
    return Costs(
        step_s=step_s * machine_speed,
        release_s=release_s * machine_speed,
        start_s=_start_s() * machine_speed,
        load_s=load_s * machine_speed,
        accept_s=accept_s,
        close_s=close_s,
    )


def _rounds(prepared: PreparedTask, graph: GradientGraph, folder: Path) -> tuple[float, float, float, float]:
    """CPU seconds of a step, the rest of a device's round, an accepted update, and a closed round."""
    # More rounds than the task may have, so that the trial never runs out of them.
    task = prepared.task.model_copy(update={"round": prepared.task.round.model_copy(update={"cohort_size": 0})})
    spec = replace(prepared.spec, rounds=max(prepared.spec.rounds, 2 * _REPETITIONS + 1))
    method = make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=spec.rounds)
    lasting = replace(prepared, task=task, spec=spec, method=method)
    batch = prepared.method.config.batch_size
    epochs = prepared.method.config.local_epochs
    few, many, accepts, closes = [], [], [], []
    with (
        AggregatorStore(folder / "aggregator", durable=False) as at_server,
        DeviceStore(folder / "store.sqlite", device="trial", durable=False) as store,
    ):
        engine = RoundEngine(at_server, lasting)
        at_server.add_device("trial", public_key=store.identity.public_key)

        def run(batches: int) -> float:
            plan, params = engine.open_round(["trial"]), engine.global_params
            trainer = Trainer(
                device="trial",
                store=store,
                spec=spec,
                gradient=graph,
                samples=_samples(prepared, batches * batch),
                randomness=SeededRandomness(0, 0),
                epsilon_limit=math.inf,
                delta=spec.privacy.delta,
            )
            entry, seconds = _measured(lambda: trainer.run_round(plan, params))
            verdict, accept_s = _measured(lambda: engine.accept("trial", entry.data))
            if not verdict.acknowledged:
                raise HushfleetError(f"the trial's update was refused ({verdict.code}): {verdict.reason}")
            accepts.append(accept_s)
            closes.append(_measured(engine.close)[1])
            return seconds

        first_s = run(_FEW)  # also warms caches, so it is not counted
        most = min(max(_MANY[0], int(_MANY_S / (first_s / _FEW))), _MANY[1])
        for _ in range(_REPETITIONS):
            few.append(run(_FEW))
            many.append(run(most))
    step_s = max(0.0, min(many) - min(few)) / ((most - _FEW) * epochs)
    return step_s, max(0.0, min(few) - _FEW * epochs * step_s), min(accepts), min(closes)


def _samples(prepared: PreparedTask, count: int) -> Samples:
    """So many samples of the task's data, again and again where there are fewer; noise where there are none."""
    if prepared.dataset is not None and len(prepared.dataset.train):
        train = prepared.dataset.train
        return train.take(np.arange(count) % len(train))
    model, rng = prepared.spec.model, np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *model.input_shape), dtype=np.uint8)
    return Samples(images, rng.integers(0, len(model.class_names), count), model.mean, model.std)


def _loaded(prepared: PreparedTask) -> GradientGraph:
    model = prepared.spec.model
    InferenceGraph(prepared.blobs[model.inference.digest], model.layout)
    return GradientGraph(prepared.blobs[model.gradient.digest], model.layout)


def _start_s() -> float:
    """CPU seconds from the start of a client's process until it could connect."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    imports = "import edge_client.agent, edge_client.runtime, hushfleet.wire.mqtt"
    subprocess.run([sys.executable, "-c", imports], check=True, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measured(work: Callable[[], Value]) -> tuple[Value, float]:
    """What it returns, and the CPU seconds that this thread took for it."""
    began = time.thread_time()
    value = work()
    return value, time.thread_time() - began
