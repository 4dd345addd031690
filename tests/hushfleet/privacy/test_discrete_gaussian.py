"""The sampler of integers against probabilities computed with 100 digits."""

from __future__ import annotations

import bisect
from decimal import Decimal, localcontext
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import PrivacyError
from hushfleet.privacy import discrete_gaussian
from hushfleet.privacy.discrete_gaussian import LARGEST_STD, DiscreteGaussian
from hushfleet.privacy.noise import SecureNoise, SeededNoise

WORD = 1 << 64
NEAR = 1 << (256 - 140)


class Written:
    """Words that were written down: the leading word of each sample, then the further words of those in doubt."""

    def __init__(self, *drawn: int) -> None:
        parts = [[(each >> shift) % WORD for shift in (192, 128, 64, 0)] for each in drawn]
        self._calls = [[part[0] for part in parts], *(part[1:] for part in parts)]
        self.calls = 0

    def normal(self, size: int) -> np.ndarray:
        raise AssertionError("no floating point here")

    def words(self, count: int) -> np.ndarray:
        found = np.array(self._calls[self.calls], np.uint64)
        self.calls += 1
        assert len(found) == count
        return found


def cumulative(variance: float, reach: int) -> list[int]:
    """2^256 P(X <= x) for x = -reach .. reach, of the discrete Gaussian itself."""
    with localcontext(prec=100):
        weights = [(-Decimal(x * x) / (2 * Decimal(variance))).exp() for x in range(-reach, reach + 1)]
        total = sum(weights)
        return [int(part / total * (1 << 256)) for part in accumulate(weights)]


@pytest.mark.parametrize("variance", [1.0, 9.0, 12.3125, 90.25])
def test_each_integer_has_its_interval_to_140_bits(variance):
    sampler, reach = DiscreteGaussian(variance), int(20 * variance**0.5) + 20
    for x, edge in enumerate(cumulative(variance, reach), start=-reach):
        for drawn, expected in ((edge - NEAR, x), (edge + NEAR, x + 1)):
            if abs(x) < 8 * variance**0.5 and 0 <= drawn < 1 << 256:
                assert sampler.sample(1, Written(drawn)).tolist() == [expected]


@given(st.integers(NEAR, (1 << 256) - NEAR))  # the tails beyond are cut
def test_any_number_gives_the_integer_of_its_interval(drawn):
    edges = cumulative(10.0, 60)
    (found,) = DiscreteGaussian(10.0).sample(1, Written(drawn)).tolist()
    least, most = (bisect.bisect_right(edges, drawn + off) - 60 for off in (-NEAR, NEAR))
    assert least <= found <= most


@pytest.mark.parametrize("thresholds", [[1 << 62], [(1 << 62) - 1], [(1 << 62) + 1], [5, 6, 1 << 63, (1 << 64) - 1]])
def test_the_table_decides_only_where_no_threshold_is(thresholds, monkeypatch):
    leading = np.array(thresholds, np.uint64)
    monkeypatch.setattr(discrete_gaussian, "_leading", lambda variance: leading)
    guide = discrete_gaussian._guide.__wrapped__(1.0)
    bits = 64 - (len(guide) - 1).bit_length()
    for threshold in thresholds:
        assert guide[threshold >> bits] == discrete_gaussian._UNDECIDED
    first = np.arange(len(guide), dtype=np.uint64) << np.uint64(bits)
    for words in (first, first + np.uint64((1 << bits) - 1)):
        expected = np.searchsorted(leading, words, side="right") - len(leading) // 2
        assert ((guide == expected) | (guide == discrete_gaussian._UNDECIDED)).all()
    assert (guide == discrete_gaussian._UNDECIDED).sum() == len({threshold >> bits for threshold in thresholds})


def test_only_samples_in_doubt_draw_more_words():
    source = Written(0, cumulative(10.0, 60)[62], 1 << 255)
    found = DiscreteGaussian(10.0).sample(3, source)
    assert source.calls == 3  # the first and the second, whose leading words equal a threshold's
    assert found[0] < -40
    assert found[2] == 0


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(0, 1, 2)])
def test_samples_have_the_mean_and_the_spread(source):
    std, count = 500.0, 200_000
    found = DiscreteGaussian(std**2).sample(count, source)
    assert found.dtype == np.int64
    assert abs(found.mean()) < 5 * std / count**0.5
    assert abs(found.var() / std**2 - 1) < 5 * (2 / count) ** 0.5


def test_frequencies_are_the_probabilities():
    count = 200_000
    found = DiscreteGaussian(9.0).sample(count, SeededNoise(3, 0, 0))
    edges = np.array([each / (1 << 256) for each in cumulative(9.0, 60)])
    expected = np.diff(edges)[60 - 9 : 60 + 8] * count
    seen = np.array([np.count_nonzero(found == x) for x in range(-8, 9)])
    assert np.sum((seen - expected) ** 2 / expected) < 17 + 6 * (2 * 17) ** 0.5


@pytest.mark.parametrize("variance", [0.0, 0.5, (2 * LARGEST_STD) ** 2, float("nan")])
def test_a_spread_without_a_table_is_refused(variance):
    with pytest.raises(PrivacyError, match="standard deviation"):
        DiscreteGaussian(variance)


def test_seeded_words_repeat_and_secure_words_do_not():
    assert np.array_equal(SeededNoise(1, 2, 3).words(5), SeededNoise(1, 2, 3).words(5))
    assert not np.array_equal(SecureNoise().words(5), SecureNoise().words(5))
