"""Reads images, from class folders or as PIL images of a Python program: upright, grey or RGB, as bytes; or, where a
pixel has more than 8 bits, as float32 from 0 to 1.

No file takes more memory than `hushfleet.data.image_limits` allows.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hushfleet.data.image_limits import DECODERS, TEXT_BYTES, check_exif, check_file, check_memory
from hushfleet.errors import BadInput
from hushfleet.paths import no_file

_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""The bytes after `ftyp` in the first 12 bytes of a HEIC file; telephones write HEIC."""
_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
"""The transposition that turns an image upright, by the value of the tag."""
T = TypeVar("T")


def pillow() -> Any:
    """Returns the package PIL. Raises `BadInput` if it is not installed."""
    try:
        import PIL.Image
    except ImportError as error:
        raise BadInput("reading images needs Pillow: pip install pillow") from error
    return PIL


@cache
def _formats() -> tuple[str, ...]:
    """Returns the names of the formats that this Pillow can read: on a card it lacks AVIF."""
    plugins = {}
    for name in DECODERS:
        with contextlib.suppress(ImportError):
            plugins[name.upper()] = importlib.import_module(f"PIL.{name}ImagePlugin")
    plugins["PNG"].MAX_TEXT_MEMORY = TEXT_BYTES  # type: ignore[attr-defined]  # Pillow documents it as a setting
    return tuple(name for name, plugin in plugins.items() if getattr(plugin, "SUPPORTED", True))


def pixels_of(
    image: Any,
    *,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    bit_depth: int = 8,
    is_ours: bool = False,
) -> npt.NDArray[Any]:
    """Returns the pixels of a PIL image, turned upright by its EXIF tag, `[C, H, W]`: uint8, or float32 from 0 to 1.

    :param channels: 1 or 3; None: the image's own.
    :param size: width and height; None: its own.
    :param bit_depth: 8: bytes; 16-bit grey as its upper 8 bits. 9 to 16: float32; 16-bit grey is divided by the largest
        number of so many bits. 0: as the image has them: float32 from 16 bits, else bytes.
    :param is_ours: whether the image may be closed, so that its memory is free for the next copy.
    :raises ValueError: the image's mode has no largest pixel value, or a pixel is larger.
    """
    pil = pillow()
    depth = (bit_depth or 16) if is_deep(image) or (bit_depth > 8 and image.mode == "I") else 8
    most, image = np.float32(2**depth - 1), _upright(image, channels=channels, is_deep=depth > 8, is_ours=is_ours)
    if depth > 8 and image.getextrema()[1] > most:
        raise ValueError(f"it has the pixel {image.getextrema()[1]:g}, and data.bit_depth = {depth} ends at {most:g}")
    if size is not None and size != image.size:
        # When Lanczos enlarges, its artefacts at edges cost a network that was trained on photographs two points.
        grows = size[0] >= image.width and size[1] >= image.height
        image = image.resize(size, pil.Image.Resampling.BILINEAR if grows else pil.Image.Resampling.LANCZOS)
    pixels = np.asarray(image)
    if depth == 8:
        pixels = pixels[None].copy() if image.mode == "L" else np.ascontiguousarray(pixels.transpose(2, 0, 1))
        return unit_pixels(pixels) if bit_depth > 8 else pixels
    return np.repeat(np.clip(pixels, 0, most)[None] / most, channels or 1, axis=0)


def is_deep(image: Any) -> bool:
    """Returns whether a PIL image has pixels of 16 bits."""
    return bool(image.mode.startswith("I;16"))


def unit_pixels(pixels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Returns pixels as float32 from 0 to 1, bytes or already so."""
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels


def stacked(images: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Returns images of one shape as one array, uint8 or, if one of them has more than 8 bits, float32."""
    are_bytes = all(image.dtype == np.uint8 for image in images)
    return np.stack(images if are_bytes else list(map(unit_pixels, images)))


def _upright(image: Any, *, channels: int | None, is_deep: bool = False, is_ours: bool = False) -> Any:
    """Returns the PIL image, turned upright, in mode L or RGB, or F for one with 16 bits. It is copied only if it
    changes, because a copy of a large photograph takes as much memory as a board has left."""
    image.load()  # it also reads what a file has after its pixels
    if is_ours:
        check_exif(image)
    turn = _TURNS.get(image.getexif().get(_ORIENTATION))
    made = image.convert("F") if is_deep else _in_bytes(image, channels=channels)
    if is_ours and made is not image:
        image.close()
    return made if turn is None else made.transpose(pillow().Image.Transpose[turn])


def _in_bytes(image: Any, *, channels: int | None) -> Any:
    """Returns the PIL image in mode L or RGB."""
    pil = pillow()
    if is_deep(image):  # Pillow would cut 16-bit values off at 255
        image = pil.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"images of mode {image.mode!r} have no largest pixel value; save the image with 8 or 16 bits a channel"
        )
    is_grey = pil.Image.getmodebase(image.mode) == "L" if channels is None else channels == 1
    mode = "L" if is_grey else "RGB"
    return image if image.mode == mode else image.convert(mode)


