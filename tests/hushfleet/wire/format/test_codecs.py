"""The registry of codecs: what each value says of itself is true, so that nobody needs to test for its name."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from hushfleet.errors import Malformed, PrivacyError
from hushfleet.wire.format.codec import Codec, Coding
from hushfleet.wire.format.codecs import NAMES, codec_of, codecs, max_bytes, steps_for
from hushfleet.wire.format.spec import WireSpec

COUNTS = [700, 0, 3300]
NOISE = np.random.default_rng(0).standard_normal(4000).astype(np.float32)


@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: codec.name)
def test_a_codec_is_as_it_says(codec: Codec) -> None:
    steps = steps_for(WireSpec(codec=codec.name), noise_stds=[1.0] * 3, layer_rms=[])
    assert len(steps) == (0 if codec.step_of is None else 3)
    coding, sent = Coding(COUNTS, steps, bytes(16)), np.empty_like(NOISE)
    data = codec.encode(NOISE, coding, sent)
    out = np.empty_like(NOISE)
    assert codec.decode(data, coding, out) is out
    assert out.tobytes() == codec.decode(data, coding, None).tobytes() == codec.seen(NOISE, coding).tobytes()
    assert out.tobytes() == sent.tobytes()
    assert len(data) <= codec.max_bytes(NOISE.size) <= max_bytes(NOISE.size)
    if codec.bits is not None:
        assert 8 * len(data) == codec.bits * NOISE.size
    # the mean square of noise of deviation 1 and of what the codec adds, within five standard errors
    added = codec.added_variance(steps[0] if steps else 0.0, 1.0)
    assert np.square(sent, dtype=np.float64).mean() == pytest.approx(1 + added, abs=5 * (2 / NOISE.size) ** 0.5)
    norms = {float(np.linalg.norm(codec.seen(scale * NOISE, coding))) for scale in (np.float32(1), np.float32(0.5))}
    assert (len(norms) == 2) == codec.keeps_norm
    if codec.needs_noise:
        with pytest.raises(PrivacyError, match=codec.needs_noise):
            steps_for(WireSpec(codec=codec.name), noise_stds=[0.0] * 3, layer_rms=[1.0] * 3)


def test_masked_values_are_not_coded_here() -> None:
    assert (*(codec.name for codec in codecs()), "masked") == NAMES
    with pytest.raises(Malformed, match="secure aggregation"):
        codec_of("masked").decode(b"", Coding([0], [], bytes(16)), None)


def normal_cdf(x: npt.ArrayLike) -> np.ndarray:
    """Without SciPy, which boards lack."""
    return np.vectorize(lambda each: 0.5 * math.erfc(-each / math.sqrt(2)), otypes=[float])(x)


def codes(codec: str, step: float, mean: float) -> np.ndarray:
    """How probable each code of a value in noise of deviation 1 is; codes of neighbouring values are neighbours."""
    borders = [0.0] if codec == "one-bit" else step * (np.arange(-20, 20) + 0.5)
    return np.diff(normal_cdf(np.array([-np.inf, *borders, np.inf]) - mean))


def excess(codec: str, step: float, *, others: list[float], shift: float, mean: float) -> float:
    """By how much readers of a sum of codes tell two values of one device apart, over what the sum of all noise allows.

    Both are the largest probability that an epsilon fails, where it is 1e-9 or more.
    """
    rest = np.ones(1)
    for each in others:
        rest = np.convolve(rest, codes(codec, step, each))
    without, with_it = (np.convolve(rest, codes(codec, step, each)) for each in (mean, mean + shift))
    mu, worst = shift / (len(others) + 1) ** 0.5, 0.0
    for epsilon in np.linspace(0, 6 * mu + mu * mu, 25):
        allowed = normal_cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * normal_cdf(-mu / 2 - epsilon / mu)
        for p, q in ((without, with_it), (with_it, without)):
            if allowed > 1e-9:
                worst = max(worst, np.maximum(p - np.exp(epsilon) * q, 0).sum() / allowed)
    return worst


@pytest.mark.parametrize(
    ("codec", "step"), [("quantized", 0.5), ("quantized", 1.0), ("quantized", 3.0), ("one-bit", 1.0)]
)
def test_all_noise_of_a_sum_hides_a_device_only_where_the_code_is_fine(codec: str, step: float) -> None:
    """The other devices' values are the worst for it: in the middle of a step, or all of one sign."""
    worst = max(
        excess(
            codec, step, others=[place * (shift if codec == "one-bit" else step)] * (count - 1), shift=shift, mean=mean
        )
        for shift in (0.1, 0.5, 1.0, 4.0)
        for count in (2, 3, 8)
        for place in (0.0, 0.5, 1.0)
        for mean in (0.0, 0.5 * step)
    )
    assert (worst <= 1) == (step <= codec_of(codec).sums_noise_to)
    assert worst <= 1 or worst > 10


def test_floats_are_finer_than_any_noise() -> None:
    assert [codec.name for codec in codecs() if codec.sums_noise_to == np.inf] == ["float16", "float32"]
