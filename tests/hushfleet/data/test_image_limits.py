"""The memory that one image takes: measured for the largest that is read of each format, and refused above."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from hushfleet.data import image_limits, images
from hushfleet.data.image_limits import EXIF_BYTES, FILE_MIB, IMAGE_MIB, MOST_PARTS
from hushfleet.data.images import preview, read_image
from hushfleet.errors import BadInput
from support.image_files import in_several_scans, png, png_chunk, tiff, with_segments

SHAPE = (3, 32, 32)
MARGIN_MIB = 6
"""What a process takes beside the image: modules that Pillow loads for a format, pages that are not full."""
TURNED = Image.Exif()
TURNED[0x0112] = 6
# VmHWM, not ru_maxrss: that begins with what the process that started this one has taken.
CHILD = """
import sys
from pathlib import Path
from hushfleet.data.images import preview, read_image

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])

def read(file):
    if sys.argv[1] == "preview":
        preview(Path(file), longest=1024)
    else:
        channels, _, depth = sys.argv[1].partition(":")
        read_image(Path(file), input_shape=(int(channels), 32, 32), bit_depth=int(depth or 8))

read(sys.argv[2])
open("/proc/self/clear_refs", "w").write("5")
before = peak()
read(sys.argv[3])
print(peak() - before)
"""


def peak_mib(small: Path, large: Path, how: str) -> float:
    """What reading the large image takes in a process that has read a small one of the same form.

    :param how: the number of channels, perhaps with a bit depth, such as `1:16`; or `preview`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, how, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


def read(file: Path, how: str) -> None:
    if how == "preview":
        preview(file, longest=64)
    else:
        channels, _, depth = how.partition(":")
        read_image(file, input_shape=(int(channels), 32, 32), bit_depth=int(depth or 8))


def a_picture(mode: str, width: int, height: int) -> Image.Image:
    row = np.arange(width) * 7
    if mode == "I;16":
        return Image.fromarray(np.tile(row.astype(np.uint16) * 31, (height, 1)))
    grey = Image.fromarray(np.tile(row.astype(np.uint8), (height, 1)))
    if mode == "RGBA":
        made = grey.convert("RGB")
        made.putalpha(grey)
        return made
    return grey if mode == "L" else grey.convert(mode)


class Form(NamedTuple):
    """:param size: of the largest image that is read, nearly; `least`: the MiB that it takes at least.
    :param how: it is read: the number of channels, or `preview`.
    """

    ending: str
    mode: str
    size: tuple[int, int]
    least: int
    saved: dict[str, Any]
    how: str = "3"


