"""A game against the mechanism: can a distinguisher tell with from without better than the claim allows?

The adversary chooses the device's update (the canary, as large as it can be in every layer), sees the
released values of many rounds with the canary and without it, and guesses by a likelihood ratio. For any
(epsilon, delta) mechanism  power <= e^epsilon * false alarms + delta,  so measured rates, corrected for
chance by Clopper-Pearson bounds, give a lower bound on epsilon. It must stay below what is claimed; and it
must rise above the claim for each fault that is planted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import beta  # comes with Opacus

from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.clipping import clip, clip_layers
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise

pytestmark = pytest.mark.slow

LAYERS = 9
LAYOUT = ParamLayout(tuple(f"layer{i}.weight" for i in range(LAYERS)), ((2,),) * LAYERS)
CLIP_NORMS = np.linspace(0.2, 1.8, LAYERS)
CANARY = np.full(LAYOUT.size, 50.0, dtype=np.float32)
DELTA = 1e-3
TRIALS = 2000
THRESHOLDS = np.linspace(-2, 4, 25)
# Chance that any bound of one game is wrong, shared among thresholds, two directions and two rates.
FALSE_ALARM = 1e-4

# Updates [trials, d] -> released values [trials, d]. The trials share one stream of noise.
Release = Callable[[np.ndarray, SeededNoise], np.ndarray]


def lower_bound(
    release: Release, *, claimed: float, canary: np.ndarray = CANARY, clip_norms: np.ndarray = CLIP_NORMS
) -> float:
    """A lower bound on the epsilon of one round, from `TRIALS` rounds with the canary and as many without.

    :param claimed: the noise multiplier that is claimed; it scales the scores, so that thresholds fit.
    :param canary: equal entries, two a layer; `clip_norms` are the bounds of these layers.
    """
    noise = SeededNoise(1, 0, 0)
    direction = np.repeat(1 / clip_norms, 2) / (math.sqrt(2) * len(clip_norms))

    def scores(update: np.ndarray) -> np.ndarray:
        # in units of the claimed noise: about N(0, 1) without the canary, N(1 / claimed, 1) with it
        return release(np.tile(update, (TRIALS, 1)), noise).astype(np.float64) @ direction / claimed

    with_canary, without = scores(canary), scores(np.zeros_like(canary))
    level = FALSE_ALARM / (4 * len(THRESHOLDS))
    best = 0.0
    for threshold in THRESHOLDS:
        for guess, other in ((with_canary, without), (without, with_canary)):
            power = at_least(_count(guess, threshold, above=guess is with_canary), level)
            alarms = at_most(_count(other, threshold, above=guess is with_canary), level)
            if power > DELTA:
                best = max(best, math.log((power - DELTA) / alarms))
    return best


def _count(values: np.ndarray, threshold: float, above: bool) -> int:
    # NaN is a tell-tale of its own, counted on the side of "above"
    over = (values > threshold) | np.isnan(values)
    return int(np.count_nonzero(over if above else ~over))


def at_least(count: int, level: float) -> float:
    return 0.0 if count == 0 else float(beta.ppf(level, count, TRIALS - count + 1))


def at_most(count: int, level: float) -> float:
    return 1.0 if count == TRIALS else float(beta.ppf(1 - level, count + 1, TRIALS - count))


def claim(noise_multiplier: float) -> float:
    return epsilon([Step(noise_multiplier, 1.0, 1)], delta=DELTA)


def released(mechanism: GaussianMechanism, clipped: np.ndarray, stds: np.ndarray, noise: SeededNoise) -> np.ndarray:
    return np.stack([mechanism.add_noise(row, stds, noise, layout=LAYOUT) for row in clipped])


def honest(mechanism: GaussianMechanism) -> Release:
    def release(updates: np.ndarray, noise: SeededNoise) -> np.ndarray:
        clipped = clip_layers(updates, LAYOUT, CLIP_NORMS)
        return released(mechanism, clipped, mechanism.layer_stds(CLIP_NORMS), noise)

    return release


@pytest.mark.parametrize(("noise_multiplier", "visible"), [(1.0, 0.3), (3.0, 0.05)])
def test_the_bound_stays_below_what_is_charged_and_is_not_blind(noise_multiplier, visible):
    mechanism = GaussianMechanism(noise_multiplier)
    charged = claim(mechanism.charge().noise_multiplier)
    found = lower_bound(honest(mechanism), claimed=noise_multiplier)
    assert visible * charged < found < charged


def test_a_missing_factor_of_the_layers_is_caught():
    """Fault: each layer's noise is bound x multiplier, without sqrt(L)."""
    mechanism = GaussianMechanism(3.0)

    def faulty(updates: np.ndarray, noise: SeededNoise) -> np.ndarray:
        clipped = clip_layers(updates, LAYOUT, CLIP_NORMS)
        return released(mechanism, clipped, mechanism.layer_stds(CLIP_NORMS) / math.sqrt(LAYERS), noise)

    assert lower_bound(faulty, claimed=3.0) > claim(mechanism.charge().noise_multiplier)


