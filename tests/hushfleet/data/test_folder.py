"""Images from class folders, as a device reads them."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from hushfleet.data.conversion import as_data
from hushfleet.data.folder import FileForm, load_folder, load_unlabelled, scan_folder
from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput
from support.image_files import others_than_files
from support.images import save_folder

CLASSES = ("cat", "dog", "fish")
FORM: FileForm = {"input_shape": (1, 4, 4), "class_names": CLASSES, "mean": (0.0,), "std": (1.0,)}


def scan(path: Path, shape: tuple[int, int, int] = (3, 4, 6), bit_depth: int = 8):
    normal = {"mean": [0.5] * shape[0], "std": [0.25] * shape[0]}
    return scan_folder(path, input_shape=shape, class_names=CLASSES, bit_depth=bit_depth, **normal)


def put(path: Path, colour, size: tuple[int, int] = (6, 4), mode: str = "RGB", **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


def test_reads_classes_in_order_with_their_labels(tmp_path: Path) -> None:
    put(tmp_path / "fish" / "a.png", (0, 0, 255))
    put(tmp_path / "cat" / "b.png", (255, 0, 0))
    put(tmp_path / "cat" / "deeper" / "c.png", (0, 255, 0))
    samples, skipped = scan(tmp_path)
    assert skipped == ()
    assert samples.y.tolist() == [0, 0, 2]
    assert samples.images[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    # (1 - 0.5) / 0.25 and (0 - 0.5) / 0.25
    assert samples.x[0, :, 2, 2].tolist() == [2.0, -2.0, -2.0]


def test_enlarging_adds_nothing_at_edges(tmp_path: Path) -> None:
    """Lanczos would, and a network that was trained on photographs takes it for something."""
    edge = np.repeat(np.uint8([[60, 60, 180, 180]]), 4, 0)
    (tmp_path / "cat").mkdir()
    Image.fromarray(edge).save(tmp_path / "cat" / "a.png")
    found = scan(tmp_path, (1, 16, 16))[0].images[0, 0]
    assert (found.min(), found.max()) == (60, 180)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "webp"])
def test_resizes_and_turns_to_grey(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "dog" / f"large.{suffix}", (200, 200, 200), size=(300, 200))
    samples, _ = scan(tmp_path, (1, 28, 20))
    assert samples.images.shape == (1, 1, 28, 20)
    assert np.abs(samples.images.astype(int) - 200).max() <= 2


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 77, 77),
        ("LA", (77, 255), 77),
        ("RGBA", (77, 77, 77, 255), 77),
        ("P", 0, 0),
        ("1", 1, 255),
        ("I;16", 77 * 257, 77),
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, colour, expected: int) -> None:
    put(tmp_path / "dog" / "one.png", colour, mode=mode)
    samples, skipped = scan(tmp_path)
    assert skipped == ()
    assert (samples.images == expected).all()


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_largest_value_are_skipped_and_not_cut_off(tmp_path: Path, dtype: type) -> None:
    put(tmp_path / "dog" / "one.png", 77, mode="L")
    Image.fromarray(np.full((8, 8), 1000, dtype)).save(tmp_path / "dog" / "two.tif")
    samples, (said,) = scan(tmp_path)
    assert len(samples) == 1
    assert "two.tif" in said
    assert "8 or 16 bits" in said


def test_an_image_of_a_python_program_is_read_as_its_file_is(tmp_path: Path) -> None:
    ramp, exif = (np.arange(64).reshape(8, 8) * 1000).astype(np.uint16), Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "dog").mkdir()
    Image.fromarray(ramp).save(tmp_path / "dog" / "1.png")
    Image.fromarray((ramp >> 8).astype(np.uint8)).save(tmp_path / "dog" / "2.png", exif=exif)
    Image.new("LA", (8, 8), (77, 255)).save(tmp_path / "dog" / "3.png")
    opened = [Image.open(file) for file in sorted((tmp_path / "dog").iterdir())]
    given = as_data([(image, 1) for image in opened]).train_x
    np.testing.assert_array_equal(given, scan(tmp_path, (1, 8, 8), bit_depth=0)[0].images)
    np.testing.assert_array_equal(given[0, 0], ramp / np.float32(65535))
    np.testing.assert_array_equal(scan(tmp_path, (1, 8, 8))[0].images[0, 0], ramp >> 8)  # unless a task says otherwise
    colours = as_data([(Image.new(mode, (2, 2)), 1) for mode in ("RGB", "P", "CMYK")]).train_x
    assert colours.shape == (3, 3, 2, 2)
    with pytest.raises(BadInput, match=r"sample 1 \(from 0\): .* mode 'F'"):
        as_data([(Image.new("L", (8, 8)), 0), (Image.fromarray(ramp.astype(np.float32)), 1)])


def test_a_class_has_its_name_in_either_unicode_form(tmp_path: Path) -> None:
    """macOS writes an accent as a character of its own."""
    form = {"input_shape": (1, 4, 4), "mean": [0.0], "std": [1.0]}
    put(tmp_path / unicodedata.normalize("NFD", "café") / "1.png", 0, mode="L")
    put(tmp_path / "thé" / "1.png", 0, mode="L")
    for name in ("NFC", "NFD"):
        names = [unicodedata.normalize(name, each) for each in ("café", "thé")]
        for lenient in (False, True):
            samples, skipped = scan_folder(tmp_path, class_names=names, lenient=lenient, **form)
            assert samples.labels.tolist() == [0, 1]
            assert skipped == ()


def test_photographs_that_cannot_be_read_are_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(7):
        (tmp_path / "cat" / f"IMG_{number}.jpg").write_bytes(b"\0\0\0\x24ftypheic" + bytes(99))
    said = (
        r"of 7 files none can be used: cat/IMG_0.jpg: a HEIC photograph.* save it as JPEG; .*; and 2 more; put images"
    )
    with pytest.raises(BadInput, match=said):
        scan(tmp_path)


def test_links_to_folders_are_followed_once_and_never_back(tmp_path: Path) -> None:
    data, disk = tmp_path / "data", tmp_path / "disk"
    put(data / "cat" / "1.png", (1, 1, 1))
    put(data / "dog" / "1.png", (2, 2, 2))
    put(disk / "deeper" / "2.png", (3, 3, 3))
    (data / "cat" / "more").symlink_to(disk)
    for name, place in (("again", disk), ("dogs", data / "dog"), ("up", tmp_path)):
        (data / "cat" / name).symlink_to(place)
    samples, skipped = scan(data)
    assert samples.images[:, 0, 0, 0].tolist() == [1, 3, 2]
    assert [text.partition(":")[0] for text in skipped] == ["cat/dogs", "cat/more", "cat/up"]
    assert "a link to a folder that is read elsewhere" in skipped[0]


def test_turns_images_upright_by_their_exif_tag(tmp_path: Path) -> None:
    pixels = np.zeros((6, 4), dtype=np.uint8)  # as the sensor stored it: 6 rows, 4 columns
    pixels[0] = 255  # the stored top row is the right edge of the upright picture
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    (tmp_path / "cat").mkdir()
    Image.fromarray(pixels).save(tmp_path / "cat" / "turned.png", exif=exif)
    samples, _ = scan(tmp_path, (1, 4, 6))
    expected = np.zeros((4, 6), dtype=np.uint8)
    expected[:, 5] = 255
    assert samples.images[0, 0].tolist() == expected.tolist()


def test_unreadable_files_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "cat" / "good.png", (1, 2, 3))
    whole = (tmp_path / "cat" / "good.png").read_bytes()
    for number in range(7):
        (tmp_path / "cat" / f"cut{number}.png").write_bytes(whole[: 20 + number])
    (tmp_path / "cat" / "empty.jpg").write_bytes(b"")
    (tmp_path / "loose.png").write_bytes(whole)
    (tmp_path / ".thumbs").mkdir()
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"x")
    samples, skipped = scan(tmp_path)
    assert len(samples) == 1
    assert [line.partition(":")[0] for line in skipped] == [
        *(f"cat/cut{number}.png" for number in range(7)),
        "cat/empty.jpg",
        "loose.png",
    ]
    with caplog.at_level(logging.WARNING):
        load_folder(tmp_path, input_shape=(3, 4, 6), class_names=CLASSES, mean=[0.5] * 3, std=[1.0] * 3)
    (record,) = caplog.records
    assert "9 files" in record.getMessage()
    assert "and 4 more" in record.getMessage()


def test_an_image_too_large_to_be_sane_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "cat" / "small.png", 0, size=(6, 4), mode="L")
    put(tmp_path / "cat" / "huge.png", 0, size=(200, 200), mode="L")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    samples, skipped = scan(tmp_path)
    assert len(samples) == 1
    assert "decompression bomb" in skipped[0]


def test_a_folder_that_is_no_class_is_refused_with_the_known_names(tmp_path: Path) -> None:
    put(tmp_path / "dogs" / "a.png", 0)
    with pytest.raises(BadInput, match=r"'dogs'.*did you mean dog\?.*cat, dog, fish"):
        scan(tmp_path)


def test_empty_missing_and_odd_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no readable image"):
        scan(tmp_path)
    with pytest.raises(BadInput, match="does not exist"):
        scan(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"input_shape \[2, 4, 6\] begins with 2 channels.*channels, height, width"):
        scan(tmp_path, (2, 4, 6))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), channels=st.sampled_from([1, 3]), count=st.integers(1, 12))
def test_what_is_saved_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, seed: int, channels: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, channels, 4, 6), dtype=np.uint8)
    samples = Samples(images, rng.integers(0, 3, count), (0.5,) * channels, (0.25,) * channels)
    path = tmp_path_factory.mktemp("board")
    save_folder(samples, path, class_names=CLASSES)
    back, _ = scan(path, (channels, 4, 6))
    by_class = samples.take(np.argsort(samples.labels, kind="stable"))
    assert back.labels.tolist() == by_class.labels.tolist()
    assert (back.images == by_class.images).all()


def test_images_without_labels_are_read_from_everywhere_below_evenly_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for value in range(10):
        where = tmp_path / "sub" if value % 2 else tmp_path
        Image.new("L", (4, 4), value).save(where / f"{value}.png")
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "text.txt").write_text("no image")
    form = {"input_shape": (1, 4, 4), "class_names": ("cat", "dog"), "mean": (0.0,), "std": (1.0,)}
    every = load_unlabelled(tmp_path, most=100, **form)
    assert sorted(every.images[:, 0, 0, 0]) == list(range(10))
    assert not every.labels.any()
    some = load_unlabelled(tmp_path, most=3, **form)
    assert list(some.images[:, 0, 0, 0]) == [0, 6, 5]
    assert len(load_unlabelled(tmp_path / "nowhere", most=3, **form)) == 0


def test_what_is_no_file_is_left_out_and_not_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe would be read for ever, and a device may have no end."""
    put(tmp_path / "cat" / "1.png", 9)
    with others_than_files(tmp_path / "cat"):
        samples, skipped = scan(tmp_path)
        assert len(samples) == len(load_unlabelled(tmp_path / "cat", most=9, **FORM)) == 1
    assert skipped == tuple(f"cat/{kind}.jpg: it is a {kind}" for kind in ("device", "pipe", "socket"))
    assert "3 unlabelled files" in caplog.text


