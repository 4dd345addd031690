"""Differences between global models: against an obvious oracle, and against whatever may come in their place."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import Malformed, TooLarge, WireError
from hushfleet.wire.format.difference import (
    MAX_HEADER_BYTES,
    apply_difference,
    encode_difference,
    max_difference_bytes,
    params_digest,
    read_difference_header,
)
from hushfleet.wire.format.messages import DifferenceRef, RoundPlan

COUNTS = [150, 0, 40, 10]


def slow_result(base: Sequence[float], target: Sequence[float], counts: Sequence[int], steps: Sequence[float]) -> bytes:
    """Value by value: the difference in whole steps, each operation a single one of float32."""
    one, result, at = np.float32, [], 0
    for count, step in zip(counts, steps, strict=True):
        for b, t in zip(base[at : at + count], target[at : at + count], strict=True):
            level = np.rint(one(one(t) - one(b)) / one(step))
            # 0.0 takes the sign from a zero: a level has none
            result.append(one(one(b) + one((level + one(0.0)) * one(step))) if b != t else one(b))
        at += count
    return np.array(result, "<f4").tobytes()


def models(*, seed: int = 0, counts: Sequence[int] = COUNTS, still: Sequence[int] = (2,)) -> tuple[Any, Any]:
    """A model, and one that noise moved, except for the layers in `still`."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(sum(counts)).astype(np.float32)
    moves = rng.normal(0, 0.01, sum(counts)).astype(np.float32)
    for layer in still:
        moves[sum(counts[:layer]) : sum(counts[: layer + 1])] = 0
    return base, base + moves


def encoded(base: np.ndarray, target: np.ndarray, **changes: Any) -> Any:
    settings = {"task": "demo-1f", "round": 3, "counts": COUNTS, "steps": [0.005] * len(COUNTS), **changes}
    return encode_difference(base, target, **settings)


numbers = st.floats(-1000, 1000, width=32)


@given(
    layers=st.lists(
        st.tuples(st.sampled_from([0.01, 0.5, 3.0]), st.lists(st.tuples(numbers, numbers), max_size=30)),
        min_size=1,
        max_size=5,
    ),
    still=st.sets(st.integers(0, 4)),
)
def test_what_is_applied_is_what_arithmetic_gives(layers: list[Any], still: set[int]) -> None:
    counts, steps = [len(pairs) for _, pairs in layers], [step for step, _ in layers]
    base = np.array([b for _, pairs in layers for b, _ in pairs], np.float32)
    moved = [b if index in still else t for index, (_, pairs) in enumerate(layers) for b, t in pairs]
    target = np.array(moved, np.float32)
    made = encode_difference(base, target, task="t", round=1, counts=counts, steps=steps)
    applied = apply_difference(made.data, base, task="t", counts=counts)
    assert applied.dtype == np.float32
    assert applied.tobytes() == made.result.tobytes()
    assert (applied == np.frombuffer(slow_result(base, target, counts, steps), "<f4")).all()
    assert (applied[base == target] == base[base == target]).all()
    rounding = np.spacing(np.abs(base) + np.abs(target)) * 2
    assert (np.abs(applied - target) <= np.repeat(steps, counts).astype(np.float32) / 2 * 1.0001 + rounding).all()


def test_the_header_says_what_it_is_between() -> None:
    base, target = models()
    made = encoded(base, target)
    header = read_difference_header(made.data)
    assert header == made.header
    assert (header.task, header.round, header.steps) == ("demo-1f", 3, (0.005, 0.0, 0.0, 0.005))
    assert header.base == params_digest(base) == hashlib.sha256(base.astype("<f4").tobytes()).digest()
    assert header.result == params_digest(made.result)


def test_layers_without_a_change_cost_nothing_and_noise_costs_its_entropy() -> None:
    counts = [100_000, 300_000]
    base, target = models(counts=counts, still=(1,))
    one = encoded(base, target, counts=counts, steps=[0.005, 0.005]).data
    alone = encoded(base[:100_000], target[:100_000], counts=counts[:1], steps=[0.005]).data
    assert len(one) - len(alone) <= 9, "the step of another layer"
    # 3.05 bits is the entropy of Gaussian noise in steps of half its deviation
    assert 3.0 < 8 * len(one) / 100_000 < 3.2
    assert len(encoded(base, base, counts=counts, steps=[0.005, 0.005]).data) < 160


def test_a_difference_fits_one_model_of_one_task_only() -> None:
    base, target = models()
    data = encoded(base, target).data
    apply = {"task": "demo-1f", "counts": COUNTS}
    assert apply_difference(data, base, **apply).any()
    other = base.copy()
    other[7] = np.nextafter(other[7], np.float32(9))
    for wrong, changes, match in (
        (other, {}, "another model"),
        (base, {"task": "demo-2f"}, "not of demo-2f"),
        (base, {"counts": [150, 50]}, "4 layers, the model 2"),
        (base, {"counts": [150, 0, 50, 0]}, None),
        (base[:-1], {}, "200 float32"),
        (base.astype(np.float64), {}, "float64"),
        (base.reshape(2, 100), {}, "shape"),
    ):
        with pytest.raises(Malformed, match=match):
            apply_difference(data, wrong, **{**apply, **changes})