def test_a_split_that_is_reported_as_the_servers_number_is_caught():
    """Fault: the multiplier of the sum of 9 devices is claimed for one device's own bytes."""
    mechanism = GaussianMechanism(3.0, noise_split=9)
    found = lower_bound(honest(mechanism), claimed=3.0)
    assert claim(mechanism.noise_multiplier) < found < claim(mechanism.multiplier_server)


def test_a_missing_clip_is_caught():
    """Fault: the update is noised without having been clipped."""
    mechanism = GaussianMechanism(3.0)

    def faulty(updates: np.ndarray, noise: SeededNoise) -> np.ndarray:
        return released(mechanism, updates, mechanism.layer_stds(CLIP_NORMS), noise)

    assert lower_bound(faulty, claimed=3.0) > claim(3.0)


def test_nan_that_passes_the_clip_is_caught():
    """Fault: `norm > bound` is false for NaN, so a NaN update is neither clipped nor refused."""
    mechanism = GaussianMechanism(3.0)
    diverged = np.where(np.arange(LAYOUT.size) == 3, math.nan, CANARY).astype(np.float32)

    def faulty(updates: np.ndarray, noise: SeededNoise) -> np.ndarray:
        layers = updates.astype(np.float64).reshape(-1, LAYERS, 2)
        norms = np.sqrt((layers**2).sum(axis=2))
        factors = np.where(norms > CLIP_NORMS, CLIP_NORMS / np.maximum(norms, CLIP_NORMS), 1)
        stds = mechanism.layer_stds(CLIP_NORMS)[:, None]
        values = layers * factors[:, :, None] + stds * noise.normal(layers.size).reshape(layers.shape)
        return values.reshape(updates.shape)

    assert lower_bound(faulty, claimed=3.0, canary=diverged) > claim(3.0)
    with pytest.raises(PrivacyError, match="not finite"):
        lower_bound(honest(mechanism), claimed=3.0, canary=diverged)


def test_noise_that_is_added_anew_after_a_crash_is_caught():
    """Fault: a round is noised nine times instead of being sent again, and the server averages."""
    mechanism = GaussianMechanism(3.0)
    stds = mechanism.vector_stds([0.7])

    def once(updates: np.ndarray, noise: SeededNoise) -> np.ndarray:
        return np.stack([mechanism.add_noise(row, stds, noise) for row in clip(updates, 0.7)])

    def faulty(updates: np.ndarray, noise: SeededNoise) -> np.ndarray:
        return np.mean([once(updates, noise) for _ in range(9)], axis=0)

    game = {"claimed": 3.0, "canary": CANARY[:2], "clip_norms": np.array([0.7])}
    assert lower_bound(once, **game) < claim(3.0) < lower_bound(faulty, **game)
