"""Noise sources, judged statistically: every bound is wide enough for under one false alarm in a million."""

from __future__ import annotations

import hashlib
import math
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from hushfleet.privacy.noise import SecureNoise, SeededNoise, _box_muller_groups, _minus_log, _sums_of_box_muller

COUNT = 400_000
BLOCK = 2 << 12  # values of one block


def distance_from_normal(values: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest gap between the empirical and the standard normal distribution."""
    ordered = np.sort(values)
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())


def widest_gap(count: int) -> float:
    """Dvoretzky-Kiefer-Wolfowitz: P(gap > g) <= 2 exp(-2 n g^2), here 1e-7."""
    return math.sqrt(math.log(2 / 1e-7) / (2 * count))


@pytest.fixture(scope="module", params=["secure", "seeded"])
def sample(request) -> np.ndarray:
    source = SecureNoise() if request.param == "secure" else SeededNoise(1, 2, 3)
    return source.normal(COUNT)


def test_moments(sample):
    # standard errors: 1, sqrt 2, sqrt 15, sqrt 96 over sqrt n; six of them are passed once in 5e8
    error = 6 / math.sqrt(COUNT)
    assert abs(sample.mean()) < error
    assert abs((sample**2).mean() - 1) < error * math.sqrt(2)
    assert abs((sample**3).mean()) < error * math.sqrt(15)
    assert abs((sample**4).mean() - 3) < error * math.sqrt(96)


def test_distribution(sample):
    assert distance_from_normal(sample) < widest_gap(COUNT)


def test_the_test_itself_sees_a_wrong_distribution(sample):
    assert distance_from_normal(sample * 1.03) > widest_gap(COUNT)
    assert distance_from_normal(sample + 0.03) > widest_gap(COUNT)


def test_tails(sample):
    # 0.27 % beyond three: 1080 of 400,000 with a standard deviation of 33; none beyond seven (1e-6 chance)
    assert abs(np.count_nonzero(np.abs(sample) > 3) - 1080) < 6 * 33
    assert np.abs(sample).max() < 7


@pytest.mark.parametrize("lag", [1, 2, 64, 128, BLOCK // 2, BLOCK])
def test_neighbours_and_halves_of_a_block_are_uncorrelated(sample, lag):
    a, b = sample[:-lag], sample[lag:]
    assert abs((a * b).mean()) < 6 / math.sqrt(len(a))
    assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 6 * 2 / math.sqrt(len(a))


@pytest.mark.parametrize("size", [0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_any_size(size):
    for source in (SecureNoise(), SeededNoise(0, 0, 0)):
        values = source.normal(size)
        assert values.shape == (size,)
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        # float32 values of a simulation, of which a few are equal by chance
        assert size - len(np.unique(values)) <= (5 if isinstance(source, SeededNoise) else 0)


def test_two_secure_sources_never_agree():
    source = SecureNoise()
    copies = [source.normal(5000), source.normal(5000), SecureNoise().normal(5000)]
    copies.append(pickle.loads(pickle.dumps(source)).normal(5000))
    assert len(np.unique(np.concatenate(copies))) == 20_000


def test_a_forked_process_does_not_repeat_the_parent():
    script = (
        "import os, sys\n"
        "from hushfleet.privacy.noise import SecureNoise\n"
        "source = SecureNoise(); source.normal(10)\n"
        "child = os.fork()\n"
        "os.write(1, source.normal(100).tobytes())\n"
        "os._exit(0) if child == 0 else os.waitpid(child, 0)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert len(np.unique(np.frombuffer(out))) == 200


def test_temporary_memory_is_bounded():
    source = SecureNoise()
    source.normal(10)
    tracemalloc.start()
    try:
        values = source.normal(1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - values.nbytes < 2 << 20


def box_muller(words: np.ndarray) -> tuple[float, float]:
    """The two sums of one column of words `[2, summands]`, from the definition."""
    first = second = 0.0
    for radius_word, angle_word in words.T.tolist():
        radius = math.sqrt(-2 * math.log(((radius_word >> 11) + 1) / 2**53))
        angle = math.pi / 2 * (angle_word >> 11) / 2**53
        first += math.copysign(radius, -1 if angle_word & 1 << 10 else 1) * math.cos(angle)
        second += math.copysign(radius, -1 if angle_word & 1 << 9 else 1) * math.sin(angle)
    return first / 2, second / 2


def test_box_muller_is_the_definition():
    words = np.random.default_rng(3).integers(0, 2**64, (2, 4, 500), dtype=np.uint64)
    words[0, :, 0] = 0  # the largest radius
    words[0, :, 1] = np.uint64(2**64 - 1)  # radius 0
    words[1, :, 2] = 0  # on an axis
    words[1, :, 3] = np.uint64(2**64 - 1)  # a hair from one, in the third quadrant
    expected = [box_muller(words[:, :, column]) for column in range(500)]
    np.testing.assert_allclose(np.array(_sums_of_box_muller(words)).T, expected, rtol=0, atol=1e-14)


def test_every_word_matters():
    words = np.random.default_rng(5).integers(0, 2**64, (2, 4, 1), dtype=np.uint64)
    base = np.concatenate(_sums_of_box_muller(words.copy()))
    for index in np.ndindex(2, 4):
        changed = words.copy()
        changed[(*index, 0)] ^= np.uint64(1 << 62)
        assert np.all(np.concatenate(_sums_of_box_muller(changed)) != base), index


@pytest.mark.parametrize(("bit", "coordinate"), [(10, 0), (9, 1)])
def test_the_quadrant_is_drawn(bit, coordinate):
    words = np.random.default_rng(5).integers(0, 2**64, (2, 4, 1), dtype=np.uint64)
    base = np.concatenate(_sums_of_box_muller(words.copy()))
    words[1] ^= np.uint64(1 << bit)
    base[coordinate] *= -1
    np.testing.assert_array_equal(np.concatenate(_sums_of_box_muller(words)), base)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("0" * 64, "0" * 32, "16554d9eca36314cdb20fe9d672d0fdcd7e772cee186176b7e68b68aec7ba23b"),
        ("f" * 64, "f" * 32, "87b092c3013fe90b438c3c67be8d02249cc7d7c69cd777b6a09caebf594f0ba0"),
        (
            "243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89",
            "452821e638d01377be5466cf34e90c6c",
            "a528f45403e61d9538c72dbd566e9788a5a1610e72fd18b557bd43b5e52b7fe6",
        ),
    ],
)
def test_the_words_are_those_of_philox_4x64_10(counter, key, words):
    """Random123's known answers (kat_vectors), the lowest word first."""

    def number(text: str) -> int:
        return sum(int(text[at : at + 16], 16) << 4 * at for at in range(0, len(text), 16))

    before = (number(counter) - 1) % (1 << 256)  # NumPy counts before it draws
    drawn = np.random.Philox(counter=before, key=number(key)).random_raw(4)
    assert "".join(f"{word:016x}" for word in drawn.tolist()) == words
    assert isinstance(SeededNoise(0, 0, 0).generator, np.random.Philox)


def test_seeded_box_muller_is_the_definition():
    words = np.random.default_rng(3).integers(0, 2**32, (500, 2, 64), dtype=np.uint32)
    words[0] = [[0], [0]]  # the largest radius
    words[1] = [[2**32 - 1], [2**32 - 1]]  # radius 0
    words[2, 1], words[3, 1] = 2**31 - 1, 2**31  # on the axes
    uniform = np.float64(((words[:, 0] >> np.uint32(1)) + 0.5).astype(np.float32)) * 2.0**-31
    radius, turn = np.sqrt(-2 * np.log(uniform)), words[:, 1].view(np.int32)
    angle = math.pi / 4 + (turn >> 2) * (math.pi / 4 * 2.0**-29)
    signs = 1 - 2.0 * (turn & 1), 1 - 2.0 * (turn >> 1 & 1)
    expected = np.stack([signs[0] * radius * np.cos(angle), signs[1] * radius * np.sin(angle)], axis=1)
    drawn = _box_muller_groups(words.view(np.uint64).reshape(-1))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.reshape(expected.shape), expected, rtol=0, atol=2e-6)
    assert np.abs(drawn).max() < 6.7


