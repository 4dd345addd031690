"""Measures loss and gradient of all clients of one step on a GPU, in the present and former ways of runtime `vmap`.

    python -m benchmarks.gpu_networks [--networks NAME,...] [--json FILE]

launched     one pass for all clients by vmap, whose kernels the interpreter launches
replayed     the same pass, recorded as a CUDA graph
streams      each client by itself, on several streams, recorded
+ TF32       with TF32 in convolutions

Medians of many steps on random images; ratios are to `launched`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.common import Figures, make_parser, names_option, table, write
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.vmap.replay import EAGER, ReplayedGradient
from hushfleet.simulator.engines.fast.vmap.streams import StreamedGradient

SHAPES = {
    "mnist-cnn": (10, 16),
    "cifar10-cnn": (50, 64),
    "resnet18-gn": (10, 16),
    "resnet18-gn 50x64": (50, 64),
}
"""Clients and images of a batch. Text after a blank only distinguishes two rows of one network."""
LEAST_MS, LEAST_STEPS = 500.0, 3
STREAMS = (1, 4, 8)


def milliseconds(step: Callable[[], object]) -> float:
    for _ in range(EAGER + 2):
        step()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < LEAST_MS or len(times) < LEAST_STEPS:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measured(name: str, clients: int, batch: int) -> list[Figures]:
    gradient = TorchGradient(get_model(name.split()[0]), device="cuda")
    params = torch.from_numpy(np.stack([gradient.model.init(seed) for seed in range(clients)])).cuda()
    x = torch.rand((clients, batch, *gradient.model.input_shape), device="cuda")
    y = torch.randint(10, (clients, batch), device="cuda")
    dropout = [torch.ones((clients, batch, *each.shape), device="cuda") for each in gradient.model.dropout]
    out = torch.empty_like(params)
    ways: dict[str, TorchGradient | ReplayedGradient] = {"launched": gradient, "replayed": ReplayedGradient(gradient)}
    for streams in STREAMS:
        ways[f"{streams} streams"] = ReplayedGradient(StreamedGradient(gradient, streams))
    rows: list[Figures] = []
    for tf32 in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            for way, each in ways.items():
                row: Figures = {"network": name, "clients x batch": f"{clients} x {batch}"}
                rows.append(row | {"way": f"{way} + TF32" if tf32 else way})
                try:
                    spent_ms = milliseconds(partial(each.clients, params, x, y, dropout, out=out))
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    rows[-1]["failure"] = str(error).splitlines()[0]
                else:
                    rows[-1] |= {"ms": spent_ms, "samples_per_s": clients * batch / spent_ms * 1e3}
                    rows[-1]["times_launched"] = rows[0].get("ms", spent_ms) / spent_ms
                if isinstance(each, ReplayedGradient):
                    each.forget()  # the next way needs the memory, and with TF32 a new recording
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--networks", type=names_option(SHAPES), default=tuple(SHAPES), metavar="NAME,...")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device here")
    figures: Figures = {"rows": []}
    for name in options.networks:
        rows = measured(name, *SHAPES[name])
        figures["rows"] += rows
        write(options, figures)
        table(name, [{key: row.get(key) for key in ("way", "ms", "samples_per_s", "times_launched")} for row in rows])


if __name__ == "__main__":
    main()
