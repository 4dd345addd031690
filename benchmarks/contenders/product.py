"""What the machine's cores can do at most: float32 matrix products, one thread a core, all cores at once.

    python -m benchmarks.contenders.product JOB.json PROCESSES

A "round" measures for about a second. The better of PyTorch's and NumPy's product counts, since their libraries
differ by a fifth on some processors.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from itertools import repeat

import numpy as np
import torch

from benchmarks.contenders.gate import Gate
from benchmarks.contenders.job import job_and_options

SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}
SECONDS_EACH = 0.25


def main() -> None:
    job, options = job_and_options()
    processes = 1 if job.device == "cuda" else int(options[0])
    gate = Gate(lambda: np.zeros(0, np.float32), ["torch", "numpy"])
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        while gate.open():
            each = pool.starmap(rates, repeat((job.device,), processes), chunksize=1)
            # Which library and size is best is the same for all cores, which work on it at the same time.
            gate.close(samples=0, gflop_s=max(map(sum, zip(*each, strict=True))))


def rates(device: str) -> list[float]:
    """GFLOP/s of this thread, for each size and library."""
    torch.set_num_threads(1)
    found = []
    for size in SIZES[device]:
        a, b = torch.rand(size, size, device=device), torch.rand(size, size, device=device)
        out = torch.empty_like(a)
        products: list[Callable[[], object]] = [lambda a=a, b=b, out=out: torch.mm(a, b, out=out)]
        if device == "cpu":
            x, y, z = a.numpy(), b.numpy(), out.numpy()
            products.append(lambda x=x, y=y, z=z: np.matmul(x, y, out=z))
        found += [2 * size**3 * _per_second(product, device) / 1e9 for product in products]
    return found


def _per_second(product: Callable[[], object], device: str) -> float:
    product()
    _wait(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS_EACH:
        product()
        _wait(device)
        count += 1
    return count / (time.perf_counter() - began)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
