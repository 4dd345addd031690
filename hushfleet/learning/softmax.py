"""Fits softmax regression on fixed features with NumPy alone: many small fits at once, on any board.

A fit minimises  mean_i CE(softmax(offset_i + D phi_i), y_i) + penalty / 2 |D|^2  over D [C, F]. It works in the
eigenbasis of the features' own second moments, which has min(m, F) axes: this is the dual form if a device has fewer
images than features. In this basis Boehning's bound on the Hessian (Multinomial logistic regression algorithm, 1992),
1/2 (phi phi^T / m) for every class, is diagonal, and accelerated steps with it (Nesterov 1983, with the restarts of
O'Donoghue and Candes 2015) need no step size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_STEPS = 300
TOLERANCE = 1e-3
"""A fit ends when a step is shorter than this part of its length."""


class Rotated(NamedTuple):
    """Features [m, F] as `z @ axes`.

    :param z: float32 `[m, r]`, r = min(m, F) or less.
    :param axes: float32 `[r, F]`, orthonormal rows.
    :param moments: float32 `[r]`, the sum of the squares of each column of `z`.
    """

    z: np.ndarray
    axes: np.ndarray
    moments: np.ndarray


def rotated(features: np.ndarray) -> Rotated:
    """Rotates finite features `[m, F]` to their eigenbasis."""
    wide = features.astype(np.float64)
    if len(wide) < wide.shape[1]:
        moments, images = np.linalg.eigh(wide @ wide.T)
        kept = moments > 1e-9 * max(moments.max(initial=0.0), 1e-30)
        axes = (images[:, kept] / np.sqrt(moments[kept])).T @ wide
    else:
        moments, directions = np.linalg.eigh(wide.T @ wide)
        kept = moments > 1e-9 * max(moments.max(initial=0.0), 1e-30)
        axes = directions[:, kept].T
    z = wide @ axes.T
    return Rotated(*(each.astype(np.float32) for each in (z, axes, moments[kept])))


def fit(
    z: np.ndarray, moments: np.ndarray, labels: np.ndarray, offsets: np.ndarray, penalties: np.ndarray
) -> np.ndarray:
    """Returns D float32 `[k, C, r]` of k fits.

    :param z: float32 `[m, r]`, some or all rows of `Rotated.z`; without rows, D is zero.
    :param moments: `[r]`, computed from all rows.
    :param labels: int `[m]`.
    :param offsets: float32 `[k, C, m]`.
    :param penalties: `[k]`, positive.
    """
    result = np.zeros((*offsets.shape[:2], z.shape[1]), np.float32)
    if not len(z):
        return result
    targets = (np.arange(offsets.shape[1])[:, None] == labels).astype(np.float32)
    penalty = np.asarray(penalties, np.float32)[:, None, None]
    bound, going = moments / np.float32(2 * len(z)), np.arange(len(offsets))
    found = ahead = result
    theta = np.ones_like(penalty)
    for _ in range(MOST_STEPS):
        slope = (np.exp(log_softmax(offsets + ahead @ z.T)) - targets) @ z / len(z) + penalty * ahead
        step = slope / (bound + penalty)
        new = ahead - step
        moved = new - found
        theta = np.where((slope * moved).sum((1, 2), keepdims=True) > 0, np.float32(0), theta)  # a restart
        following = (1 + np.sqrt(1 + 4 * theta * theta)) / 2
        ahead, found, theta = new + np.maximum(theta - 1, 0) / following * moved, new, following
        result[going] = found
        far = np.sqrt((step * step).sum((1, 2))) > TOLERANCE * np.sqrt((found * found).sum((1, 2))) + 1e-6
        if not far.all():
            going, offsets, penalty = going[far], offsets[far], penalty[far]
            ahead, found, theta = ahead[far], found[far], theta[far]
        if not len(going):
            break
    return result


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the softmax over the classes of `[..., C, m]`.

    >>> np.exp(log_softmax(np.zeros((2, 1)))).tolist()
    [[0.5], [0.5]]
    """
    shifted = logits - logits.max(-2, keepdims=True)
    normalized: np.ndarray = shifted - np.log(np.exp(shifted).sum(-2, keepdims=True))
    return normalized
