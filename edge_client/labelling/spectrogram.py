"""Draws a clip of sound for the labelling page: time to the right, frequency upwards, loud is bright."""

from __future__ import annotations

import io

import numpy as np

from hushfleet.data.images import pillow
from hushfleet.data.sound import Pcm

WINDOW_S = 0.032
SIZE = 640, 256
"""Pixels of the picture."""
_RANGE_DB = 80.0  # below the loudest place, all is black


def spectrogram(pcm: Pcm, sample_rate: int) -> bytes:
    """Returns a JPEG."""
    window = max(16, round(WINDOW_S * sample_rate))
    hop = max(window // 4, len(pcm) // SIZE[0])
    padded = np.concatenate((pcm, np.zeros(window, np.int16)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    level = 20 * np.log10(np.abs(np.fft.rfft(frames * np.hanning(window))) + 1)
    bright = np.clip((level - level.max()) / _RANGE_DB + 1, 0, 1)
    picture = pillow().Image.fromarray((255 * bright.T[::-1]).astype(np.uint8)).resize(SIZE)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=85)
    return out.getvalue()
