"""The compiled noise against NumPy's, to the last bit. Without a C compiler, the reason is checked and said."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import HushfleetError
from hushfleet.models.native import NativeNoise, noise
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast import runtimes

keys = st.tuples(st.integers(0, 2**64), st.integers(0, 2**31), st.integers(0, 2**31))
asked = st.lists(st.tuples(st.sampled_from(["normal", "words"]), st.integers(0, 300)), max_size=8)


@pytest.fixture(autouse=True)
def compiler(need_compiler):
    need_compiler()


@settings(max_examples=60)
@given(key=keys, asked=asked)
def test_whatever_is_asked_for(key, asked):
    ours, numpys = NativeNoise(*key), SeededNoise(*key)
    for kind, size in asked:
        drawn, expected = (getattr(source, kind)(size) for source in (ours, numpys))
        assert drawn.dtype == expected.dtype
        assert drawn.tobytes() == expected.tobytes()


def test_millions_of_values():
    """All edges of the layers are met, and the tail: one value in 3,700 is from there."""
    ours, numpys = NativeNoise(1, 2, 3), SeededNoise(1, 2, 3)
    for _ in range(8):
        drawn = ours.normal(1 << 20)
        assert drawn.tobytes() == numpys.normal(1 << 20).tobytes()
        assert np.count_nonzero(np.abs(drawn) > 3.6541528853610088) > 100


def test_a_copy_goes_on_alike():
    ours = NativeNoise(1, 2, 3)
    ours.normal(1000)
    other = copy.deepcopy(ours)
    assert other.normal(1000).tobytes() == ours.normal(1000).tobytes()


def test_a_numpy_that_draws_others_is_not_followed(monkeypatch):
    """NumPy's own noise is taken then, and the results are that NumPy's."""
    monkeypatch.setattr(noise, "library", noise.library.__wrapped__)
    monkeypatch.setattr(runtimes, "_has_compiled_noise", runtimes._has_compiled_noise.__wrapped__)
    assert isinstance(runtimes.make_noise(0, 0, 0), NativeNoise)
    monkeypatch.setattr(noise, "_drawn", lambda draw, stream, out: np.zeros_like(out))
    with pytest.raises(HushfleetError, match=r"draws other normal values"):
        NativeNoise(0, 0, 0)
    assert type(runtimes.make_noise(0, 0, 0)) is SeededNoise
