"""Makes folders of clips whose values say which clip it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.data.sound import write_clip

RATE, LENGTH = 1000, 100


def save_clip(path: Path, number: int, *, frames: int = 250) -> Path:
    """Writes a clip in which each value is its number; its segment k is louder by k."""
    write_clip(path, (number * 10 + np.arange(frames) // LENGTH).astype(np.int16), RATE)
    return path


def numbers_of(samples: Samples) -> list[int]:
    """Returns the number of each segment's clip."""
    return [int(segment.flat[0]) // 10 for segment in samples.images]
