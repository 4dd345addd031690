"""Exact sums: any order, any batching, one result; a NumPy oracle with Python's whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hushfleet.aggregator.ingest import exact_sum as accumulator
from hushfleet.aggregator.ingest import pinned_slots as staging
from hushfleet.aggregator.ingest.decoding import MAX_MAGNITUDE
from hushfleet.aggregator.ingest.exact_sum import ExactSum
from hushfleet.aggregator.ingest.pinned_slots import SLOTS, Staging
from hushfleet.aggregator.ingest.sum_kernels import LANES, SMALL, Addition, BlockAddition, find_addition
from hushfleet.blocks import BLOCK
from hushfleet.errors import Malformed

WIDTH = 5
finite = st.floats(min_value=-MAX_MAGNITUDE, max_value=MAX_MAGNITUDE, width=32)
updates = st.lists(st.tuples(npst.arrays(np.float32, WIDTH, elements=finite), npst.arrays(bool, WIDTH)), max_size=40)


class _Queue(ExactSum):
    """The accelerator's half, run by the processor: all of it but the CUDA calls."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._staging = Staging(size, self.device)


@pytest.fixture(params=["blocks", "found", "accelerator"])
def make_sum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[ExactSum]:
    """Sums that add in NumPy, compiled where that can be, and as on an accelerator."""
    if request.param == "blocks":
        monkeypatch.setattr(accumulator, "find_addition", BlockAddition)
    return _Queue if request.param == "accelerator" else ExactSum


MakeSum = type[ExactSum]


def whole(value: np.float32) -> int:
    """The nearest whole number of 2^-40, ties to even, by exact fractions."""
    return round(Fraction(float(value)) * 2**40)


def total(make_sum: MakeSum, items: list[tuple[np.ndarray, np.ndarray]]) -> ExactSum:
    sums = make_sum(WIDTH)
    for values, shared in items:
        sums.add(values[shared], shared)
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
    for sums in (first, second):
        assert [sums.exact(i) for i in range(WIDTH)] == expected
        assert sums.counts.tolist() == counts
        assert sums.updates == len(items)
        # int / int is correctly rounded in Python, as float(Fraction) is
        assert sums.sums.tolist() == [float(Fraction(n, 2**40)) for n in expected]


def test_many_updates_at_the_limit_do_not_overflow(make_sum: MakeSum) -> None:
    sums = make_sum(2)
    for _ in range(50):
        sums.add(np.array([MAX_MAGNITUDE, -MAX_MAGNITUDE], np.float32))
    assert sums.sums.tolist() == [50 * 2.0**20, -50 * 2.0**20]
    assert sums.exact(0) == 50 * 2**60 > 2**63
    sums.add(np.array([2.0**-40, 2.0**-40], np.float32))
    assert sums.exact(0) == 50 * 2**60 + 1
    assert sums.exact(1) == -50 * 2**60 + 1


def test_values_below_the_resolution_are_rounded_half_to_even(make_sum: MakeSum) -> None:
    sums = make_sum(4)
    sums.add(np.array([0.5, 1.5, -0.5, 0.75], np.float32) * np.float32(2.0**-40))
    assert [sums.exact(i) for i in range(4)] == [0, 2, 0, 1]


def test_only_shared_entries_are_added_and_counted(make_sum: MakeSum) -> None:
    sums = make_sum(3)
    sums.add(np.array([1, 2, 3], np.float32))
    sums.add(np.array([10], np.float32), np.array([False, True, False]))
    sums.add(np.zeros(0, np.float32), np.zeros(3, bool))
    assert sums.sums.tolist() == [1, 12, 3]
    assert sums.counts.tolist() == [1, 2, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**20 + 1, -(2.0**21)])
def test_a_value_that_cannot_be_added_leaves_the_sums_alone(make_sum: MakeSum, bad: float) -> None:
    sums = make_sum(3)
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
        (np.zeros(2, np.float32), np.array([1, 1, 0], np.uint8)),
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
    assert np.array_equal(sums.sums.numpy(), expected)


weights_of = st.floats(min_value=2**-18, max_value=4.0)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.tuples(updates.map(lambda u: u[:1]), weights_of), max_size=12), random=st.randoms())
def test_weighted_sums_are_exact_in_every_order(make_sum: MakeSum, items: list, random: object) -> None:
    weighed = [(*update[0], round(weight * 2**20) / 2**20) for update, weight in items if update]

    def total_of() -> ExactSum:
        sums = make_sum(WIDTH)
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


def test_a_weight_counts_what_came_before_it_once(make_sum: MakeSum) -> None:
    sums, one = make_sum(2), np.array([1.0, 2.0], np.float32)
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


# what adds

units = st.one_of(
    st.integers(-8, 8).map(lambda halves: halves / 2),
    st.integers(-(2**24), 2**24),
    st.sampled_from([2.0**51, 2.0**51 - 2.0**27, 2.0**52 + 2.0**29, 2.0**60]),
)
"""Whole numbers of 2^-40, halves of them, and what lies at the border between the two ways of rounding."""


