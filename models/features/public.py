"""Takes the directions of a shared head from public samples without labels, of the same kind as the boards' own.

Let u be the features of a public sample, of norm 1. The directions are the leading eigenvectors V of the covariance of
some hundred of them, and the shared head takes V^T (u - mean), scaled to norm 1, with a bias. They are not divided by
their deviations: with many directions that lost up to 18 points on Fashion-MNIST. Synthetic images beside few public
ones, weighted as 50 further ones, lost a point or two with 30 public images, and changed nothing with 100.
"""

from __future__ import annotations

import numpy as np

from hushfleet.models.features.whitening import Whitening

_LEAST_VALUE = 1e-5  # of a direction's deviation, as a share of the largest: below it is rounding


def projection(features: np.ndarray, most: int | None) -> Whitening:
    """Returns the projection to the leading directions.

    :param features: float `[N, F]`, of the public samples.
    :param most: the number of directions; None, or more than there are: all.
    """
    mean = features.mean(0, dtype=np.float64)
    _, values, axes = np.linalg.svd(features - mean, full_matrices=False)
    kept = int((values > _LEAST_VALUE * values[0]).sum())
    return Whitening.of(axes[: min(kept, most or kept)].T, mean)
