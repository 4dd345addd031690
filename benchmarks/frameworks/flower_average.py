"""Runs Flower's path from received updates to their mean: deserialise each, keep all, then `aggregate`.

`benchmarks/aggregator.py` starts it in a separate environment; its only argument is one JSON text.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

import numpy as np
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy.aggregate import aggregate

from benchmarks.bursts import copy_gb_s, growth, in_turns

DISTINCT = 16


def main() -> None:
    job = json.loads(sys.argv[1])
    rng, ends = np.random.default_rng(0), np.cumsum([0, *job["layers"]]).tolist()
    received = []
    for _ in range(DISTINCT):
        values = rng.standard_normal(ends[-1], np.float32)
        received.append(ndarrays_to_parameters([values[start:stop] for start, stop in pairwise(ends)]))

    def average(first: int, count: int) -> float:
        began = time.perf_counter()
        aggregate([(parameters_to_ndarrays(received[index % DISTINCT]), 1) for index in range(count)])
        return time.perf_counter() - began

    # One burst is a whole cohort, because averaging starts when all updates are present; several bursts for the median.
    cohort, copy = job["cohort"], copy_gb_s()
    options = {"updates": 5 * cohort, "value_bytes": 4 * ends[-1], "box_s": job["box_s"], "burst": cohort}
    figures: dict[str, float] = {}
    with growth(figures):
        found = in_turns(average, copy, **options)
    print(json.dumps(found | figures))


if __name__ == "__main__":
    main()
