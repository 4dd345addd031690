"""Folders of images, as a device has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from hushfleet.data.samples import Samples


def save_folder(samples: Samples, path: Path, *, class_names: Sequence[str]) -> None:
    """Writes samples as PNG files that `load_folder` reads back exactly."""
    digits = len(str(max(len(samples) - 1, 0)))
    for at, (image, label) in enumerate(zip(samples.images, samples.labels, strict=True)):
        folder = path / class_names[int(label)]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        Image.fromarray(np.ascontiguousarray(pixels)).save(folder / f"{at:0{digits}d}.png")
