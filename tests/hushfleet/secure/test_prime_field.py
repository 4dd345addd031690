"""Arrays modulo a prime against whole numbers of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import BadInput
from hushfleet.secure import prime_field
from hushfleet.secure.masking import Keystream
from hushfleet.secure.prime_field import PRIMES

BITS = st.sampled_from([16, 24, 32])
SEEDS = st.integers(0, 2**32 - 1)


def drawn(seed: int, prime: int, *shape: int) -> np.ndarray:
    """Many of them at the border, where a product is largest."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, prime, shape)
    return np.where(rng.random(shape) < 0.5, prime - 1, values).astype(np.uint32)


def test_primes_are_the_largest_of_their_width() -> None:
    def is_prime(n: int) -> bool:
        return all(pow(base, n - 1, n) == 1 for base in (2, 3, 5, 7, 11, 13)) and all(n % d for d in range(2, 50_000))

    for bits, prime in PRIMES.items():
        largest = next(n for n in range((1 << min(bits, 31)) - 1, 2, -1) if is_prime(n))
        assert prime == largest


@given(BITS, SEEDS, st.integers(1, 5), st.integers(1, 200), st.integers(0, 40))
def test_product_is_that_of_whole_numbers(bits: int, seed: int, rows: int, terms: int, count: int) -> None:
    prime = PRIMES[bits]
    matrix, columns = drawn(seed, prime, rows, terms), drawn(seed + 1, prime, terms, count)
    expected = matrix.astype(object) @ columns.astype(object) % prime
    assert (prime_field.product(matrix, columns, prime) == expected).all()


def test_product_in_blocks() -> None:
    prime = PRIMES[32]
    matrix, columns = drawn(1, prime, 2, 3), drawn(2, prime, 3, 20_001)
    assert (prime_field.product(matrix, columns, prime) == matrix.astype(object) @ columns.astype(object) % prime).all()


@given(BITS, SEEDS, st.integers(0, 20))
def test_sums_and_differences(bits: int, seed: int, count: int) -> None:
    prime = PRIMES[bits]
    one, other = drawn(seed, prime, count), drawn(seed + 1, prime, count)
    total = one.copy()
    prime_field.add_into(total, other, prime)
    assert total.tolist() == [(a + b) % prime for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    prime_field.subtract_from(total, other, prime)
    assert total.tolist() == one.tolist()


@given(BITS, SEEDS, st.integers(1, 12), st.integers(1, 12))
def test_interpolation_continues_a_polynomial(bits: int, seed: int, degree: int, targets: int) -> None:
    prime, rng = PRIMES[bits], np.random.default_rng(seed)
    coefficients = [int(c) for c in rng.integers(0, prime, degree)]
    at = [int(x) for x in rng.choice(100, degree, replace=False) - 20]
    to = [int(x) for x in rng.choice(100, targets, replace=False) - 50]  # some may be among `at`

    def value(x: int) -> int:
        return sum(c * x**power for power, c in enumerate(coefficients)) % prime

    known = np.array([[value(x)] for x in at], np.uint32)
    made = prime_field.product(prime_field.interpolation(at, to, prime), known, prime)
    assert made[:, 0].tolist() == [value(x) for x in to]


@given(BITS, SEEDS, st.integers(0, 30))
def test_bytes_and_back(bits: int, seed: int, count: int) -> None:
    values = drawn(seed, PRIMES[bits], count)
    data = prime_field.to_bytes(values, bits)
    assert len(data) == count * bits // 8
    assert prime_field.from_bytes(data, bits).tolist() == values.tolist()


@pytest.mark.parametrize(("data", "words"), [(b"\xf1\xff", "65521 is not below"), (b"\0\0\0", "whole number")])
def test_bytes_that_are_no_values(data: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        prime_field.from_bytes(data, 16)


@settings(max_examples=30)
@given(BITS, st.lists(st.integers(0, 5000), max_size=6))
def test_a_stream_is_the_same_in_any_pieces(bits: int, pieces: list[int]) -> None:
    stream, prime = Keystream(bytes(32), PRIMES[bits]), PRIMES[bits]
    taken = [stream.take(count) for count in pieces]
    whole = Keystream(bytes(32), prime).take(sum(pieces))
    assert np.concatenate([*taken, np.zeros(0, np.uint32)]).tolist() == whole.tolist()


@pytest.mark.parametrize("prime", [5, PRIMES[16], PRIMES[32]])
def test_a_stream_is_uniform(prime: int) -> None:
    """A word modulo 5 would give 0 to 2 more often, by 33 deviations."""
    values = Keystream(b"k" * 32, prime).take(200_000)
    counts = np.bincount(values.astype(np.int64) * 5 // prime, minlength=5)
    assert abs(counts - 40_000).max() < 6 * 179
