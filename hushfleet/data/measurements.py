"""Checks for values that look like measurements but are not: unnamed columns, row numbers, a single extreme value."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np

from hushfleet.errors import BadInput

_UNNAMED = re.compile(r"(Unnamed: \d+(_level_\d+)?|nan|None)?")  # names that pandas gives
_FEW = 10  # samples: with fewer nothing is checked
_DENSE = 0.5  # the least share of whole numbers between the minimum and the maximum that occur
_ALIKE, _FLAT = 1e-2, 1e-4  # typical distance in standard deviations at which a network sees little, or nothing
_WILD = 5.0  # standard deviations: at most one value in 25 can be so far away
_FAR = 1e6  # standard deviations: up to here the squares of a gradient are still float32 numbers
_LOOKED_AT = 10_000  # values of a channel
_LARGE, _SMALL = 10.0, 0.05  # root mean squares of a channel
_SHOWN = 16  # channels

_log = logging.getLogger(__name__)


def check_names(names: Sequence[str], where: str) -> None:
    """Raises `BadInput` for a column without a name: pandas and R write their row numbers in such a column."""
    for number, name in enumerate(names, 1):
        if _UNNAMED.fullmatch(name.strip()):
            called = f"is called {name!r}" if name.strip() else "has no name"
            raise BadInput(
                f"{where}: column {number} {called}: this is typical of row numbers that pandas writes, and of empty "
                "columns of a spreadsheet; leave it out (to_csv(..., index=False)), or give it a name"
            )


def warn_of_row_numbers(x: np.ndarray, where: str, names: Sequence[str] = ()) -> None:
    """Warns of columns with unique whole numbers and few gaps, which reveal the order of the samples.

    :param x: `[n, ...]`, the samples.
    :param names: the names of the values of a sample.
    """
    if len(x) < _FEW or x.dtype == np.uint8:
        return
    columns = x.reshape(len(x), -1)
    head = np.sort(columns[:_FEW], axis=0)
    for place in np.flatnonzero((head == np.floor(head)).all(0) & (np.diff(head, axis=0) > 0).all(0)):
        values = columns[:, place]
        least, largest = float(values.min()), float(values.max())
        if (
            largest - least < len(x) / _DENSE
            and (values == np.floor(values)).all()
            and len(np.unique(values)) == len(x)
        ):
            name = repr(names[int(place)]) if names else f"number {place} (from 0) of a sample's values"
            _log.warning(
                "%s: %s has the whole numbers %.0f to %.0f, each of them once, as row numbers are: unless it is a "
                "measurement, leave it out, since a network learns the order of the samples from it",
                where, name, least, largest,
            )  # fmt: skip


def check_spread(
    x: np.ndarray, mean: Sequence[float], std: Sequence[float], where: str, names: Sequence[str] = ()
) -> None:
    """Raises `BadInput`, or warns, if a few extreme values make the standard deviation so large that all others look
    alike.

    :param x: float32 `[n, C, H, W]`.
    :param mean: the mean of each channel of `x`; `std` likewise.
    """
    step = max(1, x.size // x.shape[1] // _LOOKED_AT)
    for channel in np.flatnonzero(_farthest(x, mean, std) > _WILD).tolist():
        deviation = std[channel]
        values = x[:, channel].reshape(len(x), -1)
        some = values.reshape(-1)[::step].astype(np.float64)
        middle = float(np.median(some))
        distances = np.abs(some - middle)
        typical = float(np.median(distances[distances > 0])) if distances.any() else deviation
        if typical < _ALIKE * deviation:
            farthest = np.abs(values - middle).max(1)
            sample = int(farthest.argmax())
            value = values[sample][np.abs(values[sample] - middle).argmax()]
            name = names[channel] if len(names) == len(std) else f"channel {channel}"
            said = (
                f"{where}: {value:g} of sample {sample} (from 0), {name}, makes the standard deviation "
                f"{deviation:.3g}, and half of the other values differ by less than {typical:.2g}: beside it they are "
                "all alike; leave out what is no measurement, or give data.mean and data.std"
            )
            if typical < _FLAT * deviation:
                raise BadInput(said)
            _log.warning("%s", said)


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns each channel's mean and standard deviation (1 if it never changes); pixels count as 0 to 1.

    :param x: `[n, C, H, W]`.

    >>> moments(np.array([[[[1.0]]], [[[3.0]]]], dtype=np.float32))
    ((2.0,), (1.0,))
    """
    scale = 255.0 if x.dtype == np.uint8 else 1.0
    mean, std = (getattr(x, moment)(axis=(0, 2, 3), dtype=np.float64) / scale for moment in ("mean", "std"))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def advise_normalisation(x: np.ndarray, where: str) -> None:
    """Warns of values far from the size at which networks train well, with the moments of a few channels.

    :param x: `[n, C, H, W]`, the values as a network is given them.
    """
    if x.dtype == np.uint8:
        return
    mean, std = map(np.array, moments(x))
    sizes = np.hypot(mean, std) * (x != x[:1]).any((0, 2, 3))
    if (sizes > _LARGE).any() or ((sizes > 0) & (sizes < _SMALL)).any():
        some, deviations = (", ".join(f"{value:.3g}" for value in each) for each in (mean, std))
        shown = f" Those of the samples at hand are [{some}] and [{deviations}]: take them only if these are public"
        _log.warning(
            "%s: the values are given to the network as they are, and are far from 1. Most networks learn better with "
            "data.mean and data.std, public numbers for each of the %d channels.%s", where, len(mean),
            f"{shown} or simulated." * (len(mean) <= _SHOWN),
        )  # fmt: skip


def far_away(x: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Marks the samples with a value so far from the mean that no gradient can be computed from it, bool `[n]`.

    :param x: `[n, C, H, W]`; bytes count as 0 to 1.
    """
    far = np.zeros(len(x), bool)
    for channel in np.flatnonzero(_farthest(x, mean, std) > _FAR).tolist():
        one = slice(channel, channel + 1)
        far |= np.array([_farthest(sample[None, one], mean[one], std[one])[0] > _FAR for sample in x])
    return far


def _farthest(x: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Returns the largest distance of each channel's values from their mean, in standard deviations, `[C]`."""
    if not len(x):
        return np.zeros(len(mean))
    unit = 255 if x.dtype == np.uint8 else 1
    low, high = (extreme(axis=(0, 2, 3)).astype(np.float64) / unit for extreme in (x.min, x.max))
    farthest: np.ndarray = np.maximum(high - mean, mean - low) / np.array(std)
    return farthest
