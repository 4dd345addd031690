"""Measures what a simulated client costs from the clipping to the exact sum, step by step in NumPy and compiled.

    python -m benchmarks.release

The smallest processor time of some turns, in one thread, for the layers of `mnist-cnn`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import make_parser, table, write
from hushfleet.aggregator.payloads.decoding import measure
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.models import get_model
from hushfleet.models.native import NativeNoise
from hushfleet.models.native.release import add_scaled, released
from hushfleet.privacy.clipping import clip
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.coded_size import coded_bytes, sample_stride, sampled_levels
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of

KEY, TURNS = bytes(16), 20


def steps_of(network: str) -> dict[str, Callable[[], Any]]:
    """Returns the steps, each with what the one before it gives."""
    layout, mechanism = get_model(network).layout, GaussianMechanism(0.02)
    update = (np.random.default_rng(0).standard_normal(layout.size) * 0.01).astype(np.float32)
    counts, stride = [span.size for span in layout.layers], sample_stride(layout.size)
    stds = mechanism.vector_stds(np.ones(len(counts)))
    coding, codec = Coding(counts, stds.tolist(), KEY), codec_of("quantized")
    clipped = clip(update, 1.0)
    noised = mechanism.add_noise(clipped, stds, SeededNoise(0, 0, 0), layout=layout)
    seen = codec.seen(noised, coding)
    levels = sampled_levels(seen, coding, stride)
    how = {"mask": None, "bounds": np.ones(1), "stds": stds, "steps": coding.steps, "stride": stride}
    return {
        "clip": lambda: clip(update, 1.0),
        "noise": lambda: mechanism.add_noise(clipped, stds, SeededNoise(0, 0, 0), layout=layout),
        "quantise": partial(codec.seen, noised, coding),
        "measure": partial(measure, seen, counts),
        "sample of the levels": partial(sampled_levels, seen, coding, stride),
        "all of these, compiled": lambda: released(
            update[None], layout, NativeNoise(0, 0, 0).stream, dither_keys=KEY, **how
        ),
        "exact sum": partial(ExactSum(layout.size).add, seen),
        "exact sum, compiled": partial(ExactSum(layout.size, add_small=add_scaled).add, seen),
        "size of the sample's code": partial(coded_bytes, "quantized", levels, layout.size),
        "normal values alone": lambda: SeededNoise(0, 0, 0).normal(layout.size),
        "normal values alone, compiled": lambda: NativeNoise(0, 0, 0).normal(layout.size),
    }


def microseconds(step: Callable[[], Any]) -> float:
    times = []
    for _ in range(TURNS):
        began = time.process_time_ns()
        step()
        times.append(time.process_time_ns() - began)
    return min(times) / 1000


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser(__doc__ or "").parse_args(arguments)
    found = {name: microseconds(step) for name, step in steps_of("mnist-cnn").items()}
    table("Microseconds of processor time a client", [{"step": name, "us": each} for name, each in found.items()])
    write(options, {"microseconds": found})


if __name__ == "__main__":
    main()
