"""The compiled optimizers against NumPy's, to the last bit. Without a C compiler, the reason is checked and said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hushfleet.array_api import BLOCK
from hushfleet.learning.optim import make_optimizer
from hushfleet.models import native

FORMS = [("adam", 0.0), ("sgd", 0.0), ("sgd", 0.9)]
STEPS = 12

any_bits = st.integers(0, 2**32 - 1)  # every float32 there is: denormals, infinities and NaN included


@pytest.fixture(autouse=True)
def compiler(need_compiler):
    need_compiler()


def assert_same_bits(ours: np.ndarray, numpys: np.ndarray) -> None:
    """Zeros of one sign; NaN where NaN is (which of the many NaN, IEEE 754 leaves open)."""
    assert ours.dtype == numpys.dtype == np.float32
    assert np.array_equal(np.isnan(ours), np.isnan(numpys))
    ours, numpys = (np.where(np.isnan(array), np.float32(0), array) for array in (ours, numpys))
    assert np.array_equal(ours.view(np.uint32), numpys.view(np.uint32))


def walk_both(name: str, momentum: float, learning_rate: float, start: np.ndarray, gradients: list[np.ndarray]) -> None:
    ours, numpys = start.copy(), start.copy()
    by_c = native.make_native_optimizer(name, learning_rate, momentum)
    by_numpy = make_optimizer(name, learning_rate, momentum)
    for gradient in gradients:
        kept = gradient.copy()
        with np.errstate(all="ignore"):
            by_numpy.step(numpys, gradient)
        assert by_c.step(ours, gradient) is None
        assert_same_bits(ours, numpys)
        assert kept.tobytes() == gradient.tobytes()
    if name == "adam":
        assert by_c.steps == by_numpy.steps == len(gradients)
        assert_same_bits(by_c.first, by_numpy.first)
        assert_same_bits(by_c.second, by_numpy.second)
    elif momentum:
        assert_same_bits(by_c.velocity, by_numpy.velocity)


@pytest.mark.parametrize(("name", "momentum"), FORMS)
@settings(max_examples=60)
@given(
    bits=st.integers(1, 70).flatmap(lambda size: arrays(np.uint32, (4, size), elements=any_bits)),
    learning_rate=st.floats(1e-8, 10),
)
def test_whatever_the_bits(name, momentum, bits, learning_rate):
    start, *gradients = bits.view(np.float32)
    walk_both(name, momentum, learning_rate, start, gradients * 3)


@pytest.mark.parametrize("size", [1, 15, 17, BLOCK - 1, 2 * BLOCK + 5])
@pytest.mark.parametrize(("name", "momentum"), FORMS)
def test_many_steps_of_gradients_of_all_sizes(name, momentum, size):
    rng = np.random.default_rng(size)
    start = rng.standard_normal(size, np.float32)
    scales = 10.0 ** rng.uniform(-42, 15, size)
    gradients = [(rng.standard_normal(size) * scales).astype(np.float32) for _ in range(STEPS)]
    for gradient in gradients:
        gradient[rng.random(size) < 0.05] = -0.0
    walk_both(name, momentum, 1e-3, start, gradients)


@pytest.mark.parametrize(("name", "momentum"), FORMS)
def test_a_cohort_of_rows(name, momentum):
    rng = np.random.default_rng(0)
    start, gradient = rng.standard_normal((2, 3, 40), np.float32)
    walk_both(name, momentum, 0.1, start, [gradient, -gradient])


@pytest.mark.parametrize(("name", "momentum"), FORMS)
def test_arrays_that_c_cannot_read_are_refused(name, momentum):
    optimizer = native.make_native_optimizer(name, 0.1, momentum)
    params = np.zeros(6, np.float32)
    sealed = np.zeros(6, np.float32)
    sealed.flags.writeable = False
    refused = [
        (params, np.zeros(5, np.float32), "of one shape"),
        (params, np.zeros(6), "float32"),
        (params.astype(np.float64), np.zeros(6), "float32"),
        (params, np.zeros(12, np.float32)[::2], "contiguous"),
        (params, params, "memory of its own"),
        (sealed, params, "writeable"),
    ]
    for target, gradient, text in refused:
        with pytest.raises(ValueError, match=text):
            optimizer.step(target, gradient)
    assert not params.any()
