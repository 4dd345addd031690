"""Measures the noise that an adversary sees, in trials that are not counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

_LEAST_FACTOR = 1e-4


@dataclass
class Moments:
    """Running sums of vectors, for their variances."""

    count: int = 0
    total: Any = 0.0
    squares: Any = 0.0

    def add(self, values: np.ndarray) -> None:
        self.count += 1
        self.total = self.total + values
        self.squares = self.squares + values * values

    @property
    def spread(self) -> np.ndarray:
        """Sum of squared deviations from the mean."""
        return np.maximum(self.squares - self.total**2 / self.count, 0.0)


class MeasuredNoise:
    """Measures the noise of a game's rounds, in units of the noise that is charged.

    Each value has a variance, measured in rounds of all kinds; each kind has a factor on it, measured in all values.
    """

    def __init__(self) -> None:
        self._worlds = {True: Moments(), False: Moments()}
        self._kinds: defaultdict[Hashable, list[float]] = defaultdict(list)

    def add(self, kind: Hashable, inside: bool, noise: np.ndarray) -> None:
        """:param noise: float64 `[n]`, in units of the charged noise."""
        self._worlds[inside].add(noise)
        self._kinds[kind].append(float(np.mean(noise * noise)))

    @cached_property
    def variances(self) -> np.ndarray:
        """The variance of each value, float64 `[n]`, over rounds of all kinds."""
        inside, outside = self._worlds[True], self._worlds[False]
        return (inside.spread + outside.spread) / (inside.count + outside.count - 2)

    def factor(self, kind: Hashable) -> float:
        """Returns the factor for rounds of this kind; 1 if none of them was measured."""
        every = [square for squares in self._kinds.values() for square in squares]
        mean = sum(every) / len(every)
        own = self._kinds[kind] or [mean]
        return max(sum(own) / len(own) / mean, _LEAST_FACTOR) if mean > 0 else 1.0
