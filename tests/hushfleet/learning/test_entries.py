"""Entries of the vector, and clipped means of them against a loop over clients and samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hushfleet.learning.entries import ALL, Entries, mean_of_clipped
from hushfleet.params import ParamLayout

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight", "c.weight"), ((2,), (1,), (3,), (2,)))

# The mask, its span, whether it fills that, whether it is whole layers.
MASKS = {
    "11111111": (slice(0, 8), True, True),
    "11100000": (slice(0, 3), True, True),
    "00011100": (slice(3, 6), True, True),
    "00011111": (slice(3, 8), True, True),
    "00000001": (slice(7, 8), True, False),
    "11000000": (slice(0, 2), True, False),
    "11100011": (slice(0, 8), False, False),
    "00000000": (slice(0, 0), True, False),
}


def bits(text: str) -> np.ndarray:
    return np.array([char == "1" for char in text])


@pytest.mark.parametrize(("mask", "expected"), MASKS.items())
def test_what_a_mask_is(mask: str, expected: tuple[slice, bool, bool]) -> None:
    for array in (bits(mask), torch.from_numpy(np.stack([bits(mask)] * 2))):
        entries = Entries.of(array, LAYOUT)
        assert (entries.span, entries.fills, entries.layers) == expected
    gradient = np.arange(1, 9, dtype=np.float32)
    kept, whole = Entries.of(bits(mask), LAYOUT).keep(gradient), np.zeros(8)
    whole[expected[0]] = kept
    np.testing.assert_array_equal(whole, np.arange(1, 9) * bits(mask))


def test_no_mask_is_the_whole_vector() -> None:
    assert Entries.of(None, LAYOUT) is ALL
    gradient = np.ones(8)
    assert ALL.keep(gradient).tolist() == [1] * 8


def test_clients_parts_share_one_span() -> None:
    entries = Entries.of(torch.from_numpy(np.stack([bits("00011100"), bits("00000011")])), LAYOUT)
    assert (entries.span, entries.fills, entries.layers) == (slice(3, 8), False, False)


@pytest.mark.parametrize("masks", [("00011111", "00011111"), ("10110010", "01100100"), ("00011100", "00000011")])
def test_clipped_means_are_those_of_a_loop(masks: tuple[str, str]) -> None:
    """The second client has one sample less, and a third, whose mask is still there, has finished."""
    rng = np.random.default_rng(0)
    each = rng.normal(size=(2, 4, 8)).astype(np.float32)
    each[1, 3] = 0
    stacked = torch.from_numpy(np.stack([*map(bits, masks), bits("11111111")]))
    sizes, seen, out = torch.tensor([4, 3]), [], torch.full((2, 8), torch.nan)

    def bound_of(norms):
        seen.append(norms.clone())
        return norms.amax(-1, keepdim=True) / 2

    entries = Entries(stacked, Entries.of(stacked[:2], LAYOUT).span, Entries.of(stacked[:2], LAYOUT).fills)
    mean_of_clipped(torch.from_numpy(each.copy()), sizes, bound_of, entries, out)
    for client, count in enumerate((4, 3)):
        mask = bits(masks[client])
        norms = [np.linalg.norm(row[mask]) for row in each[client]]
        np.testing.assert_allclose(seen[0][client], norms, rtol=1e-6)
        factors = [min(1, max(norms) / 2 / norm) for norm in norms[:count]]
        expected = sum(f * row * mask for f, row in zip(factors, each[client], strict=False)) / count
        np.testing.assert_allclose(out[client], expected, rtol=1e-5, atol=1e-7)
        # one client alone, with NumPy and what a mask says by itself
        alone = np.full(8, np.nan, np.float32)
        own, bound = Entries.of(mask, LAYOUT), max(norms) / 2
        mean_of_clipped(each[client, :count].copy(), np.int64(count), lambda _, b=bound: b, own, alone)
        np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-7)
