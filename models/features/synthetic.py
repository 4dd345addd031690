"""Generates synthetic images from a fixed seed, to fit the whitening of features, so that no data set is needed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

SEED = 20130221


def strokes(count: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """Returns float64 `[count, side, side]` in [0, 1]: one or two pen-like lines of a few straight parts each."""
    row, column = np.mgrid[:side, :side] / (side - 1)
    images = np.zeros((count, side, side))
    for image in images:
        for _ in range(rng.integers(1, 3)):
            points, width = rng.uniform(0.1, 0.9, (rng.integers(3, 6), 2)), rng.uniform(0.04, 0.09)
            for start, end in pairwise(points):
                y, x = (start + np.linspace(0, 1, 12)[:, None] * (end - start)).T[:, :, None, None]
                squared = ((row - y) ** 2 + (column - x) ** 2).min(0)
                np.maximum(image, np.exp(-squared / (2 * width**2)), out=image)
    return images


def textures(count: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """Returns float64 `[count, side, side]` in [0, 1]: noise with a spectrum like photographs, about 1/f."""
    return np.clip(0.5 + 0.25 * _noise(side, rng.uniform(0.9, 1.8, count), rng), 0, 1)


def shapes(count: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """Returns float64 `[count, side, side]` in [0, 1]: spots with soft edges on black, each with its own texture."""
    outline = _noise(side, rng.uniform(2, 3.5, count), rng) - rng.uniform(-0.5, 1, (count, 1, 1))
    inside = 1 / (1 + np.exp(-outline * rng.uniform(4, 30, (count, 1, 1))))
    texture = _noise(side, rng.uniform(0.5, 2, count), rng) * rng.uniform(0, 0.2, (count, 1, 1))
    return np.clip(inside * (texture + rng.uniform(0.3, 1, (count, 1, 1))), 0, 1)


def mixed(count: int, image_shape: tuple[int, int, int]) -> np.ndarray:
    """Returns float64 `[count, C, H, W]` in [0, 1]: strokes, textures and shapes in equal parts; `H` equals `W`.

    With several channels, each image is a grey image in a random colour, plus another of its kind in a second colour.
    """
    channels, side, _ = image_shape
    rng = np.random.default_rng(SEED)
    parts = [make(count // 3, side, rng) for make in (strokes, textures, shapes)]
    if channels == 1:
        return np.concatenate(parts)[:, None]
    coloured = []
    for part in parts:
        ink, paper = rng.uniform(0, 1, (2, len(part), channels, 1, 1))
        other = part[rng.permutation(len(part)), None]
        coloured.append(np.clip(part[:, None] * ink + 0.5 * other * paper, 0, 1))
    return np.concatenate(coloured)


def _noise(side: int, exponents: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns float64 `[n, side, side]` with mean 0, deviation 1, and amplitudes falling as 1/f^exponent `[n]`."""
    frequency = np.hypot(*np.meshgrid(*2 * [np.fft.fftfreq(side)]))
    frequency[0, 0] = 1 / side
    white = np.fft.fft2(rng.standard_normal((len(exponents), side, side)))
    noise = np.fft.ifft2(white / frequency ** exponents[:, None, None]).real
    noise -= noise.mean((1, 2), keepdims=True)
    return noise / noise.std((1, 2), keepdims=True)
