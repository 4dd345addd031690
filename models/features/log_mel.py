"""Computes log-mel spectra of sound as ONNX nodes: two convolutions, with a square between them.

The kernels of the first convolution are the windowed sines and cosines of a Fourier transform, moved by a hop. The
squares of its results are the power. The second convolution adds both squares of each frequency, weighted by mel
filters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hushfleet.errors import BadInput
from hushfleet.models.onnx_nodes import Graph
from hushfleet.wire.format.spec import LOG_MEL, Shape

MELS, WINDOW_S, HOP_S = 40, 0.025, 0.01
COARSE_MELS, COARSE_STEPS = 20, 4
FLOOR = 1e-8
"""The least power of a mel filter's band; a sine of full scale at a frequency of the transform has about 1."""
MEAN, DEVIATION = math.log(1e-5), math.log(100)
"""Public constants, which bring -80 to 0 decibels to -1.5 to 2.5."""


@dataclass(frozen=True)
class LogMel:
    """Log-mel spectra of sound `(1, 1, T)` as images `(1, mels, frames)`.

    The sample rate fixes all: windows of 25 ms (Hann, periodic) begin every 10 ms, with no padding; the Fourier
    transform has the next power of two of points; 40 triangles of height 1 lie evenly on HTK's mel scale, 2595
    log10(1 + f / 700), from 0 to half the rate. A value is the natural logarithm of the power, normalised.

    :param window: samples of a frame.
    :param hop: samples between frames.
    :param points: of the Fourier transform.
    :param steps: means over so many parts of a segment take the place of the frames; 0: all frames.
    """

    image_shape: Shape
    sample_rate: int
    window: int
    hop: int
    points: int
    mels: int = MELS
    steps: int = 0

    def __post_init__(self) -> None:
        if self.image_shape[:2] != (1, 1) or self.image_shape[2] < self.window:
            raise BadInput(
                f"model.features = {LOG_MEL!r} takes sound of at least {self.window} samples, not samples of "
                f"{' x '.join(map(str, self.image_shape))}"
            )

    @classmethod
    def of(cls, image_shape: Shape, sample_rate: int, *, coarse: bool = False) -> LogMel:
        """Returns the spectra of sound with this rate.

        :param coarse: whether there are few values, for sums of second moments, in which each value brings noise.
        """
        window = max(2, round(WINDOW_S * sample_rate))
        hop, points = max(1, round(HOP_S * sample_rate)), 1 << (window - 1).bit_length()
        return cls(image_shape, sample_rate, window, hop, points, *((COARSE_MELS, COARSE_STEPS) if coarse else ()))

    @property
    def frames(self) -> int:
        return (self.image_shape[2] - self.window) // self.hop + 1

    @property
    def shape(self) -> Shape:
        """The shape of the features: 1, mels, and frames or parts."""
        return 1, self.mels, min(self.steps, self.frames) or self.frames

    def parts(self) -> np.ndarray:
        """Returns the weight of each frame in each part's mean, float64 `[frames, parts]`."""
        parts = self.shape[2]
        part = np.arange(self.frames) * parts // self.frames
        chosen = part[:, None] == np.arange(parts)
        return chosen / chosen.sum(0)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def kernels(self) -> np.ndarray:
        """Returns the windowed cosines and sines, float64 `[2, points / 2 + 1, window]`."""
        time, bins = np.arange(self.window), np.arange(self.points // 2 + 1)
        angles = 2 * np.pi * (np.outer(bins, time) % self.points) / self.points
        return np.stack([np.cos(angles), np.sin(angles)]) * np.sin(np.pi * time / self.window) ** 2

    def filters(self) -> np.ndarray:
        """Returns the triangles, float64 `[mels, points / 2 + 1]`."""
        hertz = np.arange(self.points // 2 + 1) * self.sample_rate / self.points
        top = 2595 * np.log10(1 + self.sample_rate / 1400)
        edges = 700 * (10 ** (np.linspace(0, top, self.mels + 2) / 2595) - 1)
        low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        return np.clip(np.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)), 0, None)

    def add(self, graph: Graph, x: str) -> str:
        """Adds the nodes for `x [b, 1, 1, T]`; returns the name of `[b, mels, 1, frames]`."""
        mel = self.filters() * (4 / self.window) ** 2  # the sum of a window is half its length
        logs = add_log_mel(graph, x, self.kernels(), mel, hop=self.hop, floor=FLOOR)
        if self.steps:
            logs = graph.node("MatMul", logs, graph.constant(self.parts().astype(np.float32)))
        centred = graph.node("Sub", logs, graph.constant(np.array(MEAN, np.float32)))
        return graph.node("Div", centred, graph.constant(np.array(DEVIATION, np.float32)))


def add_log_mel(graph: Graph, x: str, kernels: np.ndarray, mel: np.ndarray, *, hop: int, floor: float) -> str:
    """Adds the nodes for sound `x [b, 1, 1, T]`; returns the name of the natural logarithms `[b, mels, 1, frames]`.

    :param kernels: `[2, bins, width]`, of the real and of the imaginary parts.
    :param mel: `[mels, bins]`, weights of the power.
    :param hop: samples between frames.
    :param floor: the least power.
    """
    used = np.flatnonzero(mel.any(0))  # no other frequency is computed
    parts = kernels[:, used].reshape(2 * len(used), 1, 1, -1).astype(np.float32)
    spectrum = graph.node("Conv", x, graph.constant(parts), strides=[1, hop])
    power = graph.node("Mul", spectrum, spectrum)
    both = np.tile(mel[:, used], 2)[:, :, None, None].astype(np.float32)
    summed = graph.node("Conv", power, graph.constant(both))
    return graph.node("Log", graph.node("Max", summed, graph.constant(np.array(floor, np.float32))))
