"""Computes log-mel spectra of sound as ONNX nodes: two convolutions, with a square between them.

The kernels of the first convolution are the windowed sines and cosines of a Fourier transform, moved by a hop. The
squares of its results are the power. The second convolution adds both squares of each frequency, weighted by mel
filters.
"""

from __future__ import annotations

import numpy as np

from hushfleet.models.onnx_nodes import Graph


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
