"""Holds labelled samples in memory: images as bytes and sound as int16, converted to normalised float32 on request;
sensor values as float32; or features.

CIFAR-10 takes 600 MB as float32 and 150 MB as bytes; a device's share of it is taken from the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hushfleet.data.targets import CLASSES, Targets
from hushfleet.errors import BadInput, GraphRefused

_UNITS = {np.dtype(np.uint8): 255, np.dtype(np.int16): 1 << 15, np.dtype(np.float32): 1}
"""The stored value that stands for 1, by its type."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Some labelled images, or other samples of one shape.

    :param images: uint8 `[n, C, H, W]`, int16 of sound, or float32.
    :param labels: int64 `[n]`, 0 to classes - 1; or float32 `[n, outputs]`, in their own unit.
    :param mean: per channel; for bytes, of values scaled to 0..1, for sound to -1..1.
    :param std: per channel, likewise; positive.
    :param targets: the kind of the labels.
    :param clips: int64 `[n]`, the clip of each segment of sound: all segments of a clip are one record. None: each
        sample is one.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    targets: Targets = CLASSES
    clips: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype not in _UNITS or self.images.ndim != 4:
            raise BadInput(
                f"images must be uint8, int16 or float32 [n, C, H, W], got {self.images.dtype} "
                f"{list(self.images.shape)}"
            )
        dtype, axes = (np.int64, 1) if self.targets.are_classes else (np.float32, 2)
        if self.labels.dtype != dtype or self.labels.ndim != axes or len(self.labels) != len(self.images):
            raise BadInput(
                f"labels must be {np.dtype(dtype)} [{len(self.images)}{', outputs' * (axes - 1)}], one for each image, "
                f"got {self.labels.dtype} {list(self.labels.shape)}"
            )
        channels = self.images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise BadInput(
                f"data.mean and data.std: {channels} channels need as many means and positive standard deviations, "
                f"got {self.mean} and {self.std}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """float32 `[n, C, H, W]`: (pixel / 255 - mean) / std, likewise with sound / 32768, or (value - mean) / std. Not
        cached."""
        x = self.images.astype(np.float32)
        x *= self.scale[:, None, None]
        x -= self.shift[:, None, None]
        return x

    @property
    def kept(self) -> npt.NDArray[Any]:
        """The stored values, uint8 or float32: `x` is `kept * scale - shift`."""
        return self.images.astype(np.float32) if self.images.dtype == np.int16 else self.images

    @property
    def scale(self) -> npt.NDArray[np.float32]:
        """float32 `[C]`."""
        scale: npt.NDArray[np.float32] = (1 / (self._unit * np.array(self.std))).astype(np.float32)
        return scale

    @property
    def are_images(self) -> bool:
        """True if they can be shown, and moved or mirrored; False for series, vectors and sensor values."""
        return self.images.dtype == np.uint8 and self.images.shape[2] > 1

    @property
    def nbytes(self) -> int:
        """The memory that they take in bytes, without the labels."""
        return self.images.nbytes

    @property
    def _unit(self) -> int:
        return _UNITS[self.images.dtype]

    @property
    def shift(self) -> npt.NDArray[np.float32]:
        """float32 `[C]`."""
        shift: npt.NDArray[np.float32] = (np.array(self.mean) / np.array(self.std)).astype(np.float32)
        return shift

    @property
    def y(self) -> npt.NDArray[Any]:
        """The target of the loss: the labels, scaled numbers, or the rows of `x`."""
        return self.targets.learned(self.labels, self.x if self.targets.are_inputs else self.kept)

    @property
    def records(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first sample of each record, and the number of each sample's record, from 0."""
        return records_of(self.clips, len(self))

    def of_records(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the samples of these records, ascending."""
        return np.sort(chosen) if self.clips is None else np.flatnonzero(np.isin(self.records[1], chosen))

    def take(self, indices: npt.NDArray[np.integer[Any]] | slice) -> Samples:
        """Returns the samples at `indices`, in that order."""
        clips = None if self.clips is None else self.clips[indices]
        return Samples(self.images[indices], self.labels[indices], self.mean, self.std, self.targets, clips)


def records_of(clips: npt.NDArray[np.int64] | None, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the first sample of each record, and the number of each sample's record, from 0.

    :param clips: as those of `Samples`; of `count` samples.
    """
    if clips is None:
        return np.arange(count), np.arange(count)
    _, first, number = np.unique(clips, return_index=True, return_inverse=True)
    return first, number


@dataclass(frozen=True, eq=False)
class FeatureSamples:
    """Labelled images as features, which a network takes as images: of one pixel, unless it takes them all.

    :param features: float32 `[n, count, 1, 1]`, or in the shape of the network's input.
    :param labels: like those of `Samples`, and likewise `targets` and `clips`.
    :param given: how many of them, from the first on, the network takes; the others are for the device's personalized
        head. None: the network takes all, and the personalized head takes the same.
    """

    features: npt.NDArray[np.float32]
    labels: npt.NDArray[Any]
    targets: Targets = CLASSES
    given: int | None = None
    clips: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls,
        features: npt.NDArray[np.float32],
        samples: Samples,
        input_shape: tuple[int, int, int] | None,
        skipped: list[str] | None,
    ) -> FeatureSamples:
        """Returns `samples` with `features` `[n, count, 1, 1]` in place of images. Raises `GraphRefused`.

        :param input_shape: that of the network's input; None: `(count, 1, 1)`.
        :param skipped: the list that receives a text for each sample without finite features, which is left out; None:
            it is an error.
        """
        given, fits = None, np.isfinite(features).all(axis=(1, 2, 3))
        if input_shape is not None and math.prod(input_shape) < features.shape[1]:
            given = math.prod(input_shape)
        elif input_shape is not None:
            features = features.reshape(-1, *input_shape)
        if fits.all():
            return cls(features, samples.labels, samples.targets, given, samples.clips)
        if skipped is None:
            raise GraphRefused("the graph makes features that are not finite numbers")
        (places,) = np.nonzero(~fits)
        skipped += (f"sample {place}: it has no finite features" for place in places)
        kept = samples.take(np.flatnonzero(fits))
        return cls(features[fits], kept.labels, kept.targets, given, kept.clips)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def y(self) -> npt.NDArray[Any]:
        """The target of the loss: the labels, scaled numbers, or the rows of `x`."""
        return self.targets.learned(self.labels, self.features)

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """The network's input, float32 `[n, given, 1, 1]` or in its own shape; a copy if it is not all features."""
        return np.ascontiguousarray(self.features[:, : self.given])

    @property
    def own(self) -> npt.NDArray[np.float32]:
        """The input of the device's personalized head, float32 `[n, F]`."""
        return self.features[:, self.given or 0 :, 0, 0]

    @property
    def kept(self) -> npt.NDArray[np.float32]:
        """The same array as `x`."""
        return self.x

    @property
    def nbytes(self) -> int:
        return self.features.nbytes

    @property
    def scale(self) -> npt.NDArray[np.float32]:
        """One, float32 `[1]`."""
        return np.ones(1, np.float32)

    @property
    def shift(self) -> npt.NDArray[np.float32]:
        """Zero, float32 `[1]`."""
        return np.zeros(1, np.float32)

    def take(self, indices: npt.NDArray[np.integer[Any]] | slice) -> FeatureSamples:
        """Returns the samples at `indices`, in that order."""
        clips = None if self.clips is None else self.clips[indices]
        return replace(self, features=self.features[indices], labels=self.labels[indices], clips=clips)


LabelledSamples = Samples | FeatureSamples
"""Samples for training and test of a network."""


class MakesFeatures(Protocol):
    """Computes the features of images."""

    def of(self, samples: Samples, *, skipped: list[str] | None = None) -> FeatureSamples:
        """Returns the samples with features in place of images."""
        ...


def inputs_of(samples: Samples, features: MakesFeatures | None, *, skipped: list[str] | None = None) -> LabelledSamples:
    """Returns the network's inputs for images: their features if the task has some; see `FeatureGraph.of`."""
    return samples if features is None else features.of(samples, skipped=skipped)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set with its fixed training and test parts.

    :param class_names: the meaning of labels 0, 1, ...; every name can be a folder name. For other targets: the meaning
        of each output.
    :param owners: int64 `[n]`, the device of each training sample, from 0; None if it is not known.
    :param test_owners: int64 `[n]`, the device of each test sample; -1 if that device has no training sample.
    :param column_names: the names of a sample's values, if a table has named them.
    :param device_names: the name of each device that `owners` numbers, if the data have them.
    :param has_test: whether the test part is the user's own, and not held out by a rule.
    """

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    owners: npt.NDArray[np.int64] | None = None
    test_owners: npt.NDArray[np.int64] | None = None
    column_names: tuple[str, ...] = ()
    has_test: bool = False
    device_names: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def common_test(self) -> Samples:
        """The test samples of devices without training samples, whom no model has met; without such, all of them."""
        strangers = np.flatnonzero(self.test_owners == -1) if self.test_owners is not None else np.arange(0)
        return self.test.take(strangers) if len(strangers) else self.test

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def mean(self) -> tuple[float, ...]:
        return self.train.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.train.std