def forged(model: np.ndarray, coded: bytes, **changes: Any) -> bytes:
    """Written by hand, from the specification."""
    fields = {"task": "demo-1f", "round": 3, "base": params_digest(model), "result": bytes(32), "steps": [0.005] * 4}
    header = msgpack.packb({**fields, **changes})
    return struct.pack("<2sBBI", b"HD", 1, 0, len(header)) + header + coded


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [0.005, -0.0, 0.0, 0.005]},
        {"steps": [0.005, float("nan"), 0.0, 0.005]},
        {"steps": [0.005, -1.0, 0.0, 0.005]},
        {"steps": [0.005, 1e-40, 0.0, 0.005]},
        {"steps": []},
        {"steps": [0.005] * 5000},
        {"base": bytes(31)},
        {"result": bytes(33)},
        {"round": 3.0},
        {"round": -1},
        {"task": "No Task"},
        {"more": 1},
    ],
)
def test_a_header_that_breaks_a_rule(changes: dict[str, Any]) -> None:
    base, _ = models()
    with pytest.raises(WireError):
        read_difference_header(forged(base, b"", **changes))


def test_the_header_has_one_form() -> None:
    base, target = models()
    made = encoded(base, target)
    length = struct.unpack_from("<I", made.data, 4)[0]
    plain = msgpack.unpackb(made.data[8 : 8 + length])
    coded = made.data[8 + length :]
    assert forged(base, coded, **plain) == made.data
    swapped = msgpack.packb(dict(reversed(plain.items())))
    for data in (
        struct.pack("<2sBBI", b"HD", 1, 0, len(swapped)) + swapped + coded,
        b"HD\2" + made.data[3:],
        b"HU" + made.data[2:],
        made.data[:3] + b"\1" + made.data[4:],
        made.data + b"\0",
        made.data[:-1],
        made.data[:7],
    ):
        with pytest.raises(Malformed):
            apply_difference(data, base, task="demo-1f", counts=COUNTS)
    with pytest.raises(Malformed, match="does not give"):
        apply_difference(forged(base, coded, **{**plain, "result": bytes(32)}), base, task="demo-1f", counts=COUNTS)


def test_caps_hold_before_anything_is_allocated() -> None:
    base, _ = models()
    with pytest.raises(TooLarge):
        apply_difference(bytes(max_difference_bytes(base.size) + 1), base, task="t", counts=COUNTS)
    with pytest.raises(TooLarge):
        read_difference_header(struct.pack("<2sBBI", b"HD", 1, 0, MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 1))
    claim = b"\x81\xa5steps" + b"\xdd\x7f\xff\xff\xff"
    data = struct.pack("<2sBBI", b"HD", 1, 0, len(claim)) + claim
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            read_difference_header(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_no_model_with_values_that_are_not_finite_comes_of_it() -> None:
    base, target = models(still=())
    huge = np.full_like(base, np.float32(3e38))
    with pytest.raises(Malformed):
        encoded(base, target * np.float32(np.inf))
    made = encoded(np.zeros_like(base), np.full_like(base, 2.0**60), steps=[2.0**40] * 4)
    coded = made.data[8 + struct.unpack_from("<I", made.data, 4)[0] :]
    assert apply_difference(made.data, np.zeros_like(base), task="demo-1f", counts=COUNTS).max() == 2.0**60
    near = np.full_like(base, np.finfo(np.float32).max)
    with pytest.raises(Malformed):
        apply_difference(forged(near, coded, steps=[2.0**40] * 4), near, task="demo-1f", counts=COUNTS)
    with pytest.raises(Malformed):
        encoded(-huge, huge)


def test_mutations_raise_wire_errors_and_nothing_else() -> None:
    rng = random.Random(6)
    base, target = models()
    original, result, header = encoded(base, target)
    refused = 0
    for turn in range(4000):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            where = rng.randrange(len(data))
            if turn % 3:
                data[where] ^= 1 << rng.randrange(8)
            else:
                data[where : where + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 9))
        try:
            applied = apply_difference(bytes(data), base, task="demo-1f", counts=COUNTS)
        except WireError:
            refused += 1
        else:  # another round, or a step that is the same as float32
            assert applied.tobytes() == result.tobytes()
            assert replace(read_difference_header(bytes(data)), round=3, steps=header.steps) == header
    assert refused > 3800


def plan(*differences: DifferenceRef, size: int = 400, digest: bytes = bytes(32)) -> RoundPlan:
    return RoundPlan("t", 1, 2, "open", digest, size, {}, 1, 1.0, differences=differences)


def ref(base: int, *, size: int = 100) -> DifferenceRef:
    return DifferenceRef(bytes([base] * 8), bytes([base] * 32), size)


def test_the_fewest_differences_from_what_is_held() -> None:
    held = {number: bytes([number] * 8) + bytes(24) for number in range(1, 9)}
    chain = (ref(1), ref(2), ref(3))
    announced = plan(*chain)
    assert announced.differences_from([held[1]]) == chain
    assert announced.differences_from([held[3]]) == chain[2:]
    assert announced.differences_from({held[7], held[2], held[1], held[8]}) == chain[1:]
    assert announced.differences_from([held[7]]) is None
    assert announced.differences_from([]) is None
    assert announced.differences_from([held[1], bytes(32)]) == ()
    assert plan().differences_from([held[1]]) is None


@pytest.mark.parametrize(
    "differences",
    [
        (ref(1, size=399), ref(2, size=1)),
        (ref(1, size=0),),
        tuple(ref(number, size=1) for number in range(17)),
        (DifferenceRef(bytes(7), bytes(32), 9),),
        (DifferenceRef(bytes(8), bytes(31), 9),),
    ],
)
def test_a_plan_whose_differences_break_a_rule(differences: tuple[DifferenceRef, ...]) -> None:
    with pytest.raises(ValueError, match="difference"):
        plan(*differences)
