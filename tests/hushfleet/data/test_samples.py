"""Samples: normalisation, and what they refuse to be made of."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hushfleet.data.arrays import Data, load_arrays, opened
from hushfleet.data.csv_file import load_csv_set
from hushfleet.data.partition import given_parts
from hushfleet.data.samples import DataSet, Samples
from hushfleet.errors import BadInput
from support.image_files import others_than_files


def colours() -> Samples:
    images = np.zeros((3, 3, 2, 2), dtype=np.uint8)
    images[:, 0], images[:, 1], images[:, 2] = 255, 51, 0
    return Samples(images, np.array([2, 0, 1], dtype=np.int64), (0.5, 0.2, 0.1), (0.25, 0.5, 0.2))


def test_x_is_scaled_by_channel() -> None:
    x = colours().x
    assert x.dtype == np.float32
    assert x.shape == (3, 3, 2, 2)
    # (1 - 0.5) / 0.25, (0.2 - 0.2) / 0.5, (0 - 0.1) / 0.2
    np.testing.assert_allclose(x[1, :, 0, 1], [2.0, 0.0, -0.5], atol=1e-6)


def test_take_keeps_the_order_asked_for() -> None:
    part = colours().take(np.array([2, 0]))
    assert part.y.tolist() == [1, 2]
    assert len(part) == 2
    assert part.images.dtype == np.uint8
    assert part.mean == (0.5, 0.2, 0.1)


def test_a_data_set_answers_from_its_training_part() -> None:
    data = DataSet("tiny", colours(), colours().take(slice(0, 1)), ("a", "b", "c"))
    assert (data.classes, data.input_shape) == (3, (3, 2, 2))
    assert (data.mean, data.std) == ((0.5, 0.2, 0.1), (0.25, 0.5, 0.2))


@pytest.mark.parametrize(
    ("images", "labels", "mean", "std", "reason"),
    [
        (np.zeros((1, 1, 2, 2), np.float64), np.zeros(1, np.int64), (0.0,), (1.0,), "uint8, int16 or float32"),
        (np.zeros((1, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,), r"\[n, C, H, W\]"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,), "one for each image"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int32), (0.0,), (1.0,), "int64"),
        (np.zeros((1, 3, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,), "3 channels"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (0.0,), "positive"),
    ],
)
def test_refuses_arrays_that_do_not_fit(images, labels, mean, std, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        Samples(images, labels, mean, std)


def test_parts_of_two_types_are_refused() -> None:
    """uint8 is divided by 255, and other numbers are not: both would be normalised by the training part's mean."""
    pixels, labels = np.random.default_rng(0).integers(0, 256, (20, 1, 4, 4)), np.arange(20) % 2
    mixed = Data(pixels.astype(np.uint8), labels, pixels, labels)
    with pytest.raises(BadInput, match=r"train_x is uint8, test_x is int64"):
        mixed.dataset("mine")
    wide = Data(pixels, labels, pixels.astype(np.float64), labels).dataset("mine")
    np.testing.assert_array_equal(wide.train.images, pixels.astype(np.float32))  # nothing is cut to bytes


X = np.zeros((20, 3))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Data(X[:0], []), "the train part has no samples; add some"),
        (Data(X, np.arange(20) % 2, X[:0], []), "the test part has no samples; add some, or leave the part out"),
        (Data(X, ["0.5", "1.5"] * 10), "label '0.5' is a number and no name of a class; for numbers to predict take"),
        (
            Data(X, np.arange(20) % 5 + 1, class_names=list("abcde")),
            "with the label 5: its label is none of a, b, c, d, e, or of their numbers 0 to 4",
        ),
        (
            Data(X, np.arange(20) % 2, train_device=np.arange(20) / 2),
            "train_device is float64 of shape [20]; it must be a whole number or a name for each of the 20 samples",
        ),
    ],
)
def test_mistakes_of_own_data_say_what_to_do(data: Data, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        data.dataset("mine")


def test_labels_of_both_parts_are_of_one_kind() -> None:
    with pytest.raises(BadInput, match="both be texts, or both numbers"):
        Data(X, ["a", "b"] * 10, X, [0, 1] * 10).dataset("mine")


def test_labels_that_are_numbers_may_be_names() -> None:
    assert Data(X, ["1.0", "inf"] * 10).dataset("mine").class_names == ("1.0", "inf")  # as some programs write 1
    halves = ("0.5", "1.5")
    assert Data(X, halves * 10, class_names=halves).dataset("mine").class_names == halves


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("label,x,y, x", "columns 2 and 4 are both named 'x'; rename one"),
        ("label,x,y,label", "columns 1 and 4 are both named 'label'"),
        ("device,label,x,device", "columns 1 and 4 are both named 'device'"),
        ("label,x,,", "column 3 has no name"),
    ],
)
def test_two_columns_of_one_name_are_refused(tmp_path: Path, header: str, said: str) -> None:
    """Which of the two the user means cannot be known."""
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,3,4\n1,2,3,4\n")
    with pytest.raises(BadInput, match=re.escape(f"a.csv: {said}")):
        load_csv_set(tmp_path / "a.csv")


def test_a_csv_file_without_lines_or_commas_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,x,y\n")
    with pytest.raises(BadInput, match="the train part has no samples"):
        load_csv_set(tmp_path / "a.csv").dataset("mine")
    (tmp_path / "b.csv").write_text("label|x|y\na|1|2\n")
    with pytest.raises(BadInput, match="columns are separated by commas"):
        load_csv_set(tmp_path / "b.csv")
    with pytest.raises(BadInput, match="or take another partition, such as 'iid'"):
        given_parts(None, devices=2, min_samples=2)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b"}", b" "),
        (b"{'descr'", b"\n  1\n 2"),
        (b"<f4", b"<,4"),
        (b"<f4", b"<z4"),
        (b"(6, 2), }       ", b"(6000000000, 9)}"),  # 216 GB
    ],
)
def test_an_array_whose_head_is_damaged_is_told(tmp_path: Path, right: bytes, wrong: bytes) -> None:
    """Found by random edits: NumPy has a word of its own for each."""
    array, path = io.BytesIO(), tmp_path / "mine.npz"
    np.save(array, np.zeros((6, 2), np.float32))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train_x.npy", array.getvalue().replace(right, wrong))
    with pytest.raises(BadInput, match=r"mine\.npz cannot be read as an \.npz file: "):
        load_arrays(path)


def test_an_encrypted_file_of_arrays_is_told(tmp_path: Path) -> None:
    """Found by fuzzing: zipfile has a RuntimeError for it."""
    path = tmp_path / "mine.npz"
    np.savez(path, train_x=np.zeros((6, 2)))
    data = (
        path.read_bytes()
        .replace(b"PK\3\4\x2d\0\0", b"PK\3\4\x2d\0\1")
        .replace(b"PK\1\2\x2d\3\x2d\0\0", b"PK\1\2\x2d\3\x2d\0\1")
    )
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"mine\.npz cannot be read as an \.npz file: .* is encrypted"):
        load_arrays(path)


def test_a_pipe_is_no_file_of_arrays(tmp_path: Path) -> None:
    with others_than_files(tmp_path):
        (tmp_path / "pipe.jpg").rename(tmp_path / "pipe.npz")
        with (
            pytest.raises(BadInput, match=r"pipe\.npz cannot be read as an \.npz file: it is a pipe"),
            opened(tmp_path / "pipe.npz"),
        ):
            pass
