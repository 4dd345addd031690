"""Makes the worst case that an audit inserts: an update as long as clipping allows, or records with such gradients.

A real device's update, or a real image, is easier to hide than the worst one, and a privacy claim covers the worst one.
So canaries are constructed, not real (Nasr et al. 2021, "Adversary instantiation": gradient canaries).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hushfleet.learning.evaluation import Evaluation
from hushfleet.params import ParamLayout

# Multiple of the clip norm: a canary that is not clipped is obvious.
LENGTH = 1000.0


def signs(layout: ParamLayout, rng: np.random.Generator) -> np.ndarray:
    """Returns float32 `[d]` of +1 and -1 at random positions, with equal numbers in each layer if possible.

    Each layer has mean zero, for thresholds that depend on a layer's spread around its mean; no entry is zero, so that
    missing noise in any entry is found.
    """
    out = np.empty(layout.size, np.float32)
    for layer in layout.layers:
        balanced = np.where(np.arange(layer.size) % 2, -1.0, 1.0)
        out[layer.start : layer.stop] = rng.permutation(balanced)
    return out


def canary_update(layout: ParamLayout, clip_norm: float, rng: np.random.Generator) -> np.ndarray:
    """Returns float32 `[d]`, whose norm in each layer is `LENGTH` times `clip_norm`."""
    update = signs(layout, rng)
    for layer in layout.layers:
        update[layer.start : layer.stop] *= LENGTH * finite(clip_norm) / math.sqrt(layer.size)
    return update


def finite(clip_norm: float) -> float:
    return clip_norm if math.isfinite(clip_norm) else 1.0


class WorstData:
    """Answers a method's questions about a device's data so that its reports reveal as much as possible."""

    def __init__(self, classes: int, rng: np.random.Generator) -> None:
        self._classes, self._rng = classes, rng

    count = 1

    def gradient(self, params: Any, indices: np.ndarray) -> tuple[float, Any]:
        return 0.0, self._rng.random(params.shape[-1]).astype(np.float32)

    def squared_gradient(self, params: Any) -> Any:
        return self._rng.random(params.shape[-1]).astype(np.float32)

    def logits(self, params: Any) -> np.ndarray:
        return np.zeros((1, self._classes), np.float32)

    def evaluate(self, params: Any) -> Evaluation:
        return Evaluation(1.0, math.inf)

    def label_counts(self, classes: int) -> np.ndarray:
        return np.arange(classes)


@dataclass(frozen=True, eq=False)
class CanaryGradient:
    """A gradient function in which records with labels beyond the classes are canaries: `classes + i` is the i-th.

    Canary i has a gradient only on its own block of coordinates, disjoint from the others' blocks; other records have
    none.

    :param blocks: float32 `[m, b]` of directions with norm 1, and int `[m, b]` of their coordinates.
    :param length: norm of a canary's gradient.
    """

    classes: int
    blocks: tuple[np.ndarray, np.ndarray]
    length: float

    def __call__(
        self,
        params: Any,
        x: Any,
        y: Any,
        dropout: Any = (),
        out: Any = None,
        teacher: Any = None,
        distill: Any = None,
    ) -> tuple[float, Any]:
        out = np.empty_like(params) if out is None else out
        out[...] = 0
        directions, places = self.blocks
        for number in y[y >= self.classes] - self.classes:
            out[places[number]] += directions[number] * np.float32(self.length / len(y))
        return 0.0, out


def disjoint_blocks(layout: ParamLayout, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns directions `[count, b]` of norm 1 and their coordinates `[count, b]`: disjoint, random, b maximal."""
    width = layout.size // count
    if count == 1:
        places = np.arange(width)[None]
    else:
        places = rng.permutation(layout.size)[: count * width].reshape(count, width)
    return signs(layout, rng)[places] / np.float32(math.sqrt(width)), places
