"""Random crop and horizontal flip, the augmentation that most papers train CIFAR-10 with.

FedDPA's public code (xiyuanyang45/DynamicPFL) has torchvision's `RandomCrop(32, padding=4)` and
`RandomHorizontalFlip()` before the normalisation. Padding is black there, so it is not 0 but the value that
normalisation gives to black.
"""

from __future__ import annotations

import numpy as np

PADDING = 4  # pixels on each side
FLIP_PROBABILITY = 0.5


def draw_flip_crop(batch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int64 `[batch, 2]`, row and column of each crop in its padded image, and flips bool `[batch]`.

    Drawn in this order for the whole batch: all offsets (image by image, row before column), then one uniform number
    for each image, which is flipped below one half. Every loop that draws from the same generator gets the same.
    """
    offsets = rng.integers(0, 2 * PADDING + 1, (batch, 2))
    return offsets, rng.random(batch) < FLIP_PROBABILITY


def flip_crop(x: np.ndarray, rng: np.random.Generator, *, fill: np.ndarray | float = 0.0) -> np.ndarray:
    """A new array of the batch `x` float32 `[B, C, H, W]`: each image shifted by up to 4 pixels, half of them mirrored.

    :param rng: see `draw_flip_crop` for what is drawn.
    :param fill: what shows where an image was shifted away: one value, or `[C]`; normalised black is `-Samples.shift`.
    """
    return apply_flip_crop(x, *draw_flip_crop(len(x), rng), fill=fill)


def apply_flip_crop(
    x: np.ndarray, offsets: np.ndarray, flips: np.ndarray, *, fill: np.ndarray | float = 0.0
) -> np.ndarray:
    """Applies the flips and crops that `draw_flip_crop` drew, as `flip_crop` does.

    torchvision mirrors the crop. Here the image is mirrored first and cropped at the mirrored column, which is the
    same and copies whole rows.
    """
    height, width = x.shape[2:]
    out = np.empty_like(x)
    out[...] = np.broadcast_to(np.asarray(fill, x.dtype), x.shape[1])[:, None, None]
    turned = x[flips, :, :, ::-1]
    mirrored = iter(turned)
    for image, ((row, column), flip) in enumerate(zip((offsets - PADDING).tolist(), flips.tolist(), strict=True)):
        source, column = (next(mirrored), -column) if flip else (x[image], column)
        rows, columns = _overlap(row, height), _overlap(column, width)
        out[image, :, rows[0], columns[0]] = source[:, rows[1], columns[1]]
    return out


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """The overlap of the shifted image and its frame: places in the frame, and in the image."""
    in_frame, in_image = (slice(max(by, 0), max(size - max(-by, 0), 0)) for by in (-shift, shift))
    return in_frame, in_image
