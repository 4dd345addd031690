"""Measures what a simulated client costs after its training: from the clipping to the exact sum, NumPy beside compiled.

    python -m benchmarks.release --layers 800 51264 524800 5130

Processor time in one thread; each stage takes turns with the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import Figures, make_parser, table, write
from hushfleet.aggregator.payloads.decoding import measure
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.models.native import NativeNoise
from hushfleet.models.native.release import add_scaled, released
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import clip
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SecureNoise, SeededNoise
from hushfleet.simulator.engines.fast.coded_size import coded_bytes, sample_stride, sampled_levels
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of

MNIST_CNN = (800, 51264, 524800, 5162)
KEY = bytes(16)
CLIP_NORM, NOISE_MULTIPLIER = 1.0, 0.02


def stages_of(sizes: Sequence[int]) -> dict[str, tuple[Callable[[], Any] | None, Callable[[], Any] | None]]:
    """Returns each stage in NumPy and compiled; None where it has none of its own."""
    layout = ParamLayout(tuple(f"layer{i}.weight" for i in range(len(sizes))), tuple((size,) for size in sizes))
    rng, codec = np.random.default_rng(0), codec_of("quantized")
    update = (rng.standard_normal(layout.size) * 0.01).astype(np.float32)
    bounds, mechanism = np.array([CLIP_NORM]), GaussianMechanism(NOISE_MULTIPLIER)
    stds = mechanism.vector_stds(np.full(len(sizes), CLIP_NORM))
    coding = Coding(sizes, tuple(stds.tolist()), KEY)
    clipped = clip(update, CLIP_NORM)
    noised = mechanism.add_noise(clipped, stds, SeededNoise(0, 0, 0), layout=layout)
    seen = codec.seen(noised, coding)
    plain, compiled = ExactSum(layout.size), ExactSum(layout.size, add_small=add_scaled)
    how = {"mask": None, "bounds": bounds, "stds": stds, "steps": coding.steps, "dither_key": KEY}
    how["stride"] = sample_stride(layout.size)
    steps: list[Callable[[], Any]] = [
        partial(clip, update, CLIP_NORM),
        lambda: mechanism.add_noise(clipped, stds, SeededNoise(0, 0, 0), layout=layout),
        partial(codec.seen, noised, coding),
        partial(measure, seen, sizes),
        partial(sampled_levels, seen, coding, how["stride"]),
    ]
    pass_ = partial(released, update, layout, NativeNoise(0, 0, 0), **how)
    return {
        "clip": (steps[0], None),
        "noise": (steps[1], None),
        "quantise": (steps[2], None),
        "measure": (steps[3], None),
        "sample the levels": (steps[4], None),
        "all of these": (lambda: [step() for step in steps], pass_),
        "encode the sample": (partial(coded_bytes, "quantized", steps[4](), layout.size), None),
        "exact sum": (partial(plain.add, seen), partial(compiled.add, seen)),
        "normal values alone": (
            lambda: SeededNoise(0, 0, 0).normal(layout.size),
            lambda: NativeNoise(0, 0, 0).normal(layout.size),
        ),
        "normal values of a board": (lambda: SecureNoise().normal(layout.size), None),
    }


def microseconds(step: Callable[[], Any] | None, turns: int) -> float | None:
    """Returns the smallest processor time of some turns."""
    if step is None:
        return None
    times = []
    for _ in range(turns):
        began = time.process_time_ns()
        step()
        times.append(time.process_time_ns() - began)
    return min(times) / 1000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--layers", type=int, nargs="+", default=MNIST_CNN, help="values of each layer")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args(arguments)
    rows: list[Figures] = [
        {
            "stage": name,
            "NumPy, us": microseconds(plain, options.turns),
            "compiled, us": microseconds(fast, options.turns),
        }
        for name, (plain, fast) in stages_of(options.layers).items()
    ]
    table(f"{sum(options.layers):,} values, microseconds of processor time a client", rows)
    write(options, {"layers": list(options.layers), "stages": rows})


if __name__ == "__main__":
    main()
