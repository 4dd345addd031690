"""Sums of integers with noise: round trips, the norm after rounding, and the privacy that is claimed for it."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hushfleet.errors import PrivacyError
from hushfleet.privacy.gaussian import epsilon_of_gaussian
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.ring import Ring, Scale, least_bits, scale_for
from hushfleet.privacy.ring_length import is_slow, smooth_length
from hushfleet.secure.prime_field import PRIMES

KEY = bytes(range(16))


def ring_of(
    size: int, *, devices: int = 10, bits: int = 16, multiplier: float = 0.0, clip_norm: float = 2.0, more: int = 0
) -> Ring:
    return Ring(
        prime=PRIMES[bits],
        clip_norm=clip_norm,
        noise_multiplier=multiplier,
        honest_devices=max(1, devices // 2),
        devices=devices,
        size=size,
        length=size + more,
        key=KEY,
    )


def update(size: int, seed: int, norm: float = 2.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=size)
    return (values * (norm / np.linalg.norm(values))).astype(np.float32)


def summed(ring: Ring, encoded: list[np.ndarray]) -> np.ndarray:
    return (np.sum(encoded, axis=0, dtype=np.int64) % ring.prime).astype(np.uint32)


@given(
    size=st.integers(1, 60),
    devices=st.integers(2, 12),
    seed=st.integers(0, 99),
    bits=st.sampled_from([16, 24, 32]),
    more=st.integers(0, 9),
)
def test_without_noise_the_sum_is_that_of_the_values(size, devices, seed, bits, more):
    ring = ring_of(size, devices=devices, bits=bits, more=more)
    updates = [update(size, seed + device, norm=1.999) for device in range(devices)]
    total = summed(ring, [ring.encode(each, SeededNoise(seed, i, 0)) for i, each in enumerate(updates)])
    # each value is off by less than a step, so that the norm of the error is below devices x sqrt(size) of them
    error = ring.decode(total) - np.sum(updates, axis=0, dtype=float)
    assert np.linalg.norm(error) < ring.unit * devices * math.sqrt(size + more)
    assert ring.suspected_wraps(total) == 0


@pytest.mark.parametrize("more", [0, 100])
def test_the_noise_of_a_sum_is_what_was_asked_for(more):
    devices, size, multiplier = 40, 4000, 8.92
    ring = ring_of(size, devices=devices, multiplier=multiplier, more=more)
    updates = [update(size, device, norm=1.999) for device in range(devices)]
    total = summed(ring, [ring.encode(each, SeededNoise(7, i, 0)) for i, each in enumerate(updates)])
    error = ring.decode(total) - np.sum(updates, axis=0, dtype=float)
    expected = 2.0 * multiplier * math.sqrt(2) * (1 + ring.scale.extra)  # twice as many as are counted on
    assert error.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * size))
    assert ring.suspected_wraps(total) == 0


@given(size=st.integers(1, 80), more=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_longer_ring_is_that_of_values_with_zeros(size, more, seed):
    ring, whole = ring_of(size, multiplier=3.0, more=more), ring_of(size + more, multiplier=3.0)
    values, zeros = update(size, seed, norm=1.999), np.zeros(more, np.float32)
    integers = ring.encode(values, SeededNoise(seed, 0, 0))
    assert ring.scale == whole.scale
    assert integers.tolist() == whole.encode(np.append(values, zeros), SeededNoise(seed, 0, 0)).tolist()
    assert ring.decode(integers).tolist() == whole.decode(integers)[:size].tolist()
    # the rotation by its matrix
    angles = 2 * np.pi * np.outer(range(size + more), range(size + more)) / (size + more)
    matrix = (np.cos(angles) + np.sin(angles)) / math.sqrt(size + more)
    centred = np.where(integers > ring.prime // 2, integers.astype(int) - ring.prime, integers)
    slow = (whole._signs * (matrix @ (centred * ring.unit)))[:size]
    np.testing.assert_allclose(ring.decode(integers), slow, atol=1e-9)


@given(size=st.integers(1, 40_000))
def test_the_length_is_the_next_one_with_small_factors(size):
    def left(number):
        for factor in (2, 3, 5, 7):
            while number % factor == 0:
                number //= factor
        return number

    length = size
    while left(length) > 1:
        length += 1
    assert smooth_length(size) == length


@pytest.mark.parametrize(
    ("size", "slow"), [(4_890, False), (21_840, False), (44_426, True), (582_026, True), (583_200, False)]
)
def test_which_lengths_are_slow(size, slow):
    assert is_slow(size) is slow


def test_a_device_without_an_update_sends_noise_alone():
    ring = ring_of(2000, multiplier=4.0)
    found = ring.decode(ring.encode(np.zeros(2000), SeededNoise(0, 0, 0)))
    assert found.std() == pytest.approx(2.0 * 4.0 / math.sqrt(5), rel=0.1)
    assert not ring_of(2000).encode(np.zeros(2000), SeededNoise(0, 0, 0)).any()


def test_rounding_is_right_on_average():
    ring, values = ring_of(20, bits=16), update(20, 1, norm=1.9)
    mean = np.mean([ring.decode(ring.encode(values, SeededNoise(seed, 0, 0))) for seed in range(2000)], axis=0)
    assert np.abs(mean - values).max() < 5 * 0.5 * ring.unit / math.sqrt(2000)


@given(size=st.integers(1, 300), seed=st.integers(0, 99))
def test_after_rounding_the_norm_is_within_the_bound(size, seed):
    ring = ring_of(size, devices=2000, more=seed % 9)
    encoded = ring.encode(update(size, seed, norm=2.0 * (1 - 1e-7)), SeededNoise(seed, 0, 0)).astype(np.int64)
    centred = np.where(encoded > ring.prime // 2, encoded - ring.prime, encoded)
    assert int(centred @ centred) <= ring.scale.bound


class Upwards:
    """A source that rounds every value up, so many times, and then down."""

    def __init__(self, times: int) -> None:
        self.times = times

    def words(self, count: int) -> np.ndarray:
        self.times -= 1
        return np.full(count, 0 if self.times >= 0 else (1 << 64) - 1, np.uint64)


def test_a_rounding_beyond_the_bound_is_drawn_again():
    ring = ring_of(50, devices=3000)
    values = ring.decode(np.ones(50, np.uint32))  # once rotated, all are one step
    values *= 2.0 * (1 - 1e-9) / np.linalg.norm(values)
    each = ring.scale.steps / math.sqrt(50)
    assert 50 * math.ceil(each) ** 2 > ring.scale.bound
    upwards = Upwards(2)
    encoded = ring.encode(values, upwards).astype(np.int64)
    centred = np.where(encoded > ring.prime // 2, encoded - ring.prime, encoded)
    assert int(centred @ centred) <= ring.scale.bound
    with pytest.raises(PrivacyError, match="no rounding"):
        ring.encode(values, Upwards(10_000))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.full(8, 1.0), "above the clip norm"),
        (np.array([np.nan] + [0.0] * 7), "finite"),
        (np.array([np.inf] + [0.0] * 7), "finite"),
        (np.zeros(9), "8 finite values"),
    ],
)
def test_what_was_not_clipped_does_not_leave(values, reason):
    with pytest.raises(PrivacyError, match=reason):
        ring_of(8).encode(values, SeededNoise(0, 0, 0))


def test_values_far_beyond_what_was_said_are_suspected_to_have_wrapped():
    ring = ring_of(400, devices=4, multiplier=1.0)
    total = summed(ring, [ring.encode(update(400, 1, norm=1.999), SeededNoise(0, i, 0)) for i in range(4000)])
    assert ring.suspected_wraps(total) > 10


@given(
    multiplier=st.floats(0.3, 60),
    devices=st.integers(2, 3000),
    honest=st.floats(0.1, 1.0),
    size=st.integers(1, 200_000),
    bits=st.sampled_from([16, 24, 32]),
)
def test_the_noise_over_the_sensitivity_is_the_multiplier(multiplier, devices, honest, size, bits):
    counted = max(1, int(honest * devices))
    try:
        scale = scale_for(
            prime=PRIMES[bits], noise_multiplier=multiplier, honest_devices=counted, devices=devices, size=size
        )
    except PrivacyError:
        assume(False)
    assert scale.multiplier >= multiplier
    assert scale.multiplier == pytest.approx(multiplier, rel=1e-9)
    assert scale.variance >= 9 * counted
    # conditional rounding of a vector of norm C: their bound on the square norm, with beta = exp(-1/2)
    steps = scale.steps
    assert steps**2 + size / 4 + steps + math.sqrt(size) / 2 == pytest.approx(scale.bound, rel=1e-9)
    spread = math.sqrt(scale.bound * devices**2 / size + scale.variance * devices / counted + devices / 4)
    assert 6.5 * spread <= PRIMES[bits] / 2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("devices", "size", "multiplier", "bits"),
    [(100, 5130, 8.92, 16), (1000, 5130, 8.92, 16), (10_000, 5130, 8.92, 24), (100, 1_200_000, 8.92, 24)],
)
def test_so_many_bits_are_enough(devices, size, multiplier, bits):
    numbers = {"noise_multiplier": multiplier, "honest_devices": int(0.8 * devices), "devices": devices, "size": size}
    assert least_bits(PRIMES, **numbers) == bits
    assert scale_for(prime=PRIMES[bits], **numbers).extra < 0.01


def test_a_ring_that_is_too_small_is_refused():
    numbers = {"honest_devices": 50, "devices": 100, "size": 1000}
    with pytest.raises(PrivacyError, match="do not fit"):
        scale_for(prime=97, noise_multiplier=1.0, **numbers)
    with pytest.raises(PrivacyError, match="steps each, and at least 3 are needed"):
        scale_for(prime=PRIMES[16], noise_multiplier=1e-4, **numbers)
    with pytest.raises(PrivacyError, match="no ring is fine enough"):
        least_bits({16: PRIMES[16]}, noise_multiplier=8.9, honest_devices=1, devices=10**5, size=10)
    with pytest.raises(PrivacyError, match="clip norm"):
        ring_of(5, clip_norm=math.inf)


# the promise


def of_sum(variance: float, parts: int) -> np.ndarray:
    """Probabilities of a sum of discrete Gaussians, `variance` together, on -K .. K."""
    reach = math.ceil(14 * math.sqrt(variance / parts))
    one = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance / parts))
    one /= one.sum()
    found = one
    for _ in range(parts - 1):
        found = np.convolve(found, one)
    return found


def told_apart(probabilities: np.ndarray, shift: tuple[int, ...], epsilon: float) -> float:
    """The least delta at `epsilon` for noise alone and noise moved by `shift`, a value each, by adding up."""
    room = max(shift)
    noise, moved = np.ones(1), np.ones(1)
    for each in shift:
        plain = np.pad(probabilities, (room, room))
        noise = np.multiply.outer(noise, plain).ravel()
        moved = np.multiply.outer(moved, np.roll(plain, each)).ravel()
    return float(np.maximum(moved - math.exp(epsilon) * noise, 0).sum())


def claimed(scale: Scale, epsilon: float) -> float:
    mu = 1 / scale.multiplier

    def normal(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("std", "parts"), [(5.2, 3), (8.0, 2), (15.0, 2)])
@pytest.mark.parametrize("bound", [1, 4, 13, 25])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_no_neighbours_are_told_apart_better_than_is_claimed(std, parts, bound, dimensions):
    scale = Scale(steps=1.0, bound=bound, variance=std**2, extra=0.0)
    probabilities = of_sum(std**2, parts)
    reach = range(math.isqrt(bound) + 1)
    shifts = [shift for shift in product(reach, repeat=dimensions) if 0 < sum(x * x for x in shift) <= bound]
    for epsilon in (0.01, 0.1, 0.5, 1.0, 2.0):
        worst = max(told_apart(probabilities, shift, epsilon) for shift in shifts)
        assert worst <= claimed(scale, epsilon) + 1e-13


def test_the_claim_is_not_loose():
    scale = Scale(steps=1.0, bound=25, variance=15.0**2, extra=0.0)
    found = epsilon_of_gaussian(1 / scale.multiplier, 1e-5)
    probabilities = of_sum(scale.variance, 3)
    assert told_apart(probabilities, (5,), found) <= 1e-5
    assert told_apart(probabilities, (5,), 0.97 * found) > 1e-5
