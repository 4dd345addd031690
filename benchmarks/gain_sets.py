"""Provides the images on which `benchmarks/gain_errors.py` tries the predictions of `hushfleet plan`.

Some are data sets of the gain table. The others are not in it: other data sets, letters of ten classes, photographs in
grey, images that are shrunk to 8 x 8, and images over photographs (the difference of both, as in MNIST-M: Ganin et al.,
"Domain-adversarial training of neural networks", JMLR 2016), in grey and in colour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.data.sets import load

MOST = 20_000  # images of a set
GREY, TINY, COLOUR = (1, 28, 28), (1, 8, 8), (3, 32, 32)
ImageChange = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns changed images; its second argument are photographs, uint8 `[n, 3, 32, 32]`."""


def greyed(images: np.ndarray, _: np.ndarray | None = None) -> np.ndarray:
    """Returns colour images of 32 x 32 in grey, `[n, 1, 28, 28]`."""
    weights = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]
    return _bytes((images * weights).sum(1, keepdims=True)[:, :, 2:30, 2:30])


def shrunk(images: np.ndarray, _: np.ndarray | None = None) -> np.ndarray:
    """Returns images of 28 x 28 without their margin, `[n, 1, 8, 8]`."""
    inner = images[:, :, 2:26, 2:26].astype(np.float32)
    return _bytes(inner.reshape(len(images), 1, 8, 3, 8, 3).mean((3, 5)))


def over_photographs(images: np.ndarray, photographs: np.ndarray) -> np.ndarray:
    """Returns the difference between each image of 28 x 28 and a photograph, `[n, 3, 32, 32]`."""
    behind = photographs[np.random.default_rng(0).integers(0, len(photographs), len(images))].astype(np.int16)
    behind[:, :, 2:30, 2:30] -= images
    return _bytes(np.abs(behind))


def over_grey_photographs(images: np.ndarray, photographs: np.ndarray) -> np.ndarray:
    return greyed(over_photographs(images, photographs))


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).round().astype(np.uint8)


@dataclass(frozen=True)
class ImageSet:
    """A data set `source`, perhaps changed.

    :param shape: of the changed images: channels, height, width.
    :param classes: number of classes, the first ones of the data set.
    """

    source: str
    features: str = "scattering"
    shape: tuple[int, int, int] = GREY
    classes: int = 10
    change: ImageChange | None = None


IN_TABLE = {
    "fashion-mnist": ImageSet("fashion-mnist"),
    "emnist": ImageSet("emnist", classes=26),
    "digits": ImageSet("digits", "filters", TINY),
    "cifar10": ImageSet("cifar10", shape=COLOUR),
}
OTHERS = {
    "mnist": ImageSet("mnist"),
    "letters": ImageSet("emnist"),
    "photographs": ImageSet("cifar10", change=greyed),
    "mnist over photographs": ImageSet("mnist", change=over_grey_photographs),
    "small mnist": ImageSet("mnist", "filters", TINY, change=shrunk),
    "small letters": ImageSet("emnist", "filters", TINY, change=shrunk),
    "small clothes": ImageSet("fashion-mnist", "filters", TINY, change=shrunk),
    "mnist over colour photographs": ImageSet("mnist", shape=COLOUR, change=over_photographs),
    "clothes over colour photographs": ImageSet("fashion-mnist", shape=COLOUR, change=over_photographs),
}
SETS = IN_TABLE | OTHERS


@cache
def images_of(name: str, data_dir: Path | None) -> tuple[Samples, Samples]:
    """Returns the images of a set in a random order, to train on and to test with."""
    wanted, rng = SETS[name], np.random.default_rng(0)
    found, behind = load(wanted.source, data_dir=data_dir), np.zeros(0)
    if wanted.change in (over_photographs, over_grey_photographs):
        behind = load("cifar10", data_dir=data_dir).train.images
    parts = []
    for part in (found.train, found.test):
        order = rng.permutation(np.flatnonzero(part.labels < wanted.classes))[:MOST]
        images, labels = part.images[order], part.labels[order]
        changed = images if wanted.change is None else wanted.change(images, behind)
        channels = changed.shape[1]
        parts.append(Samples(changed, labels, (0.0,) * channels, (1.0,) * channels))
    return parts[0], parts[1]
