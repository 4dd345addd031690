"""Flower's way from received updates to their mean: deserialise each, keep all, then `aggregate`.

Runs in an environment of its own, started by `benchmarks/aggregator.py`; its only arguments are one JSON text.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from flwr.common import NDArrays, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy.aggregate import aggregate

from benchmarks.contenders.bursts import Copy, forget_peak, in_turns, memory_mib

DISTINCT = 16


def main() -> None:
    job = json.loads(sys.argv[1])
    copy = Copy()
    rng = np.random.default_rng(0)
    clients = [_layers(rng.standard_normal(sum(job["layers"]), np.float32), job["layers"]) for _ in range(DISTINCT)]
    received = [ndarrays_to_parameters(client) for client in clients]
    forget_peak()
    start_mib = memory_mib("VmRSS")
    size_bytes = 4 * sum(job["layers"])

    def average(first: int, count: int) -> float:
        return _average_s([received[index % DISTINCT] for index in range(count)])

    def send_and_average(first: int, count: int) -> float:
        began = time.perf_counter()
        sent = [ndarrays_to_parameters(clients[index % DISTINCT]) for index in range(count)]
        return time.perf_counter() - began + _average_s(sent)

    figures = {}
    # one burst is a whole cohort, since nothing can be averaged before all are there; a few for the median
    for name, work in (("server", average), ("with serialising", send_and_average)):
        cohort = job["cohort"]
        options = {"updates": 5 * cohort, "value_bytes": size_bytes, "box_s": job["box_s"] / 2, "burst": cohort}
        figures[name] = in_turns(work, copy=copy, **options).figures()
        if name == "server":
            peak_mib = memory_mib("VmHWM")
    shown = figures["server"]
    shown["updates_per_s_with_serialising"] = figures["with serialising"]["updates_per_s"]
    print(json.dumps({**shown, "peak_mib": peak_mib, "grown_mib": peak_mib - start_mib}))


def _average_s(received: Sequence[Parameters]) -> float:
    began = time.perf_counter()
    aggregate([(parameters_to_ndarrays(parameters), 1) for parameters in received])
    return time.perf_counter() - began


def _layers(values: np.ndarray, sizes: Sequence[int]) -> NDArrays:
    ends = np.cumsum([0, *sizes]).tolist()
    return [values[start:stop] for start, stop in pairwise(ends)]


if __name__ == "__main__":
    main()
