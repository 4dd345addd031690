"""Small random pictures, as files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("aphid", "beetle", "flower", "fruit", "leaf", "mildew", "mould", "root", "spot", "stem")


def a_picture(file: Path, seed: int = 0, size: tuple[int, int] = (8, 8)) -> Path:
    """Writes a picture that looks as if it had been there for years; later seeds are younger by a second."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file)
    os.utime(file, (1e9 + seed, 1e9 + seed))
    return file
