"""Chooses the samples of a device that are never used in training, each by its content alone; all segments of a clip
together, by the content of the clip.

So a sample stays in its part when other samples are added or removed, or when its label is corrected, in every round of
every task with the same form of the sample.
"""

from __future__ import annotations

import hashlib

import numpy as np

from hushfleet.data.samples import Samples

WITHOUT_TEST = 0.2
"""The share of the user's own data that is held out, if they have no test part."""


def is_held_out(samples: Samples, share: float, *, are_all: bool = True) -> np.ndarray:
    """Chooses samples, bool `[n]`: about `share` of them.

    If chance chooses none of several, the first in the order of hashes is chosen; if it chooses all, the last one is
    not chosen. So a device with two samples has one to train on, and one to test with.

    :param are_all: whether these are always all samples of the device. If they may come from one window only, chance
        alone decides, so that no sample changes its part.
    """
    first, number = samples.records
    if not share or (are_all and len(first) < 2):
        return np.zeros(len(samples), bool)
    places = _places(samples.images, number)
    if not are_all:
        return places < share
    chosen = places < share
    if not chosen.any():
        chosen = places == places.min()  # all of several equal images
    if chosen.all():
        chosen = places < places.max()
    return chosen


def chosen_by_content(images: np.ndarray, number: np.ndarray, share: float) -> np.ndarray:
    """Chooses samples, bool `[n]`, each by the content of its record alone.

    :param number: as in `Samples.records`.
    """
    return _places(images, number) < share


def _places(images: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Returns a hash of each image's record as float64 `[n]`, in [0, 1).

    :param number: the number of each image's record, from 0.
    """
    hashes = [hashlib.blake2b(digest_size=8, person=b"hushfleet held") for _ in range(number.max(initial=-1) + 1)]
    for image, record in zip(images, number.tolist(), strict=True):
        hashes[record].update(np.ascontiguousarray(image).tobytes())
    places = np.array([int.from_bytes(each.digest(), "big") / 2.0**64 for each in hashes], np.float64)
    found: np.ndarray = places[number]
    return found


def both_parts(samples: Samples, share: float, *, are_all: bool = True) -> tuple[Samples, Samples]:
    """Returns the samples for training, and those that are never used in it; `are_all` as in `is_held_out`."""
    if not share:
        return samples, samples.take(slice(0, 0))
    held_out = is_held_out(samples, share, are_all=are_all)
    return samples.take(np.flatnonzero(~held_out)), samples.take(np.flatnonzero(held_out))