def test_a_file_without_an_ending_of_an_image_is_left_out_and_named(tmp_path: Path) -> None:
    """The board would never delete it, whatever `data.keep` says."""
    put(tmp_path / "cat" / "1.png", 9)
    content = (tmp_path / "cat" / "1.png").read_bytes()
    read = ("IMG_0001.JPG", "2.Jpeg", "3.jpe", "4.PNG", "PXL_20260101.MP.jpg")
    left_out = ("image", "clip.mp4", "notes.txt", "5.jpg.part", "Thumbs.db", "6.dng")
    for name in (*read, *left_out):
        (tmp_path / "cat" / name).write_bytes(content)
    samples, skipped = scan(tmp_path)
    assert len(samples) == 1 + len(read)
    said = "its name has no ending of an image, such as .jpg or .png"
    assert sorted(skipped) == sorted(f"cat/{name}: {said}" for name in left_out)
    assert len(load_unlabelled(tmp_path / "cat", most=99, **FORM)) == 1 + len(read)


@pytest.mark.parametrize("ending", ["heic", "HEIC", "heif", "hif"])
def test_a_heic_photograph_is_told_under_each_of_its_names(tmp_path: Path, ending: str) -> None:
    put(tmp_path / "cat" / "1.png", 9)
    (tmp_path / "cat" / f"2.{ending}").write_bytes(b"\0\0\0\x24ftypheic" + bytes(99))
    said = "a HEIC photograph, which Pillow cannot read; save it as JPEG"
    assert scan(tmp_path)[1] == (f"cat/2.{ending}: {said}",)
