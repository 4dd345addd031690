"""Exact sums: any order, any batching, one result; a NumPy oracle with Python's whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aggregator.accumulator import MAX_MAGNITUDE, ExactSum
from hushfleet.errors import Malformed

WIDTH = 5
finite = st.floats(min_value=-MAX_MAGNITUDE, max_value=MAX_MAGNITUDE, width=32)
updates = st.lists(st.tuples(npst.arrays(np.float32, WIDTH, elements=finite), npst.arrays(bool, WIDTH)), max_size=40)


def whole(value: np.float32) -> int:
    """The nearest whole number of 2^-40, ties to even, by exact fractions."""
    return round(Fraction(float(value)) * 2**40)


def total(items: list[tuple[np.ndarray, np.ndarray]]) -> ExactSum:
    sums = ExactSum(WIDTH)
    for values, shared in items:
        sums.add(values[shared], shared)
    return sums


@settings(max_examples=150, deadline=None)
@given(items=updates, random=st.randoms(use_true_random=False))
def test_sums_equal_whole_number_arithmetic_in_every_order(
    items: list[tuple[np.ndarray, np.ndarray]], random: object
) -> None:
    expected = [sum(whole(v[i]) for v, shared in items if shared[i]) for i in range(WIDTH)]
    counts = [sum(bool(shared[i]) for _, shared in items) for i in range(WIDTH)]
    first = total(items)
    random.shuffle(items)
    second = total(items)
    for sums in (first, second):
        assert [sums.exact(i) for i in range(WIDTH)] == expected
        assert sums.counts.tolist() == counts
        assert sums.updates == len(items)
        # int / int is correctly rounded in Python, as float(Fraction) is
        assert sums.sums.tolist() == [float(Fraction(n, 2**40)) for n in expected]


def test_many_updates_at_the_limit_do_not_overflow() -> None:
    sums = ExactSum(2)
    for _ in range(50):
        sums.add(np.array([MAX_MAGNITUDE, -MAX_MAGNITUDE], np.float32))
    assert sums.sums.tolist() == [50 * 2.0**20, -50 * 2.0**20]
    assert sums.exact(0) == 50 * 2**60 > 2**63
    sums.add(np.array([2.0**-40, 2.0**-40], np.float32))
    assert sums.exact(0) == 50 * 2**60 + 1
    assert sums.exact(1) == -50 * 2**60 + 1


def test_values_below_the_resolution_are_rounded_half_to_even() -> None:
    sums = ExactSum(4)
    sums.add(np.array([0.5, 1.5, -0.5, 0.75], np.float32) * np.float32(2.0**-40))
    assert [sums.exact(i) for i in range(4)] == [0, 2, 0, 1]


def test_only_shared_entries_are_added_and_counted() -> None:
    sums = ExactSum(3)
    sums.add(np.array([1, 2, 3], np.float32))
    sums.add(np.array([10], np.float32), np.array([False, True, False]))
    sums.add(np.zeros(0, np.float32), np.zeros(3, bool))
    assert sums.sums.tolist() == [1, 12, 3]
    assert sums.counts.tolist() == [1, 2, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**20 + 1, -(2.0**21)])
def test_a_value_that_cannot_be_added_leaves_the_sums_alone(bad: float) -> None:
    sums = ExactSum(3)
    sums.add(np.array([1, 2, 3], np.float32))
    with pytest.raises(Malformed, match="largest value"):
        sums.add(np.array([1, bad, 1], np.float32))
    assert sums.sums.tolist() == [1, 2, 3]
    assert sums.counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        (np.zeros(2, np.float32), None),
        (np.zeros(3, np.float64), None),
        (np.zeros((1, 3), np.float32), None),
        (np.zeros(2, np.float32), np.ones(3, bool)),
        (np.zeros(2, np.float32), np.ones(2, bool)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(values: np.ndarray, shared: np.ndarray | None) -> None:
    sums = ExactSum(3)
    with pytest.raises(Malformed):
        sums.add(values, shared)
    assert sums.updates == 0


def test_an_input_vector_is_not_changed_and_may_be_read_only() -> None:
    values = np.array([1, 2, 3], np.float32)
    values.setflags(write=False)
    sums = ExactSum(3)
    sums.add(values)
    sums.add(values)
    assert sums.sums.tolist() == [2, 4, 6]
    assert values.tolist() == [1, 2, 3]


def test_long_vectors_are_walked_in_blocks() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(3, 100_003)).astype(np.float32)
    sums = ExactSum(100_003)
    for row in values:
        sums.add(row)
    expected = np.rint(values.astype(np.float64) * 2**40).astype(np.int64).sum(axis=0) / 2**40
    assert np.array_equal(sums.sums.numpy(), expected)


weights_of = st.floats(min_value=2**-18, max_value=4.0)


@settings(max_examples=60, deadline=None)
@given(items=st.lists(st.tuples(updates.map(lambda u: u[:1]), weights_of), max_size=12), random=st.randoms())
def test_weighted_sums_are_exact_in_every_order(items: list, random: object) -> None:
    weighed = [(*update[0], round(weight * 2**20) / 2**20) for update, weight in items if update]

    def total_of() -> ExactSum:
        sums = ExactSum(WIDTH)
        for values, shared, weight in weighed:
            sums.add(values[shared], shared, weight=weight)
        return sums

    first = total_of()
    random.shuffle(weighed)
    second = total_of()
    for sums in (first, second):
        for i in range(WIDTH):
            mine = [(v[i], Fraction(w)) for v, shared, w in weighed if shared[i]]
            assert sums.exact(i) == sum(round(Fraction(float(v)) * w * 2**40) for v, w in mine)
            assert sums.weights[i] == float(sum(w for _, w in mine))


def test_a_weight_counts_what_came_before_it_once() -> None:
    sums, one = ExactSum(2), np.array([1.0, 2.0], np.float32)
    sums.add(one)
    sums.add(one, weight=0.5)
    assert sums.sums.tolist() == [1.5, 3.0]
    assert sums.weights.tolist() == [1.5, 1.5]
    assert sums.counts.tolist() == [2, 2]


@pytest.mark.parametrize("weight", [0.0, -1.0, 2.0**-22, 4.5])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    sums = ExactSum(1)
    with pytest.raises(Malformed, match="weight"):
        sums.add(np.ones(1, np.float32), weight=weight)
    assert sums.updates == 0
