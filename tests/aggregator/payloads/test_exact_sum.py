"""Exact sums: any order, any batching, one result; a NumPy oracle with Python's whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hushfleet import array_api
from hushfleet.aggregator.payloads.decoding import MAX_MAGNITUDE
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.array_api import BLOCK, Array
from hushfleet.errors import Malformed
from support.accelerator import SUM_DEVICES

WIDTH = 5
finite = st.floats(min_value=-MAX_MAGNITUDE, max_value=MAX_MAGNITUDE, width=32)
updates = st.lists(st.tuples(npst.arrays(np.float32, WIDTH, elements=finite), npst.arrays(bool, WIDTH)), max_size=40)


MakeSum = Callable[[int], ExactSum]


@pytest.fixture(params=SUM_DEVICES)
def make_sum(request: pytest.FixtureRequest) -> MakeSum:
    return partial(ExactSum, device=request.param)


def exact(sums: ExactSum, index: int) -> int:
    """The sum at one entry as the whole number of 2^-40."""
    high = 0 if sums._high is None else int(sums._high[index])
    return (high << 32) + int(sums._low[index])


def on_host(array: Array) -> np.ndarray:
    return np.asarray(array_api.to_device(array, "cpu"))


def whole(value: np.float32) -> int:
    """The nearest whole number of 2^-40, ties to even, by exact fractions."""
    return round(Fraction(float(value)) * 2**40)


def total(make_sum: MakeSum, items: list[tuple[np.ndarray, np.ndarray]]) -> ExactSum:
    sums = make_sum(WIDTH)
    for values, shared in items:
        sums.add(np.where(shared, values, np.float32(0)), shared)
    return sums


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=updates, random=st.randoms(use_true_random=False))
def test_sums_equal_whole_number_arithmetic_in_every_order(
    make_sum: MakeSum, items: list[tuple[np.ndarray, np.ndarray]], random: object
) -> None:
    expected = [sum(whole(v[i]) for v, shared in items if shared[i]) for i in range(WIDTH)]
    counts = [sum(bool(shared[i]) for _, shared in items) for i in range(WIDTH)]
    first = total(make_sum, items)
    random.shuffle(items)
    second = total(make_sum, items)
    cut, parts = len(items) // 3, make_sum(WIDTH)
    for part in (items[:cut], items[cut:], []):
        parts.merge(total(make_sum, part))
    for sums in (first, second, parts):
        assert [exact(sums, i) for i in range(WIDTH)] == expected
        assert sums.weights.tolist() == counts
        assert sums.updates == len(items)
        # int / int is correctly rounded in Python, as float(Fraction) is
        assert sums.sums.tolist() == [float(Fraction(n, 2**40)) for n in expected]


def test_many_updates_at_the_limit_do_not_overflow(make_sum: MakeSum) -> None:
    sums = make_sum(2)
    for _ in range(50):
        sums.add(np.array([MAX_MAGNITUDE, -MAX_MAGNITUDE], np.float32))
    assert sums.sums.tolist() == [50 * 2.0**20, -50 * 2.0**20]
    assert exact(sums, 0) == 50 * 2**60 > 2**63
    sums.add(np.array([2.0**-40, 2.0**-40], np.float32))
    assert exact(sums, 0) == 50 * 2**60 + 1
    assert exact(sums, 1) == -50 * 2**60 + 1


def test_merged_sums_at_the_limit_do_not_overflow(make_sum: MakeSum) -> None:
    values = np.array([MAX_MAGNITUDE, -MAX_MAGNITUDE], np.float32)
    sums, expected = make_sum(2), make_sum(2)
    for count in (3, 0, 7, 40, 1):
        part = make_sum(2)
        for _ in range(count):
            part.add(values)
            expected.add(values)
        sums.merge(part)
    assert sums.sums.tolist() == expected.sums.tolist() == [51 * 2.0**20, -51 * 2.0**20]
    assert exact(sums, 0) == 51 * 2**60
    assert (sums.updates, sums.weights.tolist()) == (51, [51, 51])


def test_values_below_the_resolution_are_rounded_half_to_even(make_sum: MakeSum) -> None:
    sums = make_sum(4)
    sums.add(np.array([0.5, 1.5, -0.5, 0.75], np.float32) * np.float32(2.0**-40))
    assert [exact(sums, i) for i in range(4)] == [0, 2, 0, 1]


def test_only_shared_entries_are_added_and_counted(make_sum: MakeSum) -> None:
    sums = make_sum(3)
    sums.add(np.array([1, 2, 3], np.float32))
    sums.add(np.array([0, 10, 0], np.float32), np.array([False, True, False]))
    sums.add(np.zeros(3, np.float32), np.zeros(3, bool))
    assert sums.sums.tolist() == [1, 12, 3]
    assert sums.weights.tolist() == [1, 2, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**20 + 1, -(2.0**21)])
def test_a_value_that_cannot_be_added_leaves_the_sums_alone(make_sum: MakeSum, bad: float) -> None:
    sums = make_sum(3)
    sums.add(np.array([1, 2, 3], np.float32))
    with pytest.raises(Malformed, match="largest value"):
        sums.add(np.array([1, bad, 1], np.float32))
    assert sums.sums.tolist() == [1, 2, 3]
    assert sums.weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        (np.zeros(2, np.float32), None),
        (np.zeros(3, np.float64), None),
        (np.zeros((1, 3), np.float32), None),
        (np.zeros(2, np.float32), np.ones(3, bool)),
        (np.zeros(3, np.float32), np.ones(2, bool)),
        (np.zeros(3, np.float32), np.array([1, 1, 0], np.uint8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(values: np.ndarray, shared: np.ndarray | None) -> None:
    sums = ExactSum(3)
    with pytest.raises(Malformed):
        sums.add(values, shared)
    assert sums.updates == 0


def test_an_input_vector_is_not_changed_and_may_be_read_only(make_sum: MakeSum) -> None:
    values = np.array([1, 2, 3], np.float32)
    values.setflags(write=False)
    sums = make_sum(3)
    sums.add(values)
    sums.add(values)
    assert sums.sums.tolist() == [2, 4, 6]
    assert values.tolist() == [1, 2, 3]


def test_long_vectors_are_walked_in_blocks(make_sum: MakeSum) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(3, 100_003)).astype(np.float32)
    sums = make_sum(100_003)
    for row in values:
        sums.add(row)
    expected = np.rint(values.astype(np.float64) * 2**40).astype(np.int64).sum(axis=0) / 2**40
    assert np.array_equal(on_host(sums.sums), expected)


weights_of = st.floats(min_value=2**-18, max_value=4.0)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.tuples(updates.map(lambda u: u[:1]), weights_of), max_size=12), random=st.randoms())
def test_weighted_sums_are_exact_in_every_order(make_sum: MakeSum, items: list, random: object) -> None:
    weighed = [(*update[0], round(weight * 2**20) / 2**20) for update, weight in items if update]

    def total_of() -> ExactSum:
        sums = make_sum(WIDTH)
        for values, shared, weight in weighed:
            sums.add(np.where(shared, values, np.float32(0)), shared, weight=weight)
        return sums

    first = total_of()
    random.shuffle(weighed)
    second = total_of()
    for sums in (first, second):
        for i in range(WIDTH):
            mine = [(v[i], Fraction(w)) for v, shared, w in weighed if shared[i]]
            assert exact(sums, i) == sum(round(Fraction(float(v)) * w * 2**40) for v, w in mine)
            assert sums.weights[i] == float(sum(w for _, w in mine))


def test_a_weight_counts_what_came_before_it_once(make_sum: MakeSum) -> None:
    sums, one = make_sum(2), np.array([1.0, 2.0], np.float32)
    sums.add(one)
    sums.add(one, weight=0.5)
    assert sums.sums.tolist() == [1.5, 3.0]
    assert sums.weights.tolist() == [1.5, 1.5]
    assert sums.updates == 2


@pytest.mark.parametrize("weight", [0.0, -1.0, 2.0**-22, 4.5])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    sums = ExactSum(1)
    with pytest.raises(Malformed, match="weight"):
        sums.add(np.ones(1, np.float32), weight=weight)
    assert sums.updates == 0


units = st.one_of(
    st.integers(-8, 8).map(lambda halves: halves / 2),
    st.integers(-(2**24), 2**24),
    st.sampled_from([2.0**51, 2.0**51 - 2.0**27, 2.0**52 + 2.0**29, 2.0**60]),
)
"""Whole numbers of 2^-40, halves of them, and what lies at the border between the two ways of rounding."""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_adding_is_whole_number_arithmetic_at_every_magnitude(make_sum: MakeSum, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 40))
    drawn = st.one_of(finite, units.map(lambda unit: float(np.float32(unit * 2.0**-40))))
    values = data.draw(npst.arrays(np.float32, size, elements=drawn))
    weight = data.draw(st.integers(1, 2**22)) / 2**20
    sums = make_sum(size)
    sums.add(np.full(size, -1, np.float32))
    sums.add(values, weight=weight)
    terms = [round(Fraction(float(value)) * Fraction(weight) * 2**40) for value in values]
    assert [exact(sums, i) for i in range(size)] == [term - 2**40 for term in terms]


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("size", [1023, 1025, 3 * BLOCK + 5])
def test_masks_over_many_blocks(make_sum: MakeSum, density: float, size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.normal(0, 100, size).astype(np.float32)
    shared = rng.random(size) < density
    sums = make_sum(size)
    sums.add(np.where(shared, values, np.float32(0)), shared)
    expected = np.where(shared, np.rint(values.astype(np.float64) * 2**40), 0)
    assert np.array_equal(on_host(sums.sums), expected / 2**40)
    assert np.array_equal(on_host(sums.weights), shared)


@pytest.mark.parametrize("place", [0, 1, 16, BLOCK, 2 * BLOCK + 2])
def test_a_value_that_cannot_be_added_is_seen_wherever_it_is(make_sum: MakeSum, place: int) -> None:
    values = np.random.default_rng(0).normal(size=2 * BLOCK + 3).astype(np.float32)
    for odd in (2.0**21, -(2.0**21), math.inf, -math.inf, math.nan, -math.nan):
        values[place] = odd
        with pytest.raises(Malformed, match="largest value"):
            make_sum(values.size).add(values)


def test_values_may_lie_anywhere_in_the_bytes(make_sum: MakeSum) -> None:
    values = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    for shift in range(1, 4):
        there = np.frombuffer(bytes(shift) + values.tobytes(), np.float32, offset=shift)
        sums = make_sum(5000)
        sums.add(there)
        sums.add(values)
        assert np.array_equal(on_host(sums.sums), 2 * np.rint(values.astype(np.float64) * 2**40) / 2**40)
