"""Labelled images in memory: bytes until they are asked for, normalised float32 when they are.

CIFAR-10 as float32 is 600 MB and as bytes 150; a device's share of it is taken from the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hushfleet.errors import BadInput


@dataclass(frozen=True, eq=False)
class Samples:
    """Some labelled images.

    :param images: uint8 `[n, C, H, W]`.
    :param labels: int64 `[n]`, 0 to classes - 1.
    :param mean: per channel, of pixels scaled to 0..1.
    :param std: per channel, likewise; positive.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise BadInput(f"images must be uint8 [n, C, H, W], got {self.images.dtype} {list(self.images.shape)}")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise BadInput(
                f"labels must be int64 [{len(self.images)}], one for each image, "
                f"got {self.labels.dtype} {list(self.labels.shape)}"
            )
        channels = self.images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise BadInput(
                f"{channels} channels need as many means and positive standard deviations, "
                f"got {self.mean} and {self.std}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """float32 `[n, C, H, W]`: (pixel / 255 - mean) / std. Computed anew at each call."""
        scale = (1 / (255 * np.array(self.std))).astype(np.float32)
        shift = (np.array(self.mean) / np.array(self.std)).astype(np.float32)
        x = self.images.astype(np.float32)
        x *= scale[:, None, None]
        x -= shift[:, None, None]
        return x

    @property
    def y(self) -> npt.NDArray[np.int64]:
        """int64 `[n]`, the labels."""
        return self.labels

    def take(self, indices: npt.NDArray[np.integer[Any]] | slice) -> Samples:
        """The samples at `indices`, in that order."""
        return Samples(self.images[indices], self.labels[indices], self.mean, self.std)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set with its fixed training and test parts.

    :param class_names: what labels 0, 1, ... mean; every name can serve as a folder name.
    """

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]

    @property
    def classes(self) -> int:
        return len(self.class_names)

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
