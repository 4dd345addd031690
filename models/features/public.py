"""Takes the directions of a shared head from public samples without labels, of the same kind as the boards' own.

Let u be the features of a public sample, of norm 1. The directions are the leading eigenvectors V of the covariance of
N of them, and the shared head takes V^T (u - mean), scaled to norm 1, with a bias. They are not divided by their
deviations: with many directions that lost up to 18 points on Fashion-MNIST. Fewer than `ENOUGH` images are a rough
estimate, so the covariance of synthetic images counts as much as `DRAWN_COUNT_AS` further ones.
"""

from __future__ import annotations

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.models.features import synthetic
from hushfleet.models.features.whitening import Whitening

ENOUGH = 300
"""The number of public images from which on no synthetic ones are added."""
DRAWN_COUNT_AS = 50
_DRAWN = 300
_LEAST_VALUE = 1e-5  # of a direction's deviation, as a share of the largest: below it is rounding


def drawn_like(public: Samples) -> Samples:
    """Returns synthetic images of the form and normalisation of `public`; none if these are no images, or enough."""
    channels, height, width = shape = public.images.shape[1:]
    images = np.empty((0, *shape), np.float32)
    if len(public) < ENOUGH and channels in (1, 3) and height == width > 1:
        images = synthetic.mixed(_DRAWN, shape).astype(np.float32)
    return Samples(images, np.zeros(len(images), np.int64), public.mean, public.std)


def projection(features: np.ndarray, drawn: np.ndarray, most: int | None) -> Whitening:
    """Returns the projection to the leading directions.

    :param features: float `[N, F]`, of the public samples.
    :param drawn: float `[n, F]`, of synthetic images; n may be 0.
    :param most: the number of directions; None, or more than there are: all.
    """
    mean = features.mean(0, dtype=np.float64)
    rows = [features - mean]
    if len(drawn):
        rows.append((drawn - drawn.mean(0, dtype=np.float64)) * np.sqrt(DRAWN_COUNT_AS / len(drawn)))
    _, values, axes = np.linalg.svd(np.concatenate(rows), full_matrices=False)
    kept = int((values > _LEAST_VALUE * values[0]).sum())
    return Whitening.of(axes[: min(kept, most or kept)].T, mean)
