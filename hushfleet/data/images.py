"""Reads images, from class folders or as PIL images of a Python program: bytes, upright, grey or RGB."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hushfleet.errors import BadInput

_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""The bytes after `ftyp` in the first 12 bytes of a HEIC file; telephones write HEIC."""
_ORIENTATION = 0x0112  # the EXIF tag
T = TypeVar("T")


def pillow() -> Any:
    """Returns the package PIL. Raises `BadInput` if it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise BadInput("reading images needs Pillow: pip install pillow") from error
    return PIL


def pixels_of(image: Any, *, channels: int | None = None, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Returns the pixels of a PIL image, turned upright by its EXIF tag, uint8 `[C, H, W]`.

    :param channels: 1 or 3; None: the image's own.
    :param size: width and height; None: its own.
    :raises ValueError: the image's mode has no largest pixel value.
    """
    pil = pillow()
    image = _upright(image, channels=channels)
    if size is not None and size != image.size:
        # When Lanczos enlarges, its artefacts at edges cost a network that was trained on photographs two points.
        grows = size[0] >= image.width and size[1] >= image.height
        image = image.resize(size, pil.Image.Resampling.BILINEAR if grows else pil.Image.Resampling.LANCZOS)
    pixels = np.asarray(image)
    return pixels[None].copy() if image.mode == "L" else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _upright(image: Any, *, channels: int | None) -> Any:
    """Returns the PIL image, turned upright, in mode L or RGB. It is copied only if it changes, because a copy of a
    large photograph takes as much memory as a board has left."""
    pil = pillow()
    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = pil.ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would cut 16-bit values off at 255
        image = pil.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"images of mode {image.mode!r} have no largest pixel value; save the image with 8 or 16 bits a channel"
        )
    is_grey = pil.Image.getmodebase(image.mode) == "L" if channels is None else channels == 1
    mode = "L" if is_grey else "RGB"
    return image if image.mode == mode else image.convert(mode)


def read_image(file: Path | IO[bytes], *, input_shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Reads one image, uint8 `[C, H, W]`. Raises `BadInput` that names the file and the reason."""
    channels, height, width = input_shape

    def pixels(opened: Any) -> npt.NDArray[np.uint8]:
        # JPEG can be decoded at a half, quarter or eighth of its size, in a fraction of the time and memory.
        opened.draft("L" if channels == 1 else "RGB", (2 * width, 2 * height))
        return pixels_of(opened, channels=channels, size=(width, height))

    return _with_image(file, pixels)


def preview(file: Path | IO[bytes], *, longest: int) -> bytes:
    """Returns a JPEG of the image, upright, at most `longest` pixels wide and high, without the camera's metadata.

    Raises `BadInput` that names the file and the reason.
    """

    def jpeg(opened: Any) -> bytes:
        opened.draft("RGB", (longest, longest))
        image = _upright(opened, channels=3)
        image.thumbnail((longest, longest))
        image = pillow().Image.fromarray(np.asarray(image))  # pixels only: otherwise Pillow writes the comments again
        out = io.BytesIO()
        image.save(out, "JPEG", quality=85)
        return out.getvalue()

    return _with_image(file, jpeg)


def _with_image(file: Path | IO[bytes], use: Callable[[Any], T]) -> T:
    """Returns what `use` makes of the opened image. Raises `BadInput` that names the file and the reason."""
    pil = pillow()
    try:
        with warnings.catch_warnings():
            # An image with more pixels than Pillow's limit would need more memory than a board has.
            warnings.simplefilter("error", pil.Image.DecompressionBombWarning)
            with pil.Image.open(file) as opened:
                if opened.format == "EPS":  # Pillow would have Ghostscript run it, which may never end
                    raise ValueError("PostScript is a program, and is not run; save the image as JPEG")
                return use(opened)
    except MemoryError:
        raise
    except Exception as error:  # broken images fail in many ways: OSError, SyntaxError, struct.error, ...
        reason = (
            ValueError("a HEIC photograph, which Pillow cannot read; save it as JPEG")
            if isinstance(file, Path) and _is_heic(file)
            else error
        )
        raise BadInput(f"{file} cannot be read as an image: {type(reason).__name__}: {reason}") from reason


def _is_heic(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            head = opened.read(12)
    except OSError:
        return False
    return head[4:8] == b"ftyp" and head[8:] in _BRANDS
