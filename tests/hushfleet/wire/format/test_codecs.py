"""The registry of codecs: what each value says of itself is true, so that nobody needs to test for its name."""

from __future__ import annotations

import numpy as np
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
