"""One cell of `benchmarks/aggregator.py` in a fresh process: so many updates through one part of the aggregator.

Its only argument is one JSON text; the last line of its output is another.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.contenders.bursts import Bursts, Copy, forget_peak, in_turns, memory_mib
from benchmarks.machine import cores
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode
from hushfleet.aggregator.ingest.decoding_pool import DecodingPool, workers_for
from hushfleet.aggregator.ingest.exact_sum import ExactSum
from hushfleet.aggregator.ingest.sum_kernels import find_addition
from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.config.spec import BlobRef, ModelSpec, TaskSpec
from hushfleet.methods import make_method
from hushfleet.methods.state import RoundContext, RoundTerms
from hushfleet.models import Model, get_model
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.forms import steps_for
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader, encode_update, max_update_bytes

DISTINCT = 16
"""Updates that take turns: more than the caches hold of a network of a million parameters."""
POOL_BURST = 128
ROUND = 1


@dataclass(frozen=True)
class Job:
    """:param work: a name of `WORKS`; :param codec: of the updates; :param box_s: seconds of measuring, at most."""

    work: str
    model: str
    codec: str
    cohort: int
    box_s: float


class Inputs:
    """What devices send: noised once, the same vectors under as many names as there are devices."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.prepared = _prepared(job)
        self.layout = self.prepared.spec.model.layout
        self.counts = [layer.size for layer in self.layout.layers]
        self._identity = Identity.from_bytes(bytes(range(32)))
        self.public_key = self._identity.public_key
        method, self._state = self.prepared.method, self.prepared.method.init_state()
        terms = RoundTerms(job.cohort, method.server.controls(method.server.initial(0), ROUND))
        zeros = np.zeros(self.layout.size, np.float32)
        context = RoundContext(method.setting(terms), self._state, zeros, zeros)
        self._releases = [
            method.release(
                context,
                np.random.default_rng(index).normal(0, 1e-3, self.layout.size).astype(np.float32),
                SeededNoise(1, index, ROUND),
            )
            for index in range(min(DISTINCT, job.cohort))
        ]
        self.values = [release.values for release in self._releases]
        self.copy = Copy()

    def blob(self, index: int) -> bytes:
        """The signed update of device `index`."""
        release, wire = self._releases[index % len(self._releases)], self.prepared.spec.wire
        header = UpdateHeader(
            task=self.prepared.spec.task,
            round=ROUND,
            device=device_name(index),
            codec=wire.codec,
            value_count=self.layout.size,
            steps=steps_for(wire, noise_stds=release.noise_stds, layer_rms=()),
            noise_stds=tuple(release.noise_stds),
            clip_norms=tuple(release.clip_norms),
            public_digest=self._state.public.digest(),
            rounds_charged=1,
            epsilon_server=1.0,
            multiplier_server=release.charge.noise_multiplier,
            noise_split=release.charge.noise_split,
        )
        return encode_update(header, release.values, counts=self.counts, identity=self._identity).data

    def blobs(self) -> list[bytes]:
        return [self.blob(index) for index in range(len(self._releases))]

    def measure(self, work: Callable[[int, int], float], **options: Any) -> Bursts:
        size_bytes, job = 4 * self.layout.size, self.job
        return in_turns(work, updates=job.cohort, value_bytes=size_bytes, box_s=job.box_s, copy=self.copy, **options)


def device_name(index: int) -> str:
    return f"device-{index}"


@contextmanager
def growth(figures: dict[str, Any]) -> Iterator[None]:
    """Adds the process's peak of memory, and how far it is above what the inputs took."""
    forget_peak()
    start_mib = memory_mib("VmRSS")
    yield
    figures["peak_mib"] = memory_mib("VmHWM")
    figures["grown_mib"] = figures["peak_mib"] - start_mib


def add(inputs: Inputs) -> dict[str, Any]:
    """Adding values that are there, as float32."""
    figures: dict[str, Any] = {}
    with growth(figures):
        sums = ExactSum(inputs.layout.size)
        sums.add(inputs.values[0])  # whatever happens once, at first

        def work(first: int, count: int) -> float:
            return _timed_s(lambda index: sums.add(inputs.values[index % len(inputs.values)]), first, count)

        figures |= inputs.measure(work).figures()
    return figures


def decode_and_add(inputs: Inputs) -> dict[str, Any]:
    """Decoding and adding, and in turns with it the decoder alone."""
    blobs, counts, walk = inputs.blobs(), inputs.counts, find_addition()
    decoder_rates: list[float] = []
    figures: dict[str, Any] = {}
    with growth(figures):
        sums = ExactSum(inputs.layout.size)

        def take(index: int) -> None:
            _add(sums, decode(blobs[index % len(blobs)], counts=counts, walk=walk))

        def only_decode(index: int) -> None:
            decode(blobs[index % len(blobs)], counts=counts, walk=walk)

        only_decode(0)  # whatever happens once, at first

        def work(first: int, count: int) -> float:
            decoder_rates.append(count / _timed_s(only_decode, first, count))
            return _timed_s(take, first, count)

        bursts = inputs.measure(work)
        figures |= bursts.figures()
    alone = decoder_rates[-len(bursts.rates) :]
    figures["of_decoder"] = float(np.median([ours / other for ours, other in zip(bursts.rates, alone, strict=True)]))
    figures["update_bytes"] = len(blobs[0])
    return figures


