"""`benchmarks/wire.py`: a tiny run of all its parts, and its arithmetic against slow oracles."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import wire
from benchmarks.wire import NOISE, elias_bits, entropy_bytes, qsgd, to_json

pytestmark = pytest.mark.slow


def test_all_parts_run_and_say_what_they_claim(figures_of: Callable[..., Any]) -> None:
    shown = figures_of(wire.main, "--quick --networks digits-cnn")

    assert [(row["method"], row["round"]) for row in shown["sizes"]] == [(m, r) for m in NOISE for r in (1, 2)]
    for row in shown["sizes"]:
        assert row["values"] <= row["parameters"] == 4890
        assert (row["values"] < 4890) == ((row["method"], row["round"]) == ("fedglp-adp", 2)), "masks"
        size = {name: way["bytes"] for name, way in row["payloads"].items()}
        assert size["Eq. (20)"] == pytest.approx((32 * row["values"] + 4890) / 8)
        assert size["ours, float32"] > 4 * row["values"] > size["ours, float16"] > 2 * row["values"]
        if row["method"] == "fedavg":
            continue
        assert size["ours, one-bit"] > row["values"] / 8
        for bit in row["bits"]:
            added = row["payloads"][f"ours, step {bit['step']:g}"]["added_variance"]
            assert added == pytest.approx(bit["step"] ** 2 / 12, rel=0.05)
            assert 0 < bit["above_entropy"] < 0.15
            # noise alone has the entropy of a Gaussian in a dithered channel at least
            assert bit["entropy_bits"] > 0.5 * math.log2(2 * math.pi * math.e * (1 / bit["step"] ** 2 + 1 / 12)) - 0.1


def test_entropy_is_that_of_each_layers_own_counts() -> None:
    rng = np.random.default_rng(1)
    levels, counts = rng.integers(-3, 4, 500), (200, 0, 299, 1)
    slow = 0.0
    for layer in np.split(levels, [200, 200, 499]):
        slow -= sum(math.log2(often / len(layer)) for often in (Counter(layer.tolist())[n] for n in layer.tolist()))
    assert entropy_bytes(levels, counts) == pytest.approx(slow / 8)


@pytest.mark.parametrize(("number", "code"), [(1, "0"), (2, "100"), (7, "101110"), (127, "1011011111110")])
def test_length_of_elias_recursive_code(number: int, code: str) -> None:
    assert elias_bits(number) == len(code)


def test_qsgd_is_unbiased_and_its_levels_are_of_the_buckets_norm() -> None:
    values = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    drawn = [qsgd(values, np.random.default_rng(seed)) for seed in range(200)]
    unit = np.repeat([np.linalg.norm(values[:512]), np.linalg.norm(values[512:])], 512)[:1000] / 127
    levels = drawn[0][2] / unit
    assert np.allclose(levels, np.rint(levels), atol=1e-3)
    assert np.abs(drawn[0][2] - values).max() <= unit.max() * 1.001
    mean = np.mean([one[2] for one in drawn], axis=0)
    assert np.abs(mean - values).max() < 5 * unit.max() / 2 / math.sqrt(200)
    assert drawn[0][0] == 1000 + 2 * 4
    assert qsgd(np.zeros(10, np.float32), np.random.default_rng(0))[1] == 4
    # one value at place 3, of its bucket's norm: gap 4, level 127, sign, norm
    alone = qsgd(np.array([0, 0, 0, -2], np.float32), np.random.default_rng(0))
    assert alone[1] == -(-(6 + 13 + 1 + 32) // 8)
    np.testing.assert_array_equal(alone[2], [0, 0, 0, -2])


def test_json_loses_nothing() -> None:
    values = np.random.default_rng(3).standard_normal(100).astype(np.float32) * 1e-3
    np.testing.assert_array_equal(np.array(json.loads(to_json(values)), np.float32), values)
