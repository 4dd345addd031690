"""Unit `record` with secure aggregation: what a record moves, which methods go, what a round costs, the ring's
promise."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.samples import FeatureSamples
from hushfleet.errors import PrivacyError
from hushfleet.learning.draws import Inputs
from hushfleet.methods import METHODS, TaskMethod, make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.ring import Ring, Scale, least_bits, scale_for
from hushfleet.secure.prime_field import PRIMES
from hushfleet.wire.format.spec import PrivacySpec, SecureSpec
from support.methods import taken, train_round

CLASSES, COUNT = 10, 513
LAYOUT = ParamLayout(("head.weight", "prior"), ((CLASSES, COUNT), (CLASSES,)))
SECURE = SecureSpec(24, min_devices=9, honest_devices=8, honest_fraction=0.9)
PRIVACY = PrivacySpec("record", "secure", clip_norm=0.5, noise_multiplier=4.2, delta=1e-5, secure=SECURE)
PLAIN = {"optimizer": "sgd", "learning_rate": 16.0, "batch_size": 400, "local_epochs": 2}
GO = {"fedavg", "dp-fedavg", "fednova", "ditto", "hush", "fedopt", "second-moments"}


def method_of(name: str = "hush", privacy: PrivacySpec = PRIVACY, **config: Any) -> TaskMethod:
    return make_method(name, taken(name, PLAIN | config), privacy, LAYOUT, rounds=60)


def softmax_gradient(params, x, y, dropout=(), out=None, **_):
    """One linear layer's mean loss and gradient, float32."""
    weights = params[: CLASSES * COUNT].reshape(CLASSES, COUNT)
    rows = x.reshape(len(x), -1)
    logits = rows @ weights.T + params[CLASSES * COUNT :]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    loss = -float(np.log(shares[np.arange(len(y)), y] + 1e-30).mean())
    shares[np.arange(len(y)), y] -= 1
    out[: CLASSES * COUNT] = (shares.T @ rows / np.float32(len(y))).ravel()
    out[CLASSES * COUNT :] = shares.mean(0)
    return loss, out