def through_pool(inputs: Inputs) -> dict[str, Any]:
    """The same with the decoding in worker processes; at least one, also on one core."""
    blobs, counts, size = inputs.blobs(), inputs.counts, inputs.layout.size
    max_bytes = max_update_bytes(size)
    workers = max(1, workers_for(cores=cores(), max_bytes=max_bytes, max_values=size))
    walk = find_addition()
    figures: dict[str, Any] = {"workers": workers}
    left = 0
    with growth(figures):
        sums = ExactSum(size)

        def done(index: int, decoded: Any) -> None:
            nonlocal left
            _add(sums, decoded)
            left -= 1

        pool: DecodingPool[int] = DecodingPool(workers=workers, max_bytes=max_bytes, max_values=size, done=done)

        def work(first: int, count: int) -> float:
            nonlocal left
            began, left = time.perf_counter(), count
            for index in range(first, first + count):
                pool.collect()
                if pool.has_room:
                    pool.put(index, blobs[index % len(blobs)], counts=counts)
                else:
                    done(index, decode(blobs[index % len(blobs)], counts=counts, walk=walk))
            while left:
                pool.collect(wait_s=1.0)
            return time.perf_counter() - began

        began = time.perf_counter()
        work(0, workers)
        figures["start_s"] = time.perf_counter() - began
        figures |= inputs.measure(work, burst=POOL_BURST).figures()
    figures["worker_peak_mib"] = max(memory_mib("VmHWM", pid) for pid in pool.pids)
    pool.close()
    return figures


def accept(inputs: Inputs) -> dict[str, Any]:
    """All of `RoundEngine.accept`: signature, checks, decoding, a synced transaction, adding."""
    figures: dict[str, Any] = {}
    cohort = inputs.job.cohort
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        store = AggregatorStore(Path(folder), durable=True)
        with store.transaction():
            for index in range(cohort):
                store.add_device(device_name(index), public_key=inputs.public_key, board="benchmark")
        with growth(figures):
            engine = RoundEngine(store, inputs.prepared)
            engine.open_round([device_name(index) for index in range(cohort)])

            def work(first: int, count: int) -> float:
                taken_s = 0.0
                for index in range(first, first + count):
                    data = inputs.blob(index)  # not counted: it is the device's work
                    began = time.perf_counter()
                    verdict = engine.accept(device_name(index), data)
                    taken_s += time.perf_counter() - began
                    if verdict.code != "accepted":
                        raise SystemExit(f"{verdict.code}: {verdict.reason}")
                return taken_s

            figures |= inputs.measure(work).figures()
        store.close()
    return figures


WORKS = {"add": add, "decode and add": decode_and_add, "pool": through_pool, "accept": accept}


def _timed_s(take: Callable[[int], None], first: int, count: int) -> float:
    began = time.perf_counter()
    for index in range(first, first + count):
        take(index)
    return time.perf_counter() - began


def _add(sums: ExactSum, decoded: Decoded | Refusal | None) -> None:
    if not isinstance(decoded, Decoded):
        raise SystemExit(f"not decoded: {decoded!r}")
    sums.add(decoded.values, largest=decoded.largest)


def _prepared(job: Job) -> PreparedTask:
    """A task with DP-FedAvg on a device's noise; no graph and no data, since nothing is trained."""
    model: Model = get_model(job.model)
    task = parse_task(
        {
            "name": "benchmark",
            "model": {"name": job.model},
            "method": {"name": "dp-fedavg"},
            "privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "accounting": "as-published"},
            "data": {"name": "digits", "devices": job.cohort},
            "round": {"rounds": 1},
            "wire": {"codec": job.codec},
        }
    )
    graph = BlobRef.of(b"none")
    spec = TaskSpec(
        task="benchmark-1",
        rounds=1,
        method="dp-fedavg",
        method_config={},
        privacy=task.privacy_spec(),
        wire=task.wire.spec(),
        model=ModelSpec(
            name=model.name,
            layout=model.layout,
            input_shape=model.input_shape,
            class_names=tuple(map(str, range(model.classes))),
            mean=(0.0,) * model.input_shape[0],
            std=(1.0,) * model.input_shape[0],
            dropout=(),
            gradient=graph,
            inference=graph,
        ),
        memory_mib=64,
    )
    return PreparedTask(
        task=task,
        model=model,
        spec=spec,
        spec_ref=BlobRef.of(spec.to_bytes()),
        blobs={},
        initial=model.init(0),
        method=make_method("dp-fedavg", {}, spec.privacy, model.layout, rounds=1),
        dataset=None,
        inference=None,  # type: ignore[arg-type]  # nothing here computes logits
        evaluate_global=None,
    )


def main(arguments: Sequence[str]) -> None:
    job = Job(**json.loads(arguments[0]))
    print(json.dumps(WORKS[job.work](Inputs(job))))


if __name__ == "__main__":
    main(sys.argv[1:])
