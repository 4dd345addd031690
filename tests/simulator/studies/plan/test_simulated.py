"""The fast simulation of fleets against its pseudocode, one device after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hushfleet.aggregator.planning.gain_table import PublicGain
from hushfleet.methods.hush import TailMean
from hushfleet.models.features.public import PublicDirections
from hushfleet.simulator.studies.plan.simulated import Dealt, Images, SimulatedFleet, deal, shared_head


def images_of(count: int, classes: int = 3, features: int = 7) -> Images:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, features)).astype(np.float32)
    y = np.arange(count) % classes
    return Images(x, y, x, y)


def slow_head(dealt: Dealt, *, rounds: int, clip_norm: float) -> np.ndarray:
    """Without noise: gradients of the mean loss by each device's own images, in float64."""
    devices, count, features = dealt.x.shape
    head, iterates = np.zeros((features, dealt.classes)), []
    for _ in range(rounds):
        total = np.zeros_like(head)
        for x, y, prior in zip(dealt.x.astype(float), dealt.y, dealt.prior, strict=True):
            own = head.copy()
            for _ in range(5):
                logits = x @ own + prior
                odds = np.exp(logits - logits.max(1, keepdims=True))
                slope = x.T @ (odds / odds.sum(1, keepdims=True) - np.eye(dealt.classes)[y]) / count
                own -= 16 * slope
            update = own - head
            total += update * clip_norm / np.linalg.norm(update)
        head = head + total / devices
        iterates.append(head)
    mean: np.ndarray = np.mean(iterates[-2:], axis=0)
    return mean


def test_all_devices_at_once_are_one_device_after_the_other() -> None:
    dealt = deal(images_of(60), devices=6, each=5, seed=1, alpha=0.5)
    rng = np.random.default_rng(0)
    found = shared_head(dealt, TailMean(4, clip_norm=2.0), rng)
    np.testing.assert_allclose(found, slow_head(dealt, rounds=4, clip_norm=2.0), atol=1e-4)


def test_noise_is_that_of_the_sum() -> None:
    dealt = deal(images_of(60), devices=6, each=5, seed=1)
    heads = [
        shared_head(dealt, TailMean(1, 0.0, 1.0, std), np.random.default_rng(seed))
        for seed in range(200)
        for std in (1e-9, 3.0)
    ]
    noise = np.array(heads[1::2]) - np.array(heads[0::2])
    assert noise.std() == pytest.approx(3.0 / 6, rel=0.05)


def test_every_image_is_dealt_once_and_mixes_are_what_they_say() -> None:
    images = images_of(3000)
    dealt = deal(images, devices=20, each=100, seed=0, alpha=1.0)
    assert len(np.unique(dealt.x.reshape(2000, -1), axis=0)) == 2000
    shares = np.stack([np.bincount(y, minlength=3) / 100 for y in dealt.y])
    assert np.abs(shares[:10] - dealt.mixes[:10]).max() < 0.2


def test_a_louder_fleet_gains_less_and_alone_stays() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(600) % 3
    x = (np.eye(3, 40)[y] + 0.7 * rng.standard_normal((600, 40))).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    images = Images(x[:300], y[:300], x[300:], y[300:])
    fleet = SimulatedFleet(images, deal(images, devices=30, each=8, seed=0), seed=0)
    quiet, loud = (fleet.at(r) for r in (100.0, 2.0))
    assert quiet["shared"]["common"] > fleet.alone["common"] > loud["shared"]["common"]
    assert quiet["chosen"]["own"] > loud["chosen"]["own"]
    assert (quiet["directions"], loud["directions"]) == (248, 32)


def test_public_samples_give_the_directions_that_a_board_computes() -> None:
    images = images_of(60, features=40)
    public = PublicDirections.of(np.random.default_rng(5).standard_normal((50, 39)))
    fleet = SimulatedFleet(images, deal(images, devices=6, each=5, seed=1), 0, public=public)
    found = fleet._given(images.x.reshape(6, 10, 40), 24)
    expected = public.projection(24)(torch.from_numpy(images.x))
    np.testing.assert_allclose(found.reshape(60, 25), expected, atol=1e-5)
    assert fleet.at(100.0)["directions"] == 64


@pytest.mark.parametrize(("labelled", "beats"), [(0.78, True), (0.6, False)])
def test_labelled_public_samples_that_beat_the_fleet_are_named(labelled: float, beats: bool) -> None:
    said = PublicGain(200, 0.607, 0.662, labelled).in_words
    assert "200 such samples that are public" in said
    assert "66.2 % in place of 60.7 %" in said
    assert (f"{100 * labelled:.1f} %" in said, "train on them" in said) == (True, beats)
