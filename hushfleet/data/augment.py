"""Implements random crop and horizontal flip, the augmentation of most papers for CIFAR-10.

FedDPA's public code (xiyuanyang45/DynamicPFL) applies torchvision's `RandomCrop(32, padding=4)` and
`RandomHorizontalFlip()` before the normalisation. The padding there is black, so after the normalisation it is not 0
but the normalised value of black.
"""

from __future__ import annotations

import numpy as np

PADDING = 4  # pixels on each side
FLIP_PROBABILITY = 0.5


def draw_flip_crop(batch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws offsets int64 `[batch, 2]`, row and column of each crop in its padded image, and flips bool `[batch]`.

    The order of draws for the whole batch: all offsets (image by image, row before column), then one uniform number for
    each image, which is flipped if the number is below one half. So loops with equal generators get equal results.
    """
    offsets = rng.integers(0, 2 * PADDING + 1, (batch, 2))
    return offsets, rng.random(batch) < FLIP_PROBABILITY


def flip_crop(x: np.ndarray, rng: np.random.Generator, *, fill: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns a copy of the batch `x` float32 `[B, C, H, W]`: images shifted by up to 4 pixels, and half mirrored.

    :param rng: see `draw_flip_crop` for the draws.
    :param fill: the value of pixels outside the shifted image: one value, or `[C]`; black is `-Samples.shift`.
    """
    return apply_flip_crop(x, *draw_flip_crop(len(x), rng), fill=fill)


def apply_flip_crop(
    x: np.ndarray, offsets: np.ndarray, flips: np.ndarray, *, fill: np.ndarray | float = 0.0
) -> np.ndarray:
    """Applies the flips and crops that `draw_flip_crop` drew, as `flip_crop` does.

    torchvision mirrors the crop. Here the image is mirrored first and then cropped at the mirrored column: the result
    is the same, and whole rows are copied.
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
    """Returns the overlap of the shifted image and its frame: places in the frame, and in the image."""
    in_frame, in_image = (slice(max(by, 0), max(size - max(-by, 0), 0)) for by in (-shift, shift))
    return in_frame, in_image