@pytest.mark.parametrize("addition", [BlockAddition(), find_addition()], ids=["blocks", "found"])
@settings(max_examples=60)
@given(data=st.data())
def test_adding_is_whole_number_arithmetic_whatever_the_mask(addition: Addition, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 40))
    drawn = st.one_of(finite, units.map(lambda unit: float(np.float32(unit * 2.0**-40))))
    values = data.draw(npst.arrays(np.float32, size, elements=drawn))
    shared = data.draw(npst.arrays(bool, size))
    weight = data.draw(st.integers(1, 2**22)) / 2**20
    largest = addition.largest(values)
    assert largest == max(map(abs, values.tolist()), default=0.0)
    scale = weight * 2.0**40
    started = np.arange(size, dtype=np.int64) * -(2**40)
    for mask in (None, shared, np.ones(size, bool), np.zeros(size, bool)):
        sums, counts = started.copy(), np.full(size, 7, np.int32)
        taken = np.ascontiguousarray(values if mask is None else values[mask])
        is_small = addition.largest(taken) * scale < SMALL
        if mask is None:
            addition.add(sums, taken, scale=scale, is_small=is_small)
        else:
            addition.add_shared(sums, counts, taken, mask, scale=scale, is_small=is_small)
            assert counts.tolist() == [7 + bool(m) for m in mask]
        added = [mask is None or mask[i] for i in range(size)]
        terms = [
            round(Fraction(float(v)) * Fraction(weight) * 2**40) if a else 0 for v, a in zip(values, added, strict=True)
        ]
        assert sums.tolist() == [int(s) + t for s, t in zip(started, terms, strict=True)]


@pytest.mark.parametrize("addition", [BlockAddition(), find_addition()], ids=["blocks", "found"])
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("size", [1023, 1025, 3 * BLOCK + 5])
def test_masks_over_many_blocks_and_runs(addition: Addition, density: float, size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.normal(0, 100, size).astype(np.float32)
    for shared in (rng.random(size) < density, np.arange(size) < density * size, np.arange(size) >= density * size):
        sums, counts = np.zeros(size, np.int64), np.zeros(size, np.int32)
        # nothing may be read after the last value: there is none
        addition.add_shared(sums, counts, values[shared], shared, scale=2.0**40, is_small=True)
        expected = np.where(shared, np.rint(values.astype(np.float64) * 2**40), 0).astype(np.int64)
        assert np.array_equal(sums, expected)
        assert np.array_equal(counts, shared)


@pytest.mark.parametrize("addition", [BlockAddition(), find_addition()], ids=["blocks", "found"])
@pytest.mark.parametrize("place", [0, 1, 16, BLOCK, 2 * BLOCK + 2])
def test_the_largest_value_is_seen_wherever_it_is(addition: Addition, place: int) -> None:
    values = np.random.default_rng(0).normal(size=2 * BLOCK + 3).astype(np.float32)
    for odd in (99.0, -99.0, math.inf, -math.inf):
        values[place] = odd
        assert addition.largest(values) == addition.measure(values)[0] == abs(odd)
    for sign in (1.0, -1.0):
        values[place] = math.copysign(math.nan, sign)
        assert math.isnan(addition.largest(values))
        assert math.isnan(addition.measure(values)[0])


@pytest.mark.parametrize("addition", [BlockAddition(), find_addition()], ids=["blocks", "found"])
@pytest.mark.parametrize("size", [0, 1, LANES - 1, LANES + 1, BLOCK, 2 * BLOCK + LANES + 3])
def test_squares_are_summed_in_one_order(addition: Addition, size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    lanes = [0.0] * LANES
    for index, value in enumerate(values.tolist()):
        lanes[index % LANES] += value * value
    assert addition.measure(values) == (addition.largest(values), math.fsum(lanes))


@pytest.mark.parametrize("addition", [BlockAddition(), find_addition()], ids=["blocks", "found"])
def test_values_may_lie_anywhere_in_the_bytes(addition: Addition) -> None:
    values = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    shared = np.arange(7000) % 7 < 5
    for shift in range(1, 4):
        there = np.frombuffer(bytes(shift) + values.tobytes(), np.float32, offset=shift)
        assert addition.largest(there) == np.abs(values).max()
        assert addition.measure(there) == addition.measure(values)
        sums = [np.zeros(5000, np.int64), np.zeros(5000, np.int64), np.zeros(7000, np.int64), np.zeros(7000, np.int64)]
        for index, taken in enumerate((there, values)):
            addition.add(sums[index], taken, scale=2.0**40, is_small=True)
            counts = np.zeros(7000, np.int32)
            addition.add_shared(sums[2 + index], counts, taken, shared, scale=2.0**40, is_small=True)
        assert np.array_equal(sums[0], sums[1])
        assert np.array_equal(sums[2], sums[3])


# towards an accelerator


class _CountingEvent:
    """Events that know whether their slot was waited for before it was written again."""

    made: list[_CountingEvent] = []

    def __init__(self, device: object) -> None:
        self.recorded = self.waited = 0
        _CountingEvent.made.append(self)

    def record(self) -> None:
        assert self.waited > self.recorded, "the slot was written before its last copy had left"
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1


def test_a_slot_is_waited_for_before_it_is_written_again_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _CountingEvent.made = []
    monkeypatch.setattr(staging, "new_event", _CountingEvent)
    sums = _Queue(4)
    shared = np.array([True, False, True, True])
    for turn in range(2 * SLOTS + 1):
        sums.add(np.full(3, turn, np.float32), shared)
        assert [event.recorded for event in _CountingEvent.made] == [(turn + SLOTS - i) // SLOTS for i in range(SLOTS)]
        assert sum(event.waited for event in _CountingEvent.made) == turn + 1
    assert sums.sums.tolist() == [21.0, 0.0, 21.0, 21.0]
    assert sums.counts.tolist() == [7, 0, 7, 7]
