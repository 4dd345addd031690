"""Profiles local training on a GPU: wall time, time of kernels, the largest of them, memory.

    python -m benchmarks.gpu_profile [--device cuda] [--workloads W1,W3] [--shrink N]

One cohort of a workload of `benchmarks.simulation` is trained at once, as by the fast engine's runtime `vmap`, without
noise, encoding and aggregation: first once without measuring, then for the time and the GPU's utilisation, then once
under PyTorch's profiler, which slows it down. Images are random.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Figures, make_parser, names_option, table, write
from benchmarks.frameworks.workload import ROUNDS, WORKLOADS, Workload
from benchmarks.gpu_usage import GpuUsage, mean_or_none
from hushfleet.config.spec import PrivacySpec
from hushfleet.data.samples import Samples
from hushfleet.edge_client.randomness import SeededRandomness
from hushfleet.gradients.draws import Inputs
from hushfleet.methods import make_method
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member

LEAST_S = 3.0
"""Long enough, because the driver's utilisation figures are means over up to a second."""
LARGEST = 12


def profiled(workload: Workload, *, least_s: float = LEAST_S) -> Figures:
    gradient = TorchGradient(get_model("mnist-cnn"), device=workload.device)
    settings = {
        "optimizer": workload.optimizer,
        "learning_rate": workload.learning_rate,
        "batch_size": workload.batch_size,
        "local_epochs": workload.epochs,
    }
    privacy = PrivacySpec("device", accounting="strict", clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
    method = make_method("dp-fedavg", settings, privacy, gradient.layout, rounds=ROUNDS)
    rng = np.random.default_rng(workload.seed)
    members = []
    for index in range(workload.cohort):
        images = rng.integers(0, 256, (workload.samples, 1, 28, 28), dtype=np.uint8)
        samples = Samples(images, rng.integers(0, 10, workload.samples), (0.5,), (0.25,))
        members.append(Member(method.init_state(), samples, SeededRandomness(workload.seed, index).order(1)))
    trainer, params = CohortTrainer(gradient, workload.device), gradient.model.init(workload.seed)
    on_gpu = workload.device == "cuda"

    def train() -> float:
        began = time.perf_counter()
        trainer.train(method, members, params, inputs=Inputs(()))
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first_s = train()
    with GpuUsage() as usage:
        began, times = time.monotonic(), list[float]()
        while not times or time.monotonic() - began < least_s:
            times.append(train())
        busy = mean_or_none(usage.between(began, time.monotonic())) if on_gpu else None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        profiled_s = train()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent = {
        event.key: (event.count, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6)
        for event in seen.key_averages()
        if event.device_type == wanted
    }
    kernels_s = sum(seconds for _, seconds in spent.values())
    largest = sorted(spent.items(), key=lambda item: -item[1][1])[:LARGEST]
    return {
        "workload": workload.name,
        "text": workload.text,
        "first_s": first_s,
        "round_s": min(times),
        "samples_per_s": workload.samples_per_round / min(times),
        "gpu_busy": busy,
        "profiled_s": profiled_s,
        "kernels_s": kernels_s,
        "kernels": sum(count for count, _ in spent.values()),
        "largest": [{"kernel": name, "calls": count, "seconds": seconds} for name, (count, seconds) in largest],
        "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workloads", type=names_option(WORKLOADS), default=("W1", "W3"), metavar="W1,W2,...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide each client's samples by this")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    figures: Figures = {"workloads": [], "settings": {"device": options.device, "shrink": options.shrink}}
    for name in options.workloads:
        found = profiled(replace(WORKLOADS[name].shrunk(options.shrink), device=options.device))
        figures["workloads"].append(found)
        write(options, figures)
        table(found["text"], [{each: found[each] for each in ("round_s", "samples_per_s", "kernels_s", "gpu_busy")}])
        table("the largest kernels", found["largest"])


if __name__ == "__main__":
    main()
