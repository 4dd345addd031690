"""Computes random filters for tiny images: one convolution, its positive and its negative part, mean pooling.

For small images, random convolutions are nearly as good as learned ones (Coates, Lee, Ng, An Analysis of Single-Layer
Networks in Unsupervised Feature Learning, AISTATS 2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput
from hushfleet.models.features import synthetic
from hushfleet.models.onnx_nodes import Graph

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
else:  # takes seconds to import, and kept features need none
    torch = at_need("torch")
    F = at_need("torch.nn.functional")

FILTERS = 48
SIDES = range(6, 17, 2)
_SEED = 48


@dataclass(frozen=True)
class Filters:
    """Random 3x3 filters on images of (channels, height, width)."""

    image_shape: tuple[int, int, int]
    kept: int = 128

    def __post_init__(self) -> None:
        _, height, width = self.image_shape
        if height != width or height not in SIDES:
            raise BadInput(
                f"model.features = 'filters' takes square images of even sides from {SIDES[0]} to {SIDES[-1]}, "
                f"not {height} x {width}; take 'scattering', or an ONNX file of your own"
            )

    @property
    def size(self) -> int:
        """The number of features of an image."""
        _, height, width = self.image_shape
        return 2 * FILTERS * (height // 2 - 1) * (width // 2 - 1)

    def public_images(self) -> np.ndarray:
        """Returns the public images for whitening, float64 `[n, C, H, W]`."""
        channels, side, _ = self.image_shape
        grey = synthetic.strokes(1200, side, np.random.default_rng(synthetic.SEED))
        return np.repeat(grey[:, None], channels, 1) if channels == 1 else synthetic.mixed(1200, self.image_shape)

    def kernels(self) -> np.ndarray:
        """Returns the kernels, float64 `[48, C, 3, 3]`."""
        rng = np.random.default_rng(_SEED)
        return rng.standard_normal((FILTERS, self.image_shape[0], 3, 3)) / 3

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[n, C, H, W]` -> `[n, size]`, in the type of `x`."""
        waves = F.conv2d(x, torch.from_numpy(self.kernels()).to(x))
        return F.avg_pool2d(torch.cat((F.relu(waves), F.relu(-waves)), 1), 2).flatten(1)

    def add(self, graph: Graph, x: str) -> str:
        """Adds the same function as ONNX nodes; returns the name of their result."""
        kernels = self.kernels().astype(np.float32)
        both = graph.constant(np.concatenate((kernels, -kernels)))
        parts = graph.node("Relu", graph.node("Conv", x, both))
        pooled = graph.node("AveragePool", parts, kernel_shape=[2, 2], strides=[2, 2])
        return graph.node("Flatten", pooled, axis=1)
