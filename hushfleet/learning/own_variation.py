"""Judges by second moments as a device does: about its own mean, and by how its own normal samples vary.

The noise of a fleet's sum hides some of the directions in which normal samples vary. A device's own samples show them
without noise, though few. So the rest z of a sample, which the fleet's directions leave, has the error

    sum over frequencies of (z - m)^T (I + S / s)^-1 (z - m) / values

with mean m and covariance S of the rests of its own normal samples at a frequency, and their mean variance s. This is a
Mahalanobis distance whose covariance is shrunk to a multiple of the identity (Ledoit and Wolf, A Well-Conditioned
Estimator for Large-Dimensional Covariance Matrices, 2004), with equal weights, chosen on made-up machines of
seeds 10 to 14. An own sample's error is by the mean and covariance of the others. m and S do not leave the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import LabelledSamples, records_of
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.params import ParamLayout

_FOLDS = 20
_LEAST = 1e-30  # mean variance: of constant samples it is 0


class _Variation(NamedTuple):
    """:param mean: of rests, float64 `[frequency, 1, series]`.
    :param whitening: lower triangular `[frequency, series, series]`: an error is the square of what it makes of a rest.
    """

    mean: np.ndarray
    whitening: np.ndarray

    @classmethod
    def of(cls, rests: np.ndarray) -> _Variation:
        """:param rests: `[frequency, n, series]`."""
        mean = rests.mean(1, keepdims=True)
        own = rests - mean
        moments = own.swapaxes(1, 2) @ own / max(1, own.shape[1] - 1)
        variance = max(_LEAST, float(np.trace(moments, axis1=1, axis2=2).mean()) / rests.shape[2])
        whole = np.eye(rests.shape[2]) + moments / variance
        return cls(mean, np.linalg.inv(np.linalg.cholesky(whole)))

    def __call__(self, rests: np.ndarray) -> np.ndarray:
        found: np.ndarray = (rests - self.mean) @ self.whitening.swapaxes(1, 2)
        return found


class OwnReconstruction:
    """The network of second moments as a device uses it, a `LogitsOf` whose squared error is the device's.

    :param logits_of: the network as it is.
    :param own: the device's normal samples, at least one, as the network takes them.
    """

    def __init__(self, logits_of: LogitsOf, layout: ParamLayout, own: LabelledSamples) -> None:
        self._logits_of, self._own, self._centre = logits_of, own, own.x.mean(0, keepdims=True)
        self._basis, self._series = cosines(layout.shapes[0][0]), layout.shapes[0][1]
        self._last: tuple[np.ndarray, _Variation] | None = None

    def __call__(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        if self._last is None or self._last[0] is not params:
            self._last = params, _Variation.of(self._rests(params, self._own.x))
        error = self._last[1](self._rests(params, x)).transpose(1, 2, 0) @ self._basis
        found: np.ndarray = x.reshape(len(x), -1) - error.reshape(len(x), -1)
        return found

    def errors_of_own(self, params: np.ndarray) -> np.ndarray:
        """Returns the error of each own sample by the samples of other records, float64 `[n]`: leaving out one record
        at a time, or with more than `_FOLDS` records as many parts."""
        rests, number = self._rests(params, self._own.x), records_of(self._own.clips, len(self._own))[1]
        folds, errors = (number if number.any() else np.arange(len(number))) % _FOLDS, np.zeros(len(number))
        for fold in np.unique(folds) if len(number) > 1 else ():
            out = folds == fold
            errors[out] = np.square(_Variation.of(rests[:, ~out])(rests[:, out])).mean((0, 2))
        return errors

    def _rests(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns what is left of each sample, float64 `[frequency, n, series]`."""
        centred = x - self._centre
        rest = centred.reshape(len(x), -1).astype(np.float64) - self._logits_of(params, centred)
        found: np.ndarray = (rest.reshape(len(x), self._series, -1) @ self._basis.T).transpose(2, 0, 1)
        return found


def cosines(steps: int) -> np.ndarray:
    """Returns the orthonormal DCT-II, float32 `[frequency, step]`."""
    places = np.arange(steps)
    basis = np.cos(np.pi / steps * (places + 0.5) * places[:, None]) * math.sqrt(2 / steps)
    basis[0] /= math.sqrt(2)
    found: np.ndarray = basis.astype(np.float32)
    return found