_FAST_PNG = {"compress_level": 1, "exif": TURNED}
_ONE_STRIP = {"strip_size": 1 << 30}
_TWO_FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (32, 32))]}
FORMS = {
    "PNG": Form("png", "RGBA", (4096, 4000), 110, _FAST_PNG),
    "PNG, 16 bits": Form("png", "I;16", (4096, 3250), 90, _FAST_PNG),
    "PNG, 16 bits kept": Form("png", "I;16", (4096, 3100), 80, _FAST_PNG, "1:16"),
    "TIFF, 16 bits kept": Form("tif", "I;16", (4096, 2200), 50, {"compression": "tiff_lzw"} | _ONE_STRIP, "1:16"),
    "PNG, palette": Form("png", "P", (4096, 4000), 70, _FAST_PNG),
    "PNG, grey": Form("png", "RGBA", (4096, 6500), 110, _FAST_PNG, "1"),
    "PNG, preview": Form("png", "RGBA", (4096, 3600), 100, _FAST_PNG, "preview"),
    "PNG, animated": Form("png", "RGB", (4096, 4000), 60, _FAST_PNG | _TWO_FRAMES),
    "WEBP": Form("webp", "RGBA", (4096, 1800), 100, {"method": 0, "exif": TURNED}),
    "WEBP, lossless": Form("webp", "RGBA", (4096, 1800), 100, {"method": 0, "lossless": True}),
    "AVIF": Form("avif", "RGBA", (2048, 2700), 60, {"speed": 10, "subsampling": "4:4:4", "exif": TURNED}),
    "GIF": Form("gif", "P", (4096, 4000), 70, {}),
    "BMP": Form("bmp", "RGB", (4096, 4000), 60, {}),
    "PPM": Form("ppm", "RGB", (4096, 2900), 40, {}),
    "TIFF": Form("tif", "CMYK", (4096, 2700), 80, {"compression": "tiff_lzw"} | _ONE_STRIP),
    "TIFF, LZMA": Form("tif", "RGB", (4096, 2320), 60, {"compression": "lzma", "exif": TURNED} | _ONE_STRIP),
    "TIFF, JPEG": Form("tif", "RGB", (4096, 3250), 80, {"compression": "jpeg"} | _ONE_STRIP),
    "JPEG, progressive": Form("jpg", "CMYK", (4096, 3950), 110, {"progressive": True}),
    "JPEG, preview": Form("jpg", "RGB", (4096, 4000), 80, {"progressive": True, "subsampling": 0}, "preview"),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    form = FORMS[request.param]
    if form.ending == "avif" and "AVIF" not in images._formats():
        pytest.skip("this Pillow has no AVIF")
    return form


@pytest.mark.slow
def test_the_largest_image_of_each_format_takes_no_more_than_is_stated(tmp_path: Path, form: Form) -> None:
    small, large = (tmp_path / f"{name}.{form.ending}" for name in ("small", "large"))
    a_picture(form.mode, 32, 32).save(small, **form.saved)
    a_picture(form.mode, *form.size).save(large, **form.saved)
    assert form.least < peak_mib(small, large, form.how) < IMAGE_MIB + MARGIN_MIB


def test_every_format_has_the_limit(tmp_path: Path, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_limits, "IMAGE_MIB", 1)
    file = tmp_path / f"1.{form.ending}"
    a_picture(form.mode, *(side // 8 for side in form.size)).save(file, **form.saved)
    said = r"its \d+ x \d+ pixels \(\w+, \w.*\) take \d MiB to read, and an image may take 1 MiB"
    with pytest.raises(BadInput, match=rf"1\.\w+ cannot be read as an image: {said}"):
        read(file, form.how)


@pytest.mark.slow
@pytest.mark.parametrize("megapixels", [12, 24, 48, 50])
def test_photographs_of_telephones_and_cameras_are_read(tmp_path: Path, megapixels: int) -> None:
    """JPEG is decoded at an eighth of its size."""
    height = int((megapixels * 1e6 * 3 / 4) ** 0.5)
    for name, size in (("small", (32, 24)), ("large", (height * 4 // 3, height))):
        a_picture("RGB", *size).save(tmp_path / f"{name}.jpg", exif=TURNED)
    assert peak_mib(tmp_path / "small.jpg", tmp_path / "large.jpg", "3") < 8
    assert preview(tmp_path / "large.jpg", longest=64)


def test_a_png_image_of_twelve_megapixels_is_read(tmp_path: Path) -> None:
    a_picture("RGB", 4000, 3000).save(tmp_path / "1.png", compress_level=1)
    assert read_image(tmp_path / "1.png", input_shape=SHAPE).shape == SHAPE


def test_a_refused_image_is_told_with_its_pixels_the_limit_and_what_to_do(tmp_path: Path) -> None:
    """A file of some kilobytes: its pixels would take gigabytes."""
    file = tmp_path / "1.png"
    file.write_bytes(png(12000, 10000))
    said = (
        f"{file} cannot be read as an image: its 12000 x 10000 pixels (PNG, L) take 918 MiB to read, and an image may "
        "take 128 MiB; save it with at most 16.7 million pixels, or as a JPEG"
    )
    with pytest.raises(BadInput, match=f"^{re.escape(said)}$"):
        read_image(file, input_shape=SHAPE)
    file.write_bytes(png(200_000, 1000))
    with pytest.raises(BadInput, match=r"200000000 pixels.* exceeds limit of 178956970 pixels.*; save it smaller"):
        read_image(file, input_shape=SHAPE)


@pytest.mark.parametrize("sides", [(1, 2_000_000), (2_000_000, 1)])
def test_rows_and_columns_take_memory_too(tmp_path: Path, sides: tuple[int, int]) -> None:
    file = tmp_path / "1.png"
    file.write_bytes(png(*sides))
    with pytest.raises(BadInput, match=r"take .* MiB to read"):
        read_image(file, input_shape=SHAPE)


def test_an_image_in_several_scans_is_kept_whole_by_libjpeg(tmp_path: Path) -> None:
    out, file = io.BytesIO(), tmp_path / "1.jpg"
    a_picture("L", 800, 600).save(out, "JPEG")
    file.write_bytes(in_several_scans(out.getvalue()))
    assert read_image(file, input_shape=SHAPE).shape == SHAPE
    out = io.BytesIO()
    a_picture("L", 6000, 5000).save(out, "JPEG")
    file.write_bytes(in_several_scans(out.getvalue()))
    with pytest.raises(BadInput, match=r"progressive\) take .* or as a JPEG that is not progressive"):
        read_image(file, input_shape=SHAPE)


def test_a_tile_counts_that_is_larger_than_its_image(tmp_path: Path) -> None:
    file, short, long = tmp_path / "1.tif", 3, 4
    rows = [(256, short, 1, 8), (257, short, 1, 8), (258, short, 1, 8), (259, short, 1, 8), (262, short, 1, 1)]
    tile = [(322, long, 1, 16384), (323, long, 1, 16384), (324, long, 1, 8), (325, long, 1, 8)]
    file.write_bytes(tiff(rows + tile))
    with pytest.raises(BadInput, match=r"its 8 x 8 pixels \(TIFF, L\) take 512 MiB to read"):
        read_image(file, input_shape=SHAPE)


def hostile_heads() -> dict[str, tuple[bytes, str]]:
    jpeg, many = io.BytesIO(), MOST_PARTS + 1
    a_picture("RGB", 32, 32).save(jpeg, "JPEG")
    riff = b"ABCD" + bytes(4)
    text = png_chunk(b"iTXt", b"%07d\0\1\0\0\0" + zlib.compress(b"a" * 1_000_000 + "\N{OWL}".encode()))
    return {
        "segments": (with_segments(jpeg.getvalue(), b"\xff\xe0\0\2" * many), "has more than 65,536 parts"),
        "chunks": (png(8, 8, before=png_chunk(b"abCd") * many), "has more than 65,536 parts"),
        "late chunks": (png(8, 8, after=png_chunk(b"abCd") * many), "has more than 65,536 parts"),
        "RIFF": (b"RIFF" + struct.pack("<I", 4 + 8 * many) + b"WEBP" + riff * many, "has more than 65,536 parts"),
        "strips": (tiff([(273, 4, many, 8)]), "has more than 65,536 parts"),
        "BigTIFF": (b"II+\0\x08\0\0\0" + bytes(99), "it is a BigTIFF file"),
        "texts": (png(8, 8, before=text * 8), "Too much memory used in text chunks"),
        "EXIF": (png(8, 8, before=png_chunk(b"eXIf", b"II*\0" + bytes(EXIF_BYTES))), "it has 1.0 MiB of EXIF data"),
        "late EXIF": (png(8, 8, after=png_chunk(b"eXIf", b"II*\0" + bytes(EXIF_BYTES))), "it has 1.0 MiB of EXIF data"),
    }


@pytest.mark.parametrize("name", hostile_heads())
def test_the_head_of_a_file_takes_no_memory_either(tmp_path: Path, name: str) -> None:
    data, said = hostile_heads()[name]
    (tmp_path / "1.jpg").write_bytes(data)
    with pytest.raises(BadInput, match=said):
        read_image(tmp_path / "1.jpg", input_shape=SHAPE)


def test_a_file_that_is_too_large_is_not_opened(tmp_path: Path) -> None:
    with (tmp_path / "1.webp").open("wb") as file:
        file.write(b"RIFF\xff\xff\xff\xffWEBP")
        file.truncate((FILE_MIB << 20) + 1)
    with pytest.raises(
        BadInput, match="the file has 64 MiB, and image files of at most 64 MiB are read; save it smaller"
    ):
        read_image(tmp_path / "1.webp", input_shape=SHAPE)


def test_other_formats_are_refused_in_words(tmp_path: Path) -> None:
    """Each decoder that can be reached is one more that may take memory."""
    a_picture("RGB", 16, 16).save(tmp_path / "1.jp2")
    (tmp_path / "1.jp2").rename(tmp_path / "1.jpg")
    with pytest.raises(BadInput, match=r"it is no whole image of the formats JPEG, PNG, .*; save it as JPEG"):
        read_image(tmp_path / "1.jpg", input_shape=SHAPE)
