"""Arithmetic modulo a prime, on whole arrays; and polynomials over it, some of whose values may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from hushfleet.errors import BadInput

PRIMES: dict[Literal[16, 24, 32], int] = {16: (1 << 16) - 15, 24: (1 << 24) - 3, 32: (1 << 31) - 1}
"""The field of each width in bits: the largest prime that fits; for 32 bits 2^31 - 1, so that products fit 63 bits."""
_BYTES = {16: 2, 24: 3, 32: 4}
_BLOCK = 8192  # columns at a time: besides the result, a few MB of memory are used
_EXACT_TERMS = 64


def to_bytes(values: np.ndarray, bits: Literal[16, 24, 32]) -> bytes:
    """Returns values below the prime, uint32 `[n]`, as little-endian integers of `bits` bits.

    >>> to_bytes(np.array([1, 258], dtype=np.uint32), 16).hex()
    '01000201'
    """
    return values.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : _BYTES[bits]].tobytes()


def from_bytes(data: bytes | memoryview, bits: Literal[16, 24, 32]) -> np.ndarray:
    """Returns the inverse of `to_bytes`, uint32 `[n]`. Raises `BadInput` for values that are not below the prime.

    >>> from_bytes(bytes.fromhex("01000201"), 16).tolist()
    [1, 258]
    """
    if len(data) % _BYTES[bits]:
        raise BadInput(f"{len(data)} bytes do not hold a whole number of values of {bits} bits")
    wide = np.zeros((len(data) // _BYTES[bits], 4), np.uint8)
    wide[:, : _BYTES[bits]] = np.frombuffer(data, np.uint8).reshape(-1, _BYTES[bits])
    values: np.ndarray = wide.reshape(-1).view("<u4").astype(np.uint32)
    if values.size and int(values.max()) >= PRIMES[bits]:
        raise BadInput(f"a value of {values.max()} is not below {PRIMES[bits]}")
    return values


def add_into(total: np.ndarray, values: np.ndarray, prime: int) -> None:
    """Adds `values` to `total` modulo the prime, in place; both uint32, below the prime.

    >>> total = np.array([65_520], dtype=np.uint32)
    >>> add_into(total, np.array([2], dtype=np.uint32), 65_521)
    >>> total.tolist()
    [1]
    """
    total += values  # below 2^32, because both are below 2^31
    np.minimum(total, total - np.uint32(prime), out=total)  # a difference below zero becomes 2^31 or more


def subtract_from(total: np.ndarray, values: np.ndarray, prime: int) -> None:
    """Subtracts `values` from `total` modulo the prime, in place; both uint32, below the prime.

    >>> total = np.array([1], dtype=np.uint32)
    >>> subtract_from(total, np.array([2], dtype=np.uint32), 65_521)
    >>> total.tolist()
    [65520]
    """
    add_into(total, (np.uint32(prime) - values) % np.uint32(prime), prime)


def product(matrix: np.ndarray, columns: np.ndarray, prime: int) -> np.ndarray:
    """Returns matrix [r, t] times columns [t, n] modulo the prime, uint32 `[r, n]`.

    It uses floating point and is exact: the matrix is split into halves of 16 bits, so a product of a half and a value
    is below 2^47, and any sum of 64 such products is below 2^53.

    >>> product(np.array([[2]]), np.array([[40_000]]), 65_521).tolist()
    [[14479]]
    """
    total = np.zeros((len(matrix), columns.shape[1]), np.uint64)
    halves = [(matrix & 0xFFFF).astype(np.float64), (matrix >> 16).astype(np.float64)]
    for first in range(0, columns.shape[1], _BLOCK):
        block = columns[:, first : first + _BLOCK].astype(np.float64)
        out = total[:, first : first + _BLOCK]
        for start in range(0, len(columns), _EXACT_TERMS):
            terms = slice(start, start + _EXACT_TERMS)
            for place, half in enumerate(halves[: 1 if prime < 1 << 16 else 2]):
                part = (half[:, terms] @ block[terms]).astype(np.uint64) % np.uint64(prime)
                out += part << np.uint64(16 * place)  # each below 2^47, and there are only a few
    return (total % np.uint64(prime)).astype(np.uint32)


def null_vector(matrix: np.ndarray, prime: int) -> np.ndarray:
    """Returns x, int64 `[n]`, not zero, with matrix x = 0 modulo the prime; `matrix`: int64 `[r, n]`, rank below n."""
    rows, width = matrix % prime, matrix.shape[1]
    pivots: list[int] = []
    free = width - 1
    for column in range(width):
        rank = len(pivots)
        candidates = np.flatnonzero(rows[rank:, column])
        if not candidates.size:
            free = column
            break
        chosen = rank + int(candidates[0])
        rows[[rank, chosen]] = rows[[chosen, rank]]
        rows[rank] = rows[rank] * pow(int(rows[rank, column]), -1, prime) % prime
        others = np.arange(len(rows)) != rank
        rows[others] = (rows[others] - rows[others, column, None] * rows[rank] % prime) % prime
        pivots.append(column)
    x = np.zeros(width, np.int64)
    x[free] = 1
    x[: len(pivots)] = -rows[: len(pivots), free] % prime  # the pivots are the first columns
    return x


@lru_cache(maxsize=64)
def _interpolation(points: tuple[int, ...], targets: tuple[int, ...], prime: int) -> np.ndarray:
    weights = []
    for i, at in enumerate(points):
        divisor = 1
        for j, other in enumerate(points):
            if i != j:
                divisor = divisor * (at - other) % prime
        weights.append(pow(divisor, -1, prime))
    rows = []
    for target in targets:
        if target in points:
            rows.append([int(target == at) for at in points])
            continue
        whole = 1
        for at in points:
            whole = whole * (target - at) % prime
        rows.append([whole * pow(target - at, -1, prime) * w % prime for at, w in zip(points, weights, strict=True)])
    matrix = np.array(rows, np.uint32).reshape(len(targets), len(points))
    matrix.setflags(write=False)
    return matrix


def interpolation(points: Sequence[int], targets: Sequence[int], prime: int) -> np.ndarray:
    """Returns uint32 `[targets, points]`, which maps a polynomial's values at `points` to its values at `targets`.

    The polynomial has a degree below the number of points; all points are distinct modulo the prime.

    >>> interpolation([1, 2], [3], 65_521).tolist()
    [[65520, 2]]
    """
    return _interpolation(tuple(p % prime for p in points), tuple(p % prime for p in targets), prime)


def wrong_places(points: Sequence[int], values: np.ndarray, degree: int, prime: int) -> list[int] | None:
    """Returns the places of the wrong values: all other values lie on one polynomial of a degree below `degree` (Reed,
    Solomon 1960; decoded as Welch and Berlekamp, US patent 4,633,470).

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