def privatized(method: TaskMethod, params: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What a device puts into the ring in a round that begins with `params`."""
    samples = FeatureSamples(x[:, :, None, None], y)
    trained = train_round(
        method, method.init_state(), params, softmax_gradient, samples,
        terms=RoundTerms(), logits_of=lambda *_: None, inputs=Inputs(), rng=np.random.default_rng(0),
        noise=SeededNoise(0, 0, 0),
    )  # fmt: skip
    return method.privatize(trained.context, trained.update, SeededNoise(0, 0, 0)).values


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.0, 0.5, 3.0]), loud=st.sampled_from([0.1, 1.0, 50.0]))
def test_one_record_moves_an_update_by_its_bound_and_floats_by_next_to_nothing(
    seed: int, scale: float, loud: float
) -> None:
    rng, method = np.random.default_rng(seed), method_of()
    params = (scale * rng.standard_normal(LAYOUT.size)).astype(np.float32)
    params[CLASSES * COUNT :] = 0
    x = rng.standard_normal((400, COUNT)).astype(np.float32)
    x *= loud / np.linalg.norm(x, axis=1, keepdims=True)
    y = rng.integers(0, CLASSES, 400)
    out = rng.integers(400)
    change = privatized(method, params, x, y) - privatized(method, params, np.delete(x, out, 0), np.delete(y, out))
    bound = method.cost(RoundTerms()).bound
    assert bound == pytest.approx(0.5 * 16 / 400)
    assert np.linalg.norm(change.astype(np.float64)) <= bound * 1.005  # what the ring has room for


@pytest.mark.parametrize(("scale", "learning_rate"), [(1e6, 16.0), (3.0, 0.01)])
def test_a_large_model_and_small_steps_leave_a_record_its_bound(scale: float, learning_rate: float) -> None:
    rng, method = np.random.default_rng(0), method_of(learning_rate=learning_rate)
    params = (scale * rng.standard_normal(LAYOUT.size)).astype(np.float32)
    params[CLASSES * COUNT :] = 0
    x, y = rng.standard_normal((100, COUNT)).astype(np.float32), rng.integers(0, CLASSES, 100)
    change = privatized(method, params, x, y) - privatized(method, params, x[1:], y[1:])
    assert np.linalg.norm(change.astype(np.float64)) <= method.cost(RoundTerms()).bound * 1.001


@pytest.mark.parametrize(("learning_rate", "clip_norm"), [(1e-42, 0.5), (1e-10, 1e-25), (99.0, 3e30)])
def test_a_step_that_float32_cannot_hold_is_refused(learning_rate: float, clip_norm: float) -> None:
    """Denormal values of a step are rounded by more than one record may move them."""
    method = method_of(learning_rate=learning_rate, privacy=replace(PRIVACY, clip_norm=clip_norm))
    with pytest.raises(PrivacyError, match="1e-30 to 1e\\+30"):
        method.charge(RoundTerms())


def test_a_device_with_more_records_is_clipped_to_what_the_task_names() -> None:
    method, rng = method_of(batch_size=20), np.random.default_rng(1)
    x = np.tile(rng.standard_normal((1, COUNT)).astype(np.float32), (100, 1))
    values = privatized(method, np.zeros(LAYOUT.size, np.float32), x, np.zeros(100, np.int64))
    assert np.linalg.norm(values) == pytest.approx(0.5 * 16, rel=1e-6)
    assert method.cost(RoundTerms()).largest == pytest.approx(0.5 * 16)


def test_a_device_without_records_sends_noise_alone() -> None:
    x, y = np.zeros((0, COUNT), np.float32), np.zeros(0, np.int64)
    assert not privatized(method_of(), np.ones(LAYOUT.size, np.float32), x, y).any()


def test_a_round_costs_what_the_sum_has() -> None:
    charge = method_of().charge(RoundTerms(1))
    assert (charge.unit, charge.noise_multiplier, charge.noise_split, charge.steps) == ("record", 4.2, 8, 1)
    sampled = method_of(privacy=replace(PRIVACY, sample_rate=0.25)).charge(RoundTerms(1))
    assert sampled.sample_rate == 0.25
    assert method_of().multiplier_release(RoundTerms(1), participants=10) == 4.2


@pytest.mark.parametrize("name", sorted(METHODS))
def test_these_methods_go(name: str) -> None:
    try:
        method_of(name)
    except PrivacyError:
        assert name not in GO
    else:
        assert name in GO


@pytest.mark.parametrize(
    ("name", "config", "privacy", "reason"),
    [
        ("hush", {}, {"batches": 2}, "local_steps = 1"),
        ("hush", {"optimizer": "adam"}, {}, "optimizer = 'sgd'"),
        ("hush", {"momentum": 0.9}, {}, "without momentum"),
        ("hush", {"weight_decay": 0.1}, {}, "weight decay and schedule"),
        ("hush", {"schedule": "cosine"}, {}, "weight decay and schedule"),
        ("hush", {"warmup_rounds": 1}, {}, "weight decay and schedule"),
        ("dp-fedsam", {}, {}, "sum of plain gradients"),
        ("pfedsd", {}, {}, "sum of plain gradients"),
        ("fedprox", {}, {}, "nothing but gradients"),
        ("fedper", {}, {}, "of its own"),
        ("scaffold", {}, {}, "nothing but gradients"),
        ("apfl", {}, {}, "sum of plain gradients"),
    ],
)
def test_the_others_are_refused_with_a_reason(
    name: str, config: dict[str, Any], privacy: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PrivacyError, match=reason):
        method_of(name, replace(PRIVACY, **privacy), **config)


# the ring


def test_values_come_back_from_sums_of_many_records() -> None:
    devices, records, size = 5, 300, 400
    ring = Ring(
        prime=PRIMES[24], clip_norm=0.02, noise_multiplier=3.0, honest_devices=4, devices=devices, size=size,
        length=size, key=bytes(16), records=records,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    values = rng.standard_normal((devices, size))
    values *= 0.02 * records / np.linalg.norm(values, axis=1, keepdims=True)
    total = sum(ring.encode(each, SeededNoise(0, i, 0)).astype(np.int64) for i, each in enumerate(values))
    error = ring.decode((total % ring.prime).astype(np.uint32)) - values.sum(0)
    assert error.std() == pytest.approx(0.02 * 3 * math.sqrt(5 / 4) * (1 + ring.scale.extra), rel=0.15)
    with pytest.raises(PrivacyError, match="above the clip norm"):
        ring.encode(values[0] * 1.01, SeededNoise(0, 0, 0))


def neighbours(size: int, norm: float, seed: int) -> tuple[Ring, np.ndarray, np.ndarray]:
    """A ring, and two updates `norm` times a record's bound apart."""
    ring = Ring(
        prime=PRIMES[24], clip_norm=1.0, noise_multiplier=2.0, honest_devices=1, devices=2, size=size, length=size,
        key=bytes(16), records=100,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    x, v = rng.standard_normal(size), rng.standard_normal(size) * (rng.random(size) < 0.3)
    x *= 90 * rng.random() / np.linalg.norm(x)
    v *= norm / max(np.linalg.norm(v), 1e-9)
    return ring, x, x + v


@given(size=st.integers(1, 3000), seed=st.integers(0, 999))
def test_two_neighbours_rounded_alike_stay_within_the_sensitivity(size: int, seed: int) -> None:
    """By the ring's own rounding, with the same random words, and with as much as floats may add."""
    ring, *both = neighbours(size, 1.005, seed)
    one, other = (ring._rounded(each, SeededNoise(seed, 0, 0)) for each in both)
    assert int((one - other) @ (one - other)) <= ring.scale.bound


@pytest.mark.parametrize("size", [10, 200])
def test_the_rounded_difference_has_the_tail_that_the_proof_takes(size: int) -> None:
    """Proposition 22 at a beta that can be seen."""
    ring, *both = neighbours(size, 0.002, 3)  # a few steps: rounding is all that there is
    length, tail = 0.002 * ring.scale.steps, math.sqrt(2 * math.log(1 / 0.05))
    limit = length**2 + tail * (length + math.sqrt(size) / 2) + size / 4
    above = 0
    for draw in range(1000):
        one, other = (ring._rounded(each, SeededNoise(draw, 0, 0)) for each in both)
        above += int((one - other) @ (one - other)) > limit
    assert above <= 0.05 * 1000


def test_many_records_have_a_ring_all_the_same() -> None:
    found = least_bits(PRIMES, noise_multiplier=3.0, honest_devices=80, devices=100, size=5130, records=65_536)
    assert found in (24, 32)


@given(
    multiplier=st.floats(0.5, 60),
    devices=st.integers(2, 200),
    records=st.integers(1, 65_536),
    size=st.integers(1, 50_000),
)
def test_the_noise_over_what_a_record_moves_is_the_multiplier(
    multiplier: float, devices: int, records: int, size: int
) -> None:
    honest = max(1, devices // 2)
    scale = scale_for(
        prime=PRIMES[32], noise_multiplier=multiplier, honest_devices=honest, devices=devices, size=size,
        records=records,
    )  # fmt: skip
    moved, tail = (1 + max(0.005, records * 2.0**-21)) * scale.steps, math.sqrt(2 * math.log(1e20))
    assert moved**2 + tail * (moved + math.sqrt(size) / 2) + size / 4 == pytest.approx(scale.bound, rel=1e-9)
    assert scale.multiplier == pytest.approx(multiplier, rel=1e-9)
    assert scale.multiplier >= multiplier
    assert scale.extra > 0.005
    spread = math.sqrt((devices * records * scale.steps) ** 2 / size + scale.variance * devices / honest + devices / 4)
    assert 6.5 * spread <= PRIMES[32] / 2 * (1 + 1e-9)


def discrete(variance: float) -> np.ndarray:
    reach = math.ceil(14 * math.sqrt(variance))
    found = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance))
    return found / found.sum()


def rounded(value: float, room: int) -> np.ndarray:
    """Probabilities of its rounding on 0 .. room."""
    found = np.zeros(room + 1)
    found[math.floor(value)] = 1 - value % 1
    found[math.floor(value) + (value % 1 > 0)] += value % 1
    return found


@pytest.mark.parametrize("std", [5.2, 9.0])
@pytest.mark.parametrize("steps", [0.5, 2.0, 4.4])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_no_two_sums_with_and_without_a_record_are_told_apart_better_than_is_claimed(
    std: float, steps: float, dimensions: int
) -> None:
    """By adding up: x and x + v, both rounded at random, with discrete noise, at every place within a step."""
    scale = Scale(steps, (steps + math.sqrt(dimensions)) ** 2, std**2, 0.0)  # type: ignore[arg-type]
    mu, noise = 1 / scale.multiplier, discrete(std**2)
    angles = (0.0,) if dimensions == 1 else (0.0, 0.4, math.pi / 4)
    room = 2 + math.ceil(steps)

    def density(point: tuple[float, ...]) -> np.ndarray:
        one = [np.convolve(noise, rounded(each, room)) for each in point]
        return one[0] if dimensions == 1 else np.multiply.outer(*one)

    for angle, places in product(angles, product((0.0, 0.3, 0.9), repeat=dimensions)):
        moved = (steps * math.cos(angle), steps * math.sin(angle))
        without, with_it = (
            density(places),
            density(tuple(x + v for x, v in zip(places, moved[:dimensions], strict=True))),
        )
        for epsilon in (0.05, 0.3, 1.0):
            claimed = _normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * _normal(-mu / 2 - epsilon / mu)
            for one, other in ((without, with_it), (with_it, without)):
                assert np.maximum(one - math.exp(epsilon) * other, 0).sum() <= claimed + 1e-13


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
