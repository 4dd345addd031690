"""The one reader of images: what it copies, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hushfleet.data import images
from hushfleet.errors import BadInput


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


def test_an_image_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may end in .jpg, and the program may never end."""
    run = list[object]()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given: run.append(given))
    monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: True)
    file = tmp_path / "1.jpg"
    file.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n{} loop\n%%EOF\n")
    for read in (lambda: images.read_image(file, input_shape=(3, 8, 8)), lambda: images.preview(file, longest=8)):
        with pytest.raises(BadInput, match=r"1\.jpg cannot be read as an image: .* PostScript is a program"):
            read()
    assert run == []