def test_the_logarithm_is_right_at_all_magnitudes():
    x = np.concatenate([2.0**-n * np.linspace(1, 2, 999, endpoint=False) for n in range(1, 33)]).astype(np.float32)
    np.testing.assert_allclose(_minus_log(x.copy()), -np.log(x.astype(np.float64)), rtol=3e-7)
    assert _minus_log(np.ones(1, np.float32)) == 0


def test_a_seed_gives_the_same_values_on_every_machine():
    drawn = SeededNoise(1, 2, 3).normal(100_000).astype("<f8").tobytes()
    assert hashlib.sha256(drawn).hexdigest()[:16] == "edf7865dc72e22e1"


@pytest.mark.parametrize("other", [(1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 3, 2)])
def test_seeded_streams_are_independent(other):
    ours, theirs = SeededNoise(1, 2, 3).normal(COUNT), SeededNoise(*other).normal(COUNT)
    assert abs((ours * theirs).mean()) < 6 / math.sqrt(COUNT)
    assert abs(((ours**2 - 1) * (theirs**2 - 1)).mean()) < 6 * 2 / math.sqrt(COUNT)
    assert distance_from_normal((ours + theirs) / math.sqrt(2)) < widest_gap(COUNT)


def test_seeded_noise_depends_on_its_three_keys_alone():
    base = SeededNoise(1, 2, 3).normal(1000)
    np.testing.assert_array_equal(SeededNoise(1, 2, 3).normal(1000), base)
    for other in (SeededNoise(2, 2, 3), SeededNoise(1, 3, 3), SeededNoise(1, 2, 4), SeededNoise(1, 3, 2)):
        assert np.intersect1d(other.normal(1000), base).size <= 2


def test_seeded_noise_does_not_depend_on_the_size_of_calls():
    whole, pieces = SeededNoise(9, 0, 0).normal(1000), SeededNoise(9, 0, 0)
    np.testing.assert_array_equal(np.concatenate([pieces.normal(n) for n in (1, 333, 0, 666)]), whole)
