"""Makes the views that a server has of an image, and measures how much of the image an attack finds in each.

This is the worst case for a device: its whole update is one step of SGD (learning rate 1) on one image, and the
attacker knows the label. A round with more images and steps shows less of each image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hushfleet.data.samples import Samples
from hushfleet.models.model import Model
from hushfleet.privacy.accountant import epsilon
from hushfleet.privacy.clipping import clip
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.noise_for import noise_multiplier_for
from hushfleet.privacy.step import Step
from hushfleet.simulator.fleet import Fleet
from hushfleet.simulator.studies.invert.attack import gradients, reconstruct
from hushfleet.simulator.studies.invert.options import InvertOptions

LITTLE = 0.005
"""A noise multiplier with almost no protection: its epsilon is several hundred thousand."""


@dataclass(frozen=True)
class Terms:
    """A task's privacy parameters.

    :param clip_norm: C, finite.
    :param rounds: number of rounds that the epsilons cover.
    :param devices: number of devices in secure aggregation.
    :param noise_multiplier: noise multiplier of one device's update; None if it is not noised.
    """

    clip_norm: float
    rounds: int
    delta: float
    devices: int
    noise_multiplier: float | None = None


@dataclass(frozen=True, eq=False)
class ImageView:
    """One way of looking at the same images.

    :param epsilon_server: epsilon of the task's rounds; None without noise: then it is infinite.
    :param images: float32 `[n, C, H, W]`, the images that the attacker finds, 0..1.
    :param psnr: float64 `[n]`, decibels.
    :param recognised: bool `[n]`, see `recognised`.
    """

    name: str
    epsilon_server: float | None
    images: np.ndarray
    psnr: np.ndarray
    recognised: np.ndarray


def look(
    model: Model, params: np.ndarray, fleet: Fleet, terms: Terms, options: InvertOptions
) -> tuple[np.ndarray, list[ImageView]]:
    """Attacks images of the fleet's first device; returns originals float32 `[n, C, H, W]`, 0..1, and views.

    :param fleet: fleet of the task. In a sum, each device has one image; the other devices' images are drawn from all
        images that the first device does not have.
    """
    device = fleet.devices[0].train
    data, own = device.source, device.indices
    rng, count = np.random.default_rng(options.seed), options.images
    victims = rng.choice(own, count, replace=False)
    others = rng.choice(np.setdiff1d(np.arange(len(data)), own), terms.devices - 1, replace=False)
    drawn = np.concatenate([victims, others])
    updates = np.concatenate(
        [_updates(model, params, data.take(part)) for part in np.array_split(drawn, -(-len(drawn) // 32))]
    )
    seen = make_views(updates, count, terms, seed=options.seed)
    mean, std = (np.asarray(each, np.float32) for each in (data.mean, data.std))
    found = reconstruct(
        model,
        params,
        np.concatenate([vectors for _, _, vectors in seen]),
        np.tile(data.y[victims], len(seen)),
        (-mean / std, (1 - mean) / std),
        steps=options.steps,
        tries=options.tries,
        seed=options.seed,
    )
    pixels = _pixels(data.x, data)
    views = []
    for (name, spent, _), normalised in zip(seen, np.split(found, len(seen)), strict=True):
        images = _pixels(normalised, data)
        views.append(
            ImageView(name, spent, images, psnr(images, pixels[victims]), recognised(images, victims, pixels, data.y))
        )
    return pixels[victims], views


def make_views(
    updates: np.ndarray, count: int, terms: Terms, *, seed: int
) -> list[tuple[str, float | None, np.ndarray]]:
    """Returns name, epsilon_server and vectors float32 `[count, d]` of each view.

    :param updates: float32 `[count + devices - 1, d]`: of the attacked images, then of the others in a sum.
    """
    clipped = clip(updates, terms.clip_norm)
    single, others = clipped[:count], clipped[count:].sum(axis=0)
    drawn = 0

    def noised(vectors: np.ndarray, multiplier: float) -> np.ndarray:
        nonlocal drawn
        mechanism, out = GaussianMechanism(multiplier), []
        for vector in vectors:
            drawn += 1
            std = mechanism.vector_stds([terms.clip_norm])
            out.append(mechanism.add_noise(vector, std, SeededNoise(seed, drawn, 1)))
        return np.stack(out)

    def multiplier(target: float) -> float:
        return noise_multiplier_for(epsilon=target, delta=terms.delta, steps=terms.rounds)

    def spent(multiplier: float) -> float:
        return epsilon([Step(multiplier, 1.0, terms.rounds)], delta=terms.delta)

    task, sums = terms.noise_multiplier, single + others
    return [
        ("raw, or clipped", None, single),  # both have the same direction, and the attack uses nothing else
        ("a little noise", spent(LITTLE), noised(single, LITTLE)),
        *([] if task is None else [("noised, as the task does", spent(task), noised(single, task))]),
        ("noised", 8.0, noised(single, multiplier(8))),
        ("noised", 2.0, noised(single, multiplier(2))),
        (f"sum of {terms.devices}", None, sums),
        (f"sum of {terms.devices}, noised", 2.0, noised(sums, multiplier(2))),
    ]


def psnr(found: np.ndarray, originals: np.ndarray) -> np.ndarray:
    """Returns the peak signal-to-noise ratio of images `[n, C, H, W]`, 0..1: float64 `[n]`, decibels, at most 100."""
    errors = np.square(found.astype(np.float64) - originals).mean(axis=(1, 2, 3))
    return np.asarray(-10 * np.log10(np.maximum(errors, 1e-10)))


def recognised(found: np.ndarray, places: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns whether the original is the most similar (correlation) of all `images` of its class: bool `[n]`.

    :param found: `[n, C, H, W]`; an image without any contrast is similar to none.
    :param places: int64 `[n]`, indices of the originals in `images [N, C, H, W]` with `labels [N]`.
    """

    def centred(values: np.ndarray) -> np.ndarray:
        flat = values.reshape(len(values), -1).astype(np.float64)
        flat = flat - flat.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        return np.asarray(np.divide(flat, norms, out=np.zeros_like(flat), where=norms > 1e-6))

    right = []
    for one, place in zip(centred(found), places, strict=True):
        same = np.flatnonzero(labels == labels[place])
        right.append(bool(one.any()) and same[np.argmax(centred(images[same]) @ one)] == place)
    return np.array(right)


def _updates(model: Model, params: np.ndarray, samples: Samples) -> np.ndarray:
    vectors = gradients(model, torch.from_numpy(params), torch.from_numpy(samples.x), torch.from_numpy(samples.y))
    return -np.asarray(vectors.detach().numpy())


def _pixels(normalised: np.ndarray, data: Samples) -> np.ndarray:
    mean, std = (np.asarray(each, np.float32)[:, None, None] for each in (data.mean, data.std))
    return np.asarray(normalised * std + mean)
