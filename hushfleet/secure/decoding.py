"""Finds wrong values of a polynomial (Reed, Solomon 1960; decoded as Welch and Berlekamp, US patent 4,633,470)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hushfleet.secure.prime_field import interpolation, null_vector, product


def wrong_places(points: Sequence[int], values: np.ndarray, degree: int, prime: int) -> list[int] | None:
    """Returns the places of the wrong values: all other values lie on one polynomial of a degree below `degree`.

    :param points: the points of the values, distinct modulo the prime, at least `degree` of them.
    :param values: uint32 `[points]`.

    With n points, up to (n - degree) // 2 wrong values are found; None: there are more wrong values.
    """
    most = (len(points) - degree) // 2
    # Q(x) = y E(x) at each point, with E of degree `most` and Q of a degree below degree + most. Let f be the wanted
    # polynomial: Q - f E is zero at every right value, and there are more right values than its degree, so Q = f E.
    powers = np.ones((len(points), degree + most), np.int64)
    for power in range(1, powers.shape[1]):
        powers[:, power] = powers[:, power - 1] * np.array(points) % prime
    of_values = powers[:, : most + 1] * values[:, None].astype(np.int64) % prime
    solution = null_vector(np.hstack([powers, -of_values]), prime)
    divisor = solution[powers.shape[1] :]
    error = np.zeros(len(points), np.int64)
    for power in range(most, -1, -1):  # E at each point
        error = (error * np.array(points) + divisor[power]) % prime
    right = np.flatnonzero(error)[:degree]
    if len(right) < degree:
        return None
    matrix = interpolation([points[place] for place in right], points, prime)
    expected = product(matrix, values[right, None], prime)[:, 0]
    wrong = [int(place) for place in np.flatnonzero(expected != values)]
    return wrong if len(wrong) <= most else None
