"""The one reader of images: what it copies, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hushfleet.data import images


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("RGB", None), ("L", 1), ("L", None)])
def test_an_image_that_is_as_wanted_is_not_copied(tmp_path: Path, mode: str, channels: int | None) -> None:
    """A large photograph once is all that some boards have room for."""
    Image.new(mode, (5, 3)).save(tmp_path / "1.png")
    with Image.open(tmp_path / "1.png") as opened:
        assert images._upright(opened, channels=channels) is opened


def test_pixels_are_no_view_of_the_image() -> None:
    image = Image.new("RGB", (2, 2))
    pixels = images.pixels_of(image)
    pixels[:] = 9
    assert pixels.flags.owndata
    assert not np.asarray(image).any()
