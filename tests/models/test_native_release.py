"""The compiled release against NumPy's path of many steps, to the last bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.array_api import blocks
from hushfleet.errors import PrivacyError
from hushfleet.models.native import NativeNoise
from hushfleet.models.native.release import add_scaled, released
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import clip, clip_layers
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.coded_size import sampled_levels
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of

KEY = bytes(range(16))


@pytest.fixture(autouse=True)
def compiler(need_compiler):
    need_compiler()


def layout_of(sizes: list[int]) -> ParamLayout:
    return ParamLayout(tuple(f"l{i}.w" for i in range(len(sizes))), tuple((size,) for size in sizes))


def plain(
    values: np.ndarray,
    layout: ParamLayout,
    noise: SeededNoise,
    *,
    mask: np.ndarray | None,
    bounds: np.ndarray | None,
    stds: np.ndarray,
    steps: list[float],
    sums: ExactSum,
    weight: float,
) -> tuple[np.ndarray, list[float], list[float]]:
    if bounds is not None:
        values = clip(values, bounds[0]) if len(bounds) == 1 else clip_layers(values, layout, bounds)
    shared = None if mask is None else ~mask
    noised = GaussianMechanism(float(stds.any())).add_noise(values, stds, noise, where=shared, layout=layout)
    masks = np.ones(layout.size, bool) if shared is None else shared
    counts = [int(np.count_nonzero(masks[span.start : span.stop])) for span in layout.layers]
    seen = codec_of("quantized" if steps else "float32").seen(noised[masks], Coding(counts, steps, KEY))
    whole = np.zeros(layout.size, np.float32)
    whole[masks] = seen
    sums.add(whole, shared, weight=weight)
    layers = np.split(seen, np.cumsum(counts)[:-1])
    squares = [
        math.fsum(float(np.square(layer[part], dtype=np.float64).sum()) for part in blocks(layer)) for layer in layers
    ]
    return seen, [float(np.abs(layer).max(initial=0)) for layer in layers], squares


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    large = st.sampled_from([127, 1000, 32767, 32768, 33001, 70001])
    sizes = draw(st.lists(st.integers(1, 300) | large, min_size=1, max_size=5))
    layers = len(sizes)
    bounded = draw(st.sampled_from(["none", "whole", "layers"]))
    bound = st.floats(1e-3, 1e3) | st.just(math.inf)
    positive = st.floats(1e-4, 10)
    noisy, quantised = draw(st.booleans()), draw(st.booleans())
    many = {"min_size": layers, "max_size": layers}
    return {
        "sizes": sizes,
        "seed": draw(st.integers(0, 1 << 40)),
        "kept": draw(st.sampled_from([None, 0.0, 0.3, 0.97, "layer", "all"])),
        "scale": 10.0 ** draw(st.integers(-6, 1)),
        "bounds": {
            "none": lambda: None,
            "whole": lambda: [draw(bound)],
            "layers": lambda: draw(st.lists(bound, **many)),
        }[bounded](),
        "stds": draw(st.lists(positive, **many)) if noisy else [0.0] * layers,
        "steps": draw(st.lists(positive, **many)) if quantised else [],
        "weight": draw(st.sampled_from([1.0, 0.3, 3.75])),
        "drawn": draw(st.integers(0, 300)),
        "stride": draw(st.sampled_from([1, 2, 7, 50_000])),
    }


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_the_same_bits_as_numpy(case):
    layout, rng = layout_of(case["sizes"]), np.random.default_rng(case["seed"])
    values = (rng.standard_normal(layout.size) * case["scale"]).astype(np.float32)
    mask = None if case["kept"] is None else np.zeros(layout.size, bool)
    if case["kept"] == "layer":
        mask[layout.layers[-1].start :] = True
    elif case["kept"] == "all":
        mask[:] = True
    elif mask is not None:
        mask = rng.random(layout.size) < case["kept"]
    if mask is not None:
        values[mask] = 0
    bounds = None if case["bounds"] is None else np.array(case["bounds"])
    stds, steps = np.array(case["stds"]), case["steps"]
    noises = SeededNoise(case["seed"], 1, 2), NativeNoise(case["seed"], 1, 2)
    for noise in noises:
        noise.normal(case["drawn"])
    sums, weight = ExactSum(layout.size), case["weight"]
    how = {"mask": mask, "bounds": bounds, "stds": stds, "steps": steps}
    seen, peaks, squares = plain(values, layout, noises[0], sums=sums, weight=weight, **how)
    stride = case["stride"]
    got = released(values, layout, noises[1], dither_key=KEY, stride=stride, **how)
    ours = ExactSum(layout.size, add_small=add_scaled)
    whole = np.zeros(layout.size, np.float32)
    whole[... if mask is None else ~mask] = got.values
    ours.add(whole, weight=weight)
    assert np.array_equal(ours.sums, sums.sums)
    assert got.values.tobytes() == seen.tobytes()
    assert got.measured == (tuple(peaks), tuple(squares))
    if steps:
        shared = np.ones(layout.size, bool) if mask is None else ~mask
        counts = [int(np.count_nonzero(shared[span.start : span.stop])) for span in layout.layers]
        assert np.array_equal(got.levels, sampled_levels(seen, Coding(counts, steps, KEY), stride))
    assert noises[0].normal(5).tobytes() == noises[1].normal(5).tobytes()


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(fault):
    layout, values = layout_of([5, 40]), np.ones(45, np.float32)
    values[7] = fault
    how = {"mask": None, "stds": np.ones(2), "steps": [], "dither_key": KEY, "stride": 1}
    for bounds in (np.array([1.0]), np.array([1.0, 1.0])):
        with pytest.raises(PrivacyError, match="not finite"):
            released(values, layout, NativeNoise(0, 0, 0), bounds=bounds, **how)
