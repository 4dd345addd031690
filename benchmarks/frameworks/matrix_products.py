"""What the machine can do at most: float32 matrix products, one thread a core, all cores at once.

    python -m benchmarks.frameworks.matrix_products FOLDER PROCESSES

A "round" takes about a second. The better of PyTorch's and NumPy's product counts, which differ on some processors.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.frameworks.workload import Job, Rounds

SECONDS_EACH = 0.4


def rates(device: str) -> list[float]:
    """GFLOP/s of this thread, for each library."""
    torch.set_num_threads(1)
    size = 8192 if device == "cuda" else 512
    a, b, out = (torch.rand(size, size, device=device) for _ in range(3))
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if device == "cuda":
        products = [lambda: (torch.mm(a, b, out=out), torch.cuda.synchronize())]
    else:
        products.append(lambda: np.matmul(a.numpy(), b.numpy(), out=out.numpy()))
    return [2e-9 * size**3 * _per_second(product) for product in products]


def _per_second(product: Callable[[], object]) -> float:
    product()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS_EACH:
        product()
        count += 1
    return count / (time.perf_counter() - began)


def main() -> None:
    device = Job.load(sys.argv[1]).workload.device
    processes = 1 if device == "cuda" else int(sys.argv[2])
    rounds = Rounds(lambda: np.zeros(0, np.float32), ["torch", "numpy"])
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        while rounds.wait():
            each = pool.map(rates, [device] * processes, chunksize=1)
            rounds.done(gflop_s=max(map(sum, zip(*each, strict=True))))


if __name__ == "__main__":
    main()
