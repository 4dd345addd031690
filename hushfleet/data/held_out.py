"""Chooses the samples of a device that are never used in training, each by its content alone.

So a sample stays in its part when other samples are added or removed, or when its label is corrected, in every round of
every task with the same form of the sample.
"""

from __future__ import annotations

import hashlib

import numpy as np

from hushfleet.data.samples import Samples


def is_held_out(samples: Samples, share: float, *, are_all: bool = True) -> np.ndarray:
    """Chooses samples, bool `[n]`: about `share` of them.

    If chance chooses none of several, the first in the order of hashes is chosen; if it chooses all, the last one is
    not chosen. So a device with two samples has one to train on, and one to test with.

    :param are_all: whether these are always all samples of the device. If they may come from one window only, chance
        alone decides, so that no sample changes its part.
    """
    if not share or (are_all and len(samples) < 2):
        return np.zeros(len(samples), bool)
    if not are_all:
        return chosen_by_content(samples.images, share)
    places = _places(samples.images)
    chosen = places < share
    if not chosen.any():
        chosen = places == places.min()  # all of several equal images
    if chosen.all():
        chosen = places < places.max()
    return chosen


def chosen_by_content(images: np.ndarray, share: float) -> np.ndarray:
    """Chooses samples, bool `[n]`, each by its own content alone."""
    return _places(images) < share


def _places(images: np.ndarray) -> np.ndarray:
    """Returns a hash of each image as float64 `[n]`, in [0, 1)."""
    return np.array([_place(image) for image in images], np.float64)


def _place(image: np.ndarray) -> float:
    digest = hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=8, person=b"hushfleet held")
    return int.from_bytes(digest.digest(), "big") / 2.0**64


def both_parts(samples: Samples, share: float, *, are_all: bool = True) -> tuple[Samples, Samples]:
    """Returns the samples for training, and those that are never used in it; `are_all` as in `is_held_out`."""
    if not share:
        return samples, samples.take(slice(0, 0))
    held_out = is_held_out(samples, share, are_all=are_all)
    return samples.take(np.flatnonzero(~held_out)), samples.take(np.flatnonzero(held_out))
