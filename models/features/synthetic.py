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


def speech(count: int, length: int, rate: int) -> np.ndarray:
    """Returns float64 `[count, length]` in -1..1: syllables, each a burst of noise and a vowel, in noise.

    :param rate: samples a second.
    """
    rng = np.random.default_rng(SEED)
    clips = np.zeros((count, length))
    for clip in clips:
        pitch, tract, place = rng.uniform(80, 280), rng.uniform(0.85, 1.2), rng.uniform(0, 0.3) * length
        for part in range(2 * rng.integers(1, 4)):
            size = int(rate * (rng.uniform(0.08, 0.3) if part % 2 else rng.uniform(0.02, 0.15)))
            sound = _phone(size, rate, part % 2 * pitch * rng.uniform(0.8, 1.25), tract, rng)
            here = clip[int(place) :][:size]
            here += sound[: len(here)] * (1 if part % 2 else 10 ** rng.uniform(-1.5, 0))
            place += 0.75 * size
        hum = np.cumsum(rng.standard_normal(length))
        noise = rng.standard_normal(length) + (hum - hum.mean()) / hum.std()
        clip += clip.std() * 10 ** rng.uniform(-1.5, 0) * noise / noise.std()
        clip *= 10 ** rng.uniform(-1, 0) / np.abs(clip).max()
    return clips


def _phone(size: int, rate: int, pitch: float, tract: float, rng: np.random.Generator) -> np.ndarray:
    """Returns float64 `[size]` with deviation 1: a voice's pulses, or noise if `pitch` is 0, between two random sets of
    formants.

    :param tract: the factor of all formants.
    """
    ramp, hertz = np.linspace(0, 1, size), np.fft.rfftfreq(size, 1 / rate)
    low: tuple[int, ...]
    high: tuple[int, ...]
    widths: tuple[int, ...]
    if pitch:
        source = np.diff(np.floor(np.cumsum(pitch * (1 + rng.uniform(-0.2, 0.2) * ramp)) / rate), prepend=0)
        low, high, widths, tilt = (250, 800, 2200, 3700), (900, 2500, 3300, 3701), (60, 90, 150, 200), 1 + hertz / 800
    else:
        source, tilt = rng.standard_normal(size), np.ones_like(hertz)
        low, high, widths = (1000, 1000), (6000, 6000), (500, 1000)
    made = np.zeros(size)
    for weight in (1 - ramp, ramp):
        formants = tract * rng.uniform(low, high)
        curves = (0.6**n / np.hypot((hertz - f) / w, 1) for n, (f, w) in enumerate(zip(formants, widths, strict=True)))
        made += weight * np.fft.irfft(np.fft.rfft(source) * sum(curves) / tilt, size)
    shaped: np.ndarray = made * np.sqrt(np.sin(np.pi * ramp))
    return shaped / shaped.std()


def _noise(side: int, exponents: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns float64 `[n, side, side]` with mean 0, deviation 1, and amplitudes falling as 1/f^exponent `[n]`."""
    frequency = np.hypot(*np.meshgrid(*2 * [np.fft.fftfreq(side)]))
    frequency[0, 0] = 1 / side
    white = np.fft.fft2(rng.standard_normal((len(exponents), side, side)))
    noise = np.fft.ifft2(white / frequency ** exponents[:, None, None]).real
    noise -= noise.mean((1, 2), keepdims=True)
    return noise / noise.std((1, 2), keepdims=True)
