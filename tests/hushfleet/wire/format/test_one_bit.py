"""The one-bit form against a slow reading of its definition, and what it does to signal and noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import Malformed, NotFinite, PrivacyError
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of, steps_for
from hushfleet.wire.format.one_bit import ONE_BIT, VARIANCE_FACTOR, magnitude
from hushfleet.wire.format.spec import WireSpec

KEY = bytes(16)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=70),
    st.integers(0, 70),
    st.sampled_from([0, 1 << 16, (1 << 16) - 3]),
)
def test_a_bit_a_value_and_its_layers_magnitude_back(values: list[float], first: int, before: int) -> None:
    x = np.array([1.0] * before + values, np.float32)
    counts = [min(first, x.size), 0, max(0, x.size - first)]
    out = np.empty(x.size, np.float32)
    coding = Coding(counts, [0.5, 7.0, 0.1], KEY)
    data = ONE_BIT.encode(x, coding, out)
    bits = "".join("1" if value < 0 else "0" for value in x.tolist())
    expected = bytes(int(bits[at : at + 8].ljust(8, "0"), 2) for at in range(0, len(bits), 8))
    assert data == expected
    assert ONE_BIT.decode(data, coding, None).tobytes() == out.tobytes()
    sizes = np.repeat(np.array([0.5, 7.0, 0.1], np.float32), counts)
    assert out.tolist() == [-size if value < 0 else size for value, size in zip(x, sizes, strict=True)]


def test_gain_is_one_and_the_variance_is_as_stated() -> None:
    """A signal of a tenth of the noise; the mean of n signs has a standard error of 1.25 noise / sqrt(n)."""
    n, std, signal = 1_000_000, 0.7, 0.07
    noised = (signal + std * np.random.default_rng(1).standard_normal(n)).astype(np.float32)
    out = np.empty(n, np.float32)
    ONE_BIT.encode(noised, Coding([n], [magnitude(std)], KEY), out)
    assert out.mean(dtype=np.float64) == pytest.approx(signal, abs=4 * 1.26 * std / math.sqrt(n))
    assert out.var(dtype=np.float64) == pytest.approx(VARIANCE_FACTOR * std**2, rel=0.01)
    added = codec_of("one-bit").added_variance(magnitude(std), std)
    assert std**2 + added == pytest.approx(1.5708 * std**2, rel=1e-4)


def test_quantisation_adds_what_it_says() -> None:
    assert codec_of("quantized").added_variance(0.6, 9.0) == pytest.approx(0.03)
    assert codec_of("float16").added_variance(0.0, 1.0) == codec_of("float32").added_variance(0.0, 1.0) == 0


@pytest.mark.parametrize(
    ("data", "counts"), [(b"", [1]), (b"\0\0", [8]), (b"\0", [9]), (b"\x01", [7]), (b"\xff\x40", [9]), (b"\0", [0])]
)
def test_signs_that_do_not_fit_are_malformed(data: bytes, counts: list[int]) -> None:
    with pytest.raises(Malformed):
        ONE_BIT.decode(data, Coding(counts, [1.0], KEY), None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_finite_values_have_a_sign(bad: float) -> None:
    with pytest.raises(NotFinite):
        ONE_BIT.encode(np.array([1.0, bad], np.float32), Coding([2], [1.0], KEY), np.empty(2, np.float32))


def test_steps_follow_the_noise_or_the_values() -> None:
    stds, rms = [0.5, 2.0], [3.0, 0.0]
    assert steps_for(WireSpec(step=0.25), noise_stds=stds, layer_rms=rms) == (0.125, 0.5)
    assert steps_for(WireSpec(relative_step=0.1), noise_stds=[0, 0], layer_rms=rms) == pytest.approx((0.3, 2.0**-100))
    assert steps_for(WireSpec("one-bit"), noise_stds=stds, layer_rms=rms) == (magnitude(0.5), magnitude(2.0))
    assert steps_for(WireSpec("float16"), noise_stds=stds, layer_rms=rms) == ()
    with pytest.raises(PrivacyError, match="no noise"):
        steps_for(WireSpec("one-bit"), noise_stds=[0, 0], layer_rms=rms)
