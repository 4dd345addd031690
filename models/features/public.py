"""Takes mean and directions of features from public samples without labels, of the same kind as the boards' own.

Let u be the features of a public sample, of norm 1. A device's own features are u - mean, scaled to norm 1, with a
bias: without the part that all samples share, heads trained alone are about a point better. The shared head takes the
leading directions of these, the eigenvectors V of the covariance of u, again with norm 1 and a bias. They are not
divided by their deviations: with many directions that lost up to 18 points on Fashion-MNIST. Synthetic images beside
few public ones, weighted as 50 further ones, lost a point or two with 30 public images, and changed nothing with 100.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushfleet.models.features.whitening import BIAS, LEAST_NORM, Whitening, add_unit_with_bias
from hushfleet.models.onnx_nodes import Graph

_LEAST_VALUE = 1e-5  # of a direction's deviation, as a share of the largest: below it is rounding


@dataclass(frozen=True, eq=False)
class PublicDirections:
    """The mean of public features, and their directions.

    :param mean: float32 `[F]`.
    :param axes: float64 `[k, F]`, the leading ones first; k is below the number of public samples.
    """

    mean: np.ndarray
    axes: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> PublicDirections:
        """:param features: float `[N, F]`, of the public samples."""
        mean = features.mean(0, dtype=np.float64)
        _, values, axes = np.linalg.svd(features - mean, full_matrices=False)
        return cls(mean.astype(np.float32), axes[values > _LEAST_VALUE * values[0]])

    def own(self, features: np.ndarray) -> np.ndarray:
        """Returns a device's own features float32 `[n, F + 1]` of features `[n, F]`."""
        centred = features - self.mean
        norms = np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), np.float32(LEAST_NORM))
        return np.concatenate([centred / norms, np.full_like(norms, BIAS)], 1)

    def projection(self, most: int | None) -> Whitening:
        """Returns the projection of own features for the shared head.

        :param most: the number of directions; None, or more than there are: all.
        """
        leading = self.axes[:most].T
        return Whitening.of(np.concatenate([leading, np.zeros_like(leading[:1])]), np.zeros(len(leading) + 1))

    def add(self, graph: Graph, features: str, white: Whitening) -> str:
        """Adds the features of the shared head, and behind them the device's own, as ONNX nodes; returns their name."""
        own = add_unit_with_bias(graph, graph.node("Add", features, graph.constant(-self.mean)))
        return graph.node("Concat", white.add(graph, own), own, axis=1)
