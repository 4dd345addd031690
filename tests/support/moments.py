"""The errors of second moments, from their formula, one frequency and one record after the other."""

from __future__ import annotations

import numpy as np


def errors_by(own: np.ndarray, rests: np.ndarray) -> np.ndarray:
    """Returns the error of each rest by a device's own ones, both `[n, frequency, series]`."""
    covariances = [np.atleast_2d(np.cov(own[:, frequency].T)) for frequency in range(own.shape[1])]
    variance = np.mean([np.diag(each) for each in covariances])
    total = np.zeros(len(rests))
    for frequency, covariance in enumerate(covariances):
        inverse = np.linalg.inv(np.eye(len(covariance)) + covariance / variance)
        for sample, rest in enumerate(rests[:, frequency] - own[:, frequency].mean(0)):
            total[sample] += rest @ inverse @ rest
    return total / rests[0].size


def errors_left_out(own: np.ndarray, records: int = 0) -> np.ndarray:
    """Returns each own rest's error by those of other records, which have equal numbers of samples; with more than
    twenty records, a twentieth of them is left out.

    :param records: how many; 0: each sample is one.
    """
    part = np.arange(len(own)) // (len(own) // (records or len(own))) % 20
    return np.array([errors_by(own[part != each], own[[n]])[0] for n, each in enumerate(part)])
