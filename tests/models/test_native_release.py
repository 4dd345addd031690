"""The compiled release against NumPy's path of many steps, to the last bit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.array_api import blocks
from hushfleet.errors import Malformed, PrivacyError
from hushfleet.methods.privatize import Bounds, clip_and_noise
from hushfleet.models.native import NativeNoise
from hushfleet.models.native.release import _squares_of, add_scaled, released
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import _sum_of_squares, clip, clip_layers
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.coded_size import sampled_levels
from hushfleet.simulator.engines.fast.compiled_release import CompiledRelease
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of, steps_for
from hushfleet.wire.format.spec import WireSpec

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
    key: bytes,
) -> tuple[np.ndarray, list[float], list[float]]:
    if bounds is not None:
        values = clip(values, bounds[0]) if len(bounds) == 1 else clip_layers(values, layout, bounds)
    shared = None if mask is None else ~mask
    noised = GaussianMechanism(float(stds.any())).add_noise(values, stds, noise, where=shared, layout=layout)
    masks = np.ones(layout.size, bool) if shared is None else shared
    counts = [int(np.count_nonzero(masks[span.start : span.stop])) for span in layout.layers]
    seen = codec_of("quantized" if steps else "float32").seen(noised[masks], Coding(counts, steps, key))
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
        "clients": draw(st.integers(1, 3)),
    }


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_the_same_bits_as_numpy(case):
    layout, rng, clients = layout_of(case["sizes"]), np.random.default_rng(case["seed"]), range(case["clients"])
    values = (rng.standard_normal((len(clients), layout.size)) * case["scale"]).astype(np.float32)
    mask = None if case["kept"] is None else np.zeros(layout.size, bool)
    if case["kept"] == "layer":
        mask[layout.layers[-1].start :] = True
    elif case["kept"] == "all":
        mask[:] = True
    elif mask is not None:
        mask = rng.random(layout.size) < case["kept"]
    if mask is not None:
        values[:, mask] = 0
    bounds = None if case["bounds"] is None else np.array(case["bounds"])
    stds, steps = np.array(case["stds"]), case["steps"]
    numpys, ours = ([kind(case["seed"], client, 2) for client in clients] for kind in (SeededNoise, NativeNoise))
    for noise in (*numpys, *ours):
        noise.normal(case["drawn"])
    streams, keys, stride = np.concatenate([noise.stream for noise in ours]), (KEY, KEY[::-1], KEY), case["stride"]
    how = {"mask": mask, "bounds": bounds, "stds": stds, "steps": steps}
    got = released(values, layout, streams, dither_keys=b"".join(keys[: len(clients)]), stride=stride, **how)
    sums, weight, added = ExactSum(layout.size), case["weight"], ExactSum(layout.size, add_small=add_scaled)
    shared = np.ones(layout.size, bool) if mask is None else ~mask
    counts = [int(np.count_nonzero(shared[span.start : span.stop])) for span in layout.layers]
    for client, noise, stream in zip(clients, numpys, np.split(streams, len(clients)), strict=True):
        how["key"] = keys[client]
        seen, peaks, squares = plain(values[client], layout, noise, sums=sums, weight=weight, **how)
        one = got.of(client)
        whole = np.zeros(layout.size, np.float32)
        whole[shared] = one.values
        added.add(whole, weight=weight)
        assert one.values.tobytes() == seen.tobytes()
        assert one.measured == (tuple(peaks), tuple(squares))
        if steps:
            assert np.array_equal(one.levels, sampled_levels(seen, Coding(counts, steps, keys[client]), stride))
        ours[client].stream[:] = stream
        assert noise.normal(5).tobytes() == ours[client].normal(5).tobytes()
    assert np.array_equal(added.sums, sums.sums)
    together, alone = np.zeros((2, len(got.values[0])), np.int64)
    add_scaled(together, got.values, 2.0**40)
    for row in got.values:
        add_scaled(alone, row, 2.0**40)
    assert np.array_equal(together, alone), "all rows in one call"


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(fault):
    layout, values = layout_of([5, 40]), np.ones(45, np.float32)
    values[7] = fault
    how = {"mask": None, "stds": np.ones(2), "steps": [], "dither_keys": KEY, "stride": 1}
    for bounds in (np.array([1.0]), np.array([1.0, 1.0])):
        with pytest.raises(PrivacyError, match="not finite"):
            released(values[None], layout, NativeNoise(0, 0, 0).stream, bounds=bounds, **how)


def test_the_norm_of_a_long_vector_is_summed_in_numpys_order():
    layout = layout_of([1_300_001])
    values = np.random.default_rng(1).standard_normal(layout.size).astype(np.float32)
    found = _squares_of(values[None], layout, np.ones(1))
    assert found == np.float64(_sum_of_squares(values, 0, layout.size))


def outcome(release: Any, context: Any, wire: WireSpec, values: np.ndarray, noise: SeededNoise, **how: Any) -> Any:
    """What the codec makes of the released values, or the kind of the refusal."""
    mechanism, layout = GaussianMechanism(float(how["stds"].any())), context.layout
    try:
        noised = release(context, values, how["bounds"], how["stds"], mechanism, noise)[~context.mask]
        if isinstance(release, CompiledRelease) and release.sent is not None:
            assert noised.tobytes() == release.sent.values.tobytes()
            return noised.tobytes()
        counts = [int(np.count_nonzero(~context.mask[span.start : span.stop])) for span in layout.layers]
        steps = steps_for(wire, noise_stds=how["stds"], layer_rms=[1.0] * len(counts))
        return codec_of(wire.codec).seen(noised, Coding(counts, steps, KEY)).tobytes()
    except (PrivacyError, Malformed) as error:
        return type(error)


sizes_of_numbers = st.floats(-130, 45).map(lambda power: 2.0**power)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1e-43, 1e-30, 1e-3, 1.0, 1e30, math.inf]),
    bounds=st.none() | st.lists(sizes_of_numbers | st.just(math.inf), min_size=1, max_size=2),
    stds=st.just([0.0, 0.0]) | st.lists(sizes_of_numbers, min_size=2, max_size=2),
    codec=st.sampled_from(["quantized", "float32", "float16", "one-bit"]),
    step=st.sampled_from([2.0**-10, 1.0, 16.0]),
    kept=st.booleans(),
    scales=st.booleans(),
)
@example(seed=0, scale=1e30, bounds=[2.0**-31], stds=[1.0, 1.0], codec="quantized", step=1.0, kept=False, scales=False)
@example(seed=0, scale=1e-30, bounds=[4.0], stds=[1.0, 1.0], codec="quantized", step=1.0, kept=False, scales=True)
@example(seed=0, scale=0.0, bounds=[4.0], stds=[1.0, 1.0], codec="quantized", step=1.0, kept=True, scales=True)
def test_whatever_the_bounds_are_it_ends_as_step_by_step(seed, scale, bounds, stds, codec, step, kept, scales):
    layout, rng = layout_of([70, 9]), np.random.default_rng(seed)
    values = (rng.standard_normal(layout.size) * scale).astype(np.float32)
    mask = (np.arange(layout.size) % 3 == 0) & kept
    values[mask] = 0
    context, wire = SimpleNamespace(layout=layout, mask=mask), WireSpec(codec=codec, step=step)
    scales = scales and bounds is not None and len(bounds) == 1
    how = {"bounds": None if bounds is None else Bounds(np.array(bounds), scales), "stds": np.array(stds)}
    with np.errstate(all="ignore"):
        expected = outcome(clip_and_noise, context, wire, values, SeededNoise(seed, 0, 0), **how)
        found = outcome(CompiledRelease(wire, KEY), context, wire, values, NativeNoise(seed, 0, 0), **how)
    assert found == expected


@pytest.mark.parametrize(
    ("codec", "stds", "done"),
    [("quantized", 0.1, True), ("float32", 0.1, True), ("quantized", 0, False), ("one-bit", 0.1, False)],
)
def test_it_is_used_with_noise_and_a_codec_that_it_knows(codec, stds, done):
    layout = layout_of([5, 4])
    context, release = (
        SimpleNamespace(layout=layout, mask=np.zeros(9, bool)),
        CompiledRelease(WireSpec(codec=codec), KEY),
    )
    how = (Bounds(np.array([1.0])), np.full(2, float(stds)), GaussianMechanism(float(stds > 0)), NativeNoise(0, 0, 0))
    release(context, np.ones(9, np.float32), *how)
    assert (release.sent is not None) == done
