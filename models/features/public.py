"""Takes mean and directions of features from public samples, of the same kind as the boards' own.

Let u be the features of a public sample, of norm 1. A device's own features are u - mean, scaled to norm 1, with a
bias: without the part that all samples share, heads trained alone are about a point better. The shared head takes the
leading directions of these, the eigenvectors V of the covariance of u, again with norm 1 and a bias. They are not
divided by their deviations: with many directions that lost up to 18 points on Fashion-MNIST. Synthetic images beside
few public ones, weighted as 50 further ones, lost a point or two with 30 public images, and changed nothing with 100.

If the public samples have classes, which may not be the task's, u - mean is first multiplied by the inverse root
of the covariance within them, and V are the directions in which the classes' means vary most: the linear discriminants.
A speaker's voice and noise vary within the classes of words, so they are not taken for words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushfleet.models.features.whitening import BIAS, LEAST_NORM, Whitening, add_unit_with_bias
from hushfleet.models.onnx_nodes import Graph

_LEAST_VALUE = 1e-5  # of a direction's deviation, as a share of the largest: below it is rounding
_RIDGE = 0.2  # of the mean variance, added to the variance within classes in every direction


@dataclass(frozen=True, eq=False)
class PublicDirections:
    """The mean of public features, and their directions.

    :param mean: float32 `[F]`.
    :param axes: float64 `[k, F]`, the leading ones first; k is below the number of public samples, or of their classes.
    :param within: of samples with classes: what their features are multiplied by.
    """

    mean: np.ndarray
    axes: np.ndarray
    within: Whitening | None = None

    @classmethod
    def of(cls, features: np.ndarray, labels: np.ndarray | None = None) -> PublicDirections:
        """:param features: float `[N, F]`, of the public samples.
        :param labels: int `[N]`, their classes; with one class alone, or None, they have none.
        """
        mean, within = features.mean(0, dtype=np.float64), None
        varying = features - mean
        if labels is not None and len(np.unique(labels)) > 1:
            means, white = _by_class(varying, np.unique(labels, return_inverse=True)[1])
            varying, within = means @ white, Whitening.of(white, mean)
        _, values, axes = np.linalg.svd(varying, full_matrices=False)
        return cls(mean.astype(np.float32), axes[values > _LEAST_VALUE * values[0]], within)

    def own(self, features: np.ndarray) -> np.ndarray:
        """Returns a device's own features float32 `[n, F + 1]` of features `[n, F]`."""
        centred = features - self.mean
        if self.within is not None:
            centred = centred @ (self.within.matrix * self.within.scale)
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
        if self.within is not None:
            own = self.within.add(graph, features)
        else:
            own = add_unit_with_bias(graph, graph.node("Add", features, graph.constant(-self.mean)))
        return graph.node("Concat", white.add(graph, own), own, axis=1)


def _by_class(centred: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each class's mean times the root of its number of samples, and the inverse root of the covariance within
    classes, float64 `[K, F]` and `[F, F]`.

    :param classes: int `[N]`, 0 to K - 1.
    """
    counts = np.bincount(classes)
    means = np.eye(len(counts))[classes].T @ centred / counts[:, None]
    apart = centred - means[classes]
    ridge = _RIDGE * np.square(centred).sum() / centred.shape[1]
    variances, axes = np.linalg.eigh(apart.T @ apart + ridge * np.eye(centred.shape[1]))
    return np.sqrt(counts)[:, None] * means, axes / np.sqrt(variances) @ axes.T