def read_image(
    file: Path | IO[bytes], *, input_shape: tuple[int, int, int] | None = None, bit_depth: int = 8
) -> npt.NDArray[Any]:
    """Reads one image, `[C, H, W]`. Raises `BadInput` that names the file and the reason.

    :param input_shape: (C, H, W); None: the image's own.
    :param bit_depth: as in `pixels_of`.
    """

    def pixels(opened: Any) -> npt.NDArray[Any]:
        if input_shape is None:
            return pixels_of(opened, bit_depth=bit_depth, is_ours=True)
        channels, height, width = input_shape
        # JPEG can be decoded at a half, quarter or eighth of its size, in a fraction of the time and memory.
        whole, _ = opened.size, opened.draft("L" if channels == 1 else "RGB", (2 * width, 2 * height))
        check_memory(opened, whole, channels=channels, size=(width, height), are_bytes=bit_depth == 8)
        return pixels_of(opened, channels=channels, size=(width, height), bit_depth=bit_depth, is_ours=True)

    return _with_image(file, pixels)


def preview(file: Path | IO[bytes], *, longest: int) -> bytes:
    """Returns a JPEG of the image, upright, at most `longest` pixels wide and high, without the camera's metadata.

    Raises `BadInput` that names the file and the reason.
    """

    def jpeg(opened: Any) -> bytes:
        whole, _ = opened.size, opened.draft("RGB", (longest, longest))
        check_memory(opened, whole, channels=3, size=(longest, longest))
        image = _upright(opened, channels=3, is_ours=True)
        image.thumbnail((longest, longest))
        image = pillow().Image.fromarray(np.asarray(image))  # pixels only: otherwise Pillow writes the comments again
        out = io.BytesIO()
        image.save(out, "JPEG", quality=85)
        return out.getvalue()

    return _with_image(file, jpeg)


def _with_image(file: Path | IO[bytes], use: Callable[[Any], T]) -> T:
    """Returns what `use` makes of the opened image. Raises `BadInput` that names the file and the reason."""
    pil, head = pillow(), b""
    try:
        if isinstance(file, Path) and (what := no_file(file)):
            raise BadInput(f"it is {what}")
        with file.open("rb") if isinstance(file, Path) else contextlib.nullcontext(file) as content:
            head = content.read(12)
            check_file(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pil.Image.DecompressionBombWarning)  # `check_memory` knows the memory
            with contextlib.closing(pil.Image.open(file, formats=_formats())) as opened:  # `_upright` may close it
                return use(opened)
    except MemoryError:
        raise
    except Exception as error:  # broken images fail in many ways: OSError, SyntaxError, struct.error, ...
        cause = _in_words(error, head)
        kind = "" if isinstance(cause, BadInput) else f"{type(cause).__name__}: "
        raise BadInput(f"{file} cannot be read as an image: {kind}{cause}") from cause


def _in_words(error: Exception, head: bytes) -> Exception:
    """Returns the error, or one that says it better.

    :param head: the first bytes of the file.
    """
    image = pillow().Image
    if isinstance(error, BadInput):
        return error
    if head[4:8] == b"ftyp" and head[8:] in _BRANDS:
        return BadInput("a HEIC photograph, which Pillow cannot read; save it as JPEG")
    if head.startswith(_POSTSCRIPT):
        return BadInput("its PostScript is a program, and is not run; save the image as JPEG")
    if isinstance(error, image.DecompressionBombError):
        return BadInput(f"{error}; save it smaller")
    if isinstance(error, pillow().UnidentifiedImageError):
        return BadInput(f"it is no whole image of the formats {', '.join(_formats())}; save it as JPEG")
    return error
