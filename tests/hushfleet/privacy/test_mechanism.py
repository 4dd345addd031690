"""The Gaussian mechanism: scales by hand, released variance measured, and what it refuses."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy import mechanism as mechanism_module
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SecureNoise, SeededNoise
from hushfleet.privacy.renyi import DEFAULT_ORDERS, rdp
from hushfleet.privacy.step import Step

LAYOUT = ParamLayout(("conv.weight", "conv.bias", "fc.weight"), ((2, 2), (1,), (3,)))


class Ones:
    """A source whose values show the standard deviation that they were multiplied with."""

    def normal(self, size: int) -> np.ndarray:
        return np.ones(size)


def test_multipliers_by_hand():
    mechanism = GaussianMechanism(6.0, noise_split=9)
    assert mechanism.multiplier_server == 2.0
    assert mechanism.multiplier_release(9) == 6.0
    assert mechanism.multiplier_release(4) == 4.0
    assert GaussianMechanism(6.0).multiplier_server == 6.0
    assert GaussianMechanism(6.0).multiplier_release(4) == 12.0
    with pytest.raises(PrivacyError, match="at least one participant"):
        mechanism.multiplier_release(0)


def test_layer_stds_by_hand():
    # Eq. (15): variance L sigma^2 C_l^2 / n = 4 * 9 * C_l^2 / 9
    stds = GaussianMechanism(3.0, noise_split=9).layer_stds([1.0, 2.0, 3.0, 0.5])
    assert stds.tolist() == [2.0, 4.0, 6.0, 1.0]
    assert stds.dtype == np.float64
    assert GaussianMechanism(3.0, noise_split=9).vector_stds([2.0, 2.0]).tolist() == [2.0, 2.0]


def test_one_layer_is_the_plain_mechanism():
    assert GaussianMechanism(1.5).layer_stds([2.0]).tolist() == [3.0]


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_the_layers_together_cost_what_the_charge_says(layers):
    """Each layer is a Gaussian with multiplier std / bound; composed, they give the charged multiplier."""
    mechanism = GaussianMechanism(1.3, noise_split=4)
    bounds = np.linspace(0.1, 3, layers)
    each = mechanism.layer_stds(bounds) / bounds
    together = sum(rdp(Step(float(multiplier), 1.0, 1), DEFAULT_ORDERS) for multiplier in each)
    charged = rdp(Step(mechanism.charge().noise_multiplier, 1.0, 1), DEFAULT_ORDERS)
    np.testing.assert_allclose(together, charged, rtol=1e-12)


def test_add_noise_by_hand():
    mechanism = GaussianMechanism(1.0)
    x = np.arange(8, dtype=np.float32)
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
    got = mechanism.add_noise(x, [10.0, 100.0], Ones(), where=mask, layout=LAYOUT)
    assert got.dtype == x.dtype
    assert got.tolist() == [10, 0, 12, 13, 0, 0, 106, 107]


def test_add_noise_without_layout():
    x = np.zeros(3, dtype=np.float32)
    mechanism = GaussianMechanism(1.0)
    assert mechanism.add_noise(x, 2.0, Ones()).tolist() == [2, 2, 2]
    assert mechanism.add_noise(x, [1.0, 2.0, 3.0], Ones()).tolist() == [1, 2, 3]


def test_blocks_do_not_change_the_noise(monkeypatch):
    x = np.zeros(8, dtype=np.float32)
    args = ([1.0, 2.0], SeededNoise(1, 1, 1))
    whole = GaussianMechanism(1.0).add_noise(x, *args, layout=LAYOUT)
    monkeypatch.setattr(mechanism_module, "_BLOCK_ENTRIES", 2)
    again = GaussianMechanism(1.0).add_noise(x, [1.0, 2.0], SeededNoise(1, 1, 1), layout=LAYOUT)
    np.testing.assert_array_equal(whole, again)


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(3, 1, 4)], ids=["secure", "seeded"])
def test_released_variance_in_each_layer(source):
    layout = ParamLayout(("a.w", "b.w"), ((100_000,), (150_000,)))
    mechanism = GaussianMechanism(2.0, noise_split=4)
    stds = mechanism.layer_stds([0.5, 3.0])  # 0.5 * 1 * sqrt 2, 3 * 1 * sqrt 2
    x = np.full(250_000, 0.25, dtype=np.float32)
    noise = mechanism.add_noise(x, stds, source, layout=layout).astype(np.float64) - 0.25
    for part, std in ((noise[:100_000], math.sqrt(0.5)), (noise[100_000:], math.sqrt(18))):
        # six standard errors of a variance
        assert part.var() == pytest.approx(std**2, rel=6 * math.sqrt(2 / len(part)))
        assert abs(part.mean()) < 6 * std / math.sqrt(len(part))


def test_the_sum_of_a_split_has_the_noise_of_the_release():
    mechanism = GaussianMechanism(3.0, noise_split=10)
    x, stds = np.zeros(50_000, dtype=np.float32), mechanism.vector_stds([1.0])
    summed = sum(mechanism.add_noise(x, stds, SeededNoise(0, i, 0)).astype(np.float64) for i in range(10))
    assert summed.var() == pytest.approx(mechanism.multiplier_release(10) ** 2, rel=6 * math.sqrt(2 / 50_000))


def test_without_noise_the_values_pass():
    mechanism = GaussianMechanism(0.0)
    x = np.arange(8, dtype=np.float32)
    stds = mechanism.layer_stds([math.inf, 1.0])
    assert stds.tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(mechanism.add_noise(x, stds, Ones(), layout=LAYOUT), x)
    assert mechanism.charge().mechanism == "none"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_unless_they_stay(bad):
    x = np.ones(8, dtype=np.float32)
    x[2] = bad
    with pytest.raises(PrivacyError, match="not finite"):
        GaussianMechanism(1.0).add_noise(x, 1.0, Ones())
    stays = np.arange(8) != 2
    assert GaussianMechanism(1.0).add_noise(x, 1.0, Ones(), where=stays)[2] == 0


@pytest.mark.parametrize(
    ("multiplier", "stds"),
    [(1.0, [1.0, 0.0]), (1.0, [1.0, -1.0]), (1.0, [math.nan, 1.0]), (1.0, [math.inf, 1.0]), (0.0, [0.0, 1.0])],
)
def test_stds_that_contradict_the_multiplier_are_refused(multiplier, stds):
    with pytest.raises(PrivacyError, match="contradicts the noise multiplier"):
        GaussianMechanism(multiplier).add_noise(np.ones(8, np.float32), stds, Ones(), layout=LAYOUT)


def test_a_noise_source_that_breaks_is_noticed():
    class Broken:
        def normal(self, size: int) -> np.ndarray:
            return np.full(size, np.nan)

    with pytest.raises(PrivacyError, match="does not fit"):
        GaussianMechanism(1.0).add_noise(np.ones(8, np.float32), 1.0, Broken())
    with pytest.raises(PrivacyError, match="does not fit"):
        GaussianMechanism(1.0).add_noise(np.ones(8, np.float32), 1e39, Ones())


@pytest.mark.parametrize("bad", [[0.0, 1.0], [-1.0], [math.nan], [math.inf, 1.0], [], 1.0])
def test_layer_stds_need_bounds(bad):
    with pytest.raises(PrivacyError, match="above zero"):
        GaussianMechanism(1.0).layer_stds(bad)


def test_shapes_that_do_not_fit_are_refused():
    mechanism, x = GaussianMechanism(1.0), np.ones(8, np.float32)
    with pytest.raises(PrivacyError, match="no vector of this layout"):
        mechanism.add_noise(x[None], 1.0, Ones())
    with pytest.raises(PrivacyError, match="no vector of this layout"):
        mechanism.add_noise(x[:7], [1.0, 1.0], Ones(), layout=LAYOUT)
    with pytest.raises(PrivacyError, match="standard deviations of shape"):
        mechanism.add_noise(x, [1.0, 1.0, 1.0], Ones(), layout=LAYOUT)
    with pytest.raises(PrivacyError, match="the mask must be boolean"):
        mechanism.add_noise(x, 1.0, Ones(), where=np.ones(7, dtype=bool))
    with pytest.raises(PrivacyError, match="the mask must be boolean"):
        mechanism.add_noise(x, 1.0, Ones(), where=np.ones(8))


@pytest.mark.parametrize(("multiplier", "split"), [(-1.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 0), (1.0, 1.5)])
def test_mechanisms_outside_their_range_are_refused(multiplier, split):
    with pytest.raises(PrivacyError):
        GaussianMechanism(multiplier, noise_split=split)


def test_the_charge_is_in_the_servers_view():
    assert GaussianMechanism(6.0, noise_split=9).charge() == Charge(
        unit="device",
        adjacency="add or remove one device's whole contribution to the round",
        mechanism="gaussian",
        noise_multiplier=2.0,
        noise_split=9,
        sample_rate=1.0,
        steps=1,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "person"},
        {"mechanism": "laplace"},
        {"mechanism": "none"},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"noise_split": 0},
        {"steps": 0},
        {"sample_rate": 0.0},
        {"sample_rate": 1.1},
    ],
)
def test_charges_outside_their_range_are_refused(change):
    good = {"unit": "device", "adjacency": "any", "mechanism": "gaussian", "noise_multiplier": 1.0}
    Charge(**good)
    with pytest.raises(PrivacyError):
        Charge(**(good | change))


def test_the_weight_of_a_charge_adds_up_and_is_finite() -> None:
    of = partial(Charge, "record", "add-or-remove", "gaussian")
    assert of(2.0).weight == 0.25
    assert of(0.5, 1, 0.25, 8).weight == 2.0
    assert Charge("device", "add-or-remove", "none", 0.0, steps=3).weight == 3.0
    assert of(1e-300).weight == 1e12
