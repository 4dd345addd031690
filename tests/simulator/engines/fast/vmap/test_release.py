"""A group's release as arrays has the bits of each client's own code: clip, noise, codec, sum and measured norms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.decoding import _square
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import _sum_of_squares, clip, clip_layers
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.coded_size import sample_places, sampled_levels
from hushfleet.simulator.engines.fast.vmap import philox, release
from hushfleet.simulator.engines.fast.vmap.pairwise import row_sums, squares
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.quantized import QUANTIZED
from hushfleet.wire.format.quantized import dither as dither_of
from support.accelerator import TORCH_DEVICES

SIZES = (0, 1, 7, 8, 9, 127, 128, 129, 136, 1000, 32769, 582026, (1 << 20) + 3)


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_rows_have_the_bits_of_numpys(size: int, device: str) -> None:
    x = np.random.default_rng(size).standard_normal((3, size))
    rows = torch.from_numpy(x).to(device)
    np.testing.assert_array_equal(row_sums(rows).cpu(), [np.sum(row) for row in x])
    values, begin = x.astype(np.float32), size // 3
    found = squares(rows.float(), begin, size).cpu()
    np.testing.assert_array_equal(found, [_sum_of_squares(row, begin, size) for row in values])


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=3), st.integers(1, 200))
def test_the_dither_has_the_bits_of_the_codecs(keys: list[bytes], size: int) -> None:
    found = philox.dither(keys, size, torch.device(TORCH_DEVICES[-1])).cpu()
    np.testing.assert_array_equal(found, [dither_of(key, size) for key in keys])


@pytest.mark.parametrize("size", [1, 127, 128, 129, 100_000])
def test_the_noise_has_the_bits_of_numpys(size: int, device: str) -> None:
    found = philox.normals([SeededNoise(3, index, 2) for index in range(3)], size, torch.device(device))
    np.testing.assert_array_equal(found.double().cpu(), [SeededNoise(3, index, 2).normal(size) for index in range(3)])


def one_by_one(
    end: np.ndarray, start: np.ndarray, terms: release.ReleaseTerms, layout: ParamLayout, personal: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """The values that a client sends, float32 `[k]`, by the code of a device alone; and how many of each layer."""
    update = np.where(personal, np.float32(0), end - start)
    clipped = clip(update, terms.bounds[0]) if len(terms.bounds) == 1 else clip_layers(update, layout, terms.bounds)
    mechanism = GaussianMechanism(float(terms.stds.any()))
    values = mechanism.add_noise(clipped, terms.stds, terms.noise, where=~personal, layout=layout)[~personal]
    counts = [int(np.count_nonzero(~personal[span.start : span.stop])) for span in layout.layers]
    if terms.steps is not None:
        values = QUANTIZED.seen(values, Coding(counts, terms.steps.tolist(), terms.dither_key))
    return values, counts


class How(NamedTuple):
    """What differs between methods and tasks."""

    by_layer: bool
    noise: bool
    codec: str


def terms_of(rng: np.random.Generator, index: int, layers: int, how: How) -> release.ReleaseTerms:
    bounds = rng.uniform(0.01, 2, layers if how.by_layer else 1)
    stds = rng.uniform(1e-4, 1, layers) if how.noise else np.zeros(layers)
    steps = rng.uniform(1e-3, 1, layers).astype(np.float32) if how.codec == "quantized" else None
    return release.ReleaseTerms(bounds, stds, steps, rng.bytes(16), SeededNoise(3, index, 1))


HOWS = st.builds(How, st.booleans(), st.booleans(), st.sampled_from(["quantized", "float32"]))


@pytest.mark.parametrize("on", TORCH_DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300) | st.just(40000), min_size=1, max_size=4),
    count=st.integers(1, 5),
    how=HOWS,
    share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1 << 32),
    bad=st.sampled_from([None, np.nan, np.inf, 3e38]),
)
def test_a_group_is_released_as_each_client_alone(
    sizes: list[int], count: int, how: How, share: float, seed: int, bad: float | None, on: str
) -> None:
    rng = np.random.default_rng(seed)
    layout = ParamLayout(tuple(f"{n}.w" for n in range(len(sizes))), tuple((size,) for size in sizes))
    personal = rng.random(layout.size) < share
    start = rng.standard_normal(layout.size).astype(np.float32)
    ends = start + rng.uniform(0, 0.2) * rng.standard_normal((count, layout.size)).astype(np.float32)
    personal[0] = False
    if bad is not None:
        ends[0, 0] = bad
    sent_by_layer = [int((~(personal & bool(share)))[span.start : span.stop].sum()) for span in layout.layers]
    clients = [terms_of(np.random.default_rng(seed + n), n, len(sizes), how) for n in range(count)]
    again = [terms_of(np.random.default_rng(seed + n), n, len(sizes), how) for n in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(release.PIECE_BYTES, on, 1 << 21)  # a few clients at once
        found = release.release(
            torch.from_numpy(ends).to(on),
            torch.from_numpy(start).to(on),
            clients,
            layout,
            personal=torch.from_numpy(personal).to(on) if share else None,
            sampled=torch.from_numpy(sample_places(sent_by_layer, 3)).to(on),
            keeps_sent=True,
        )
    assert found.sent is not None
    exact = ExactSum(int((~personal).sum()) if share else layout.size)
    for row, terms in enumerate(again):
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                values, counts = one_by_one(ends[row], start, terms, layout, personal & bool(share))
        except PrivacyError:
            assert row == 0
            assert bad is not None
            assert found.refused[row]
            assert not found.sent[row].any()
            continue
        assert not found.refused[row]
        np.testing.assert_array_equal(found.sent[row], values)
        if terms.steps is not None:
            coding = Coding(counts, terms.steps.tolist(), terms.dither_key)
            np.testing.assert_array_equal(found.levels[row], sampled_levels(values, coding, 3))
        layers = np.split(values, np.cumsum(counts)[:-1])
        np.testing.assert_array_equal(found.peaks[row], [np.abs(each).max(initial=0) for each in layers])
        np.testing.assert_array_equal(found.squares[row], [_square(each) for each in layers])
        exact.add(values)
    np.testing.assert_array_equal(found.total.cpu(), exact._low)
