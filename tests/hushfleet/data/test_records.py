"""The samples of a table that fit a task: each is read alone, and the first that does not fit is named or left out."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.data.form import SampleForm
from hushfleet.data.records import fitted, read_values
from hushfleet.errors import BadInput

NAMES, WHERE = ("sit", "walk"), ("x", "y")
X = np.array([[0.5, 1], [np.nan, 2], [3, 4]])


def test_a_sample_without_a_number_is_left_out_and_no_zeros_take_its_place() -> None:
    skipped = list[str]()
    found = fitted(X, np.array(["sit", "walk", "walk"]), NAMES, where=WHERE, skipped=skipped)
    assert found.images[:, :, 0, 0].tolist() == [[0.5, 1], [3, 4]]
    assert found.labels.tolist() == [0, 1]
    assert skipped == ["sample 1 (walk): its values are no finite numbers"]
    values, fits = read_values(X, "x")
    assert (fits.tolist(), values[1].ravel().tolist()) == ([True, False, True], [0, 0])


def test_pixels_are_whole_numbers_whatever_the_type_of_the_array() -> None:
    skipped = list[str]()
    form = SampleForm(values="pixels")
    found = fitted(X, np.array(["sit", "walk", "walk"]), NAMES, form=form, where=WHERE, skipped=skipped)
    assert (found.images.dtype, found.images.ravel().tolist()) == (np.uint8, [3, 4])
    assert len(skipped) == 2


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_means_than_channels_names_the_keys(count: int) -> None:
    with pytest.raises(BadInput, match=r"data.mean and data.std: 2 channels need as many means"):
        fitted(X[[0, 2]], np.array(["sit", "walk"]), NAMES, mean=(1.0,) * count, std=(1.0,) * count, where=WHERE)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32])
def test_tokens_are_whole_numbers_below_the_vocabulary_whatever_the_type_of_the_array(kind: type) -> None:
    form, y = SampleForm(values="tokens", vocabulary=200), np.array(["sit", "walk"])
    found = fitted(np.array([[0, 199], [7, 3]], kind), y, NAMES, form=form, where=WHERE)
    assert (found.images.dtype, found.x.ravel().tolist()) == (np.float32, [0, 199, 7, 3])
    with pytest.raises(BadInput, match=r"number 1 .* value 200: its values are no tokens, whole numbers from 0 to 199"):
        fitted(np.array([[0, 199], [7, 200]], kind), y, NAMES, form=form, where=WHERE)
    skipped = list[str]()
    x = np.array([[0, 0.5], [-1, 0], [3, 4]])
    found = fitted(x, np.array(["sit", "walk", "sit"]), NAMES, form=form, where=WHERE, skipped=skipped)
    assert (len(skipped), found.images.ravel().tolist()) == (2, [3, 4])


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X, ["sit", "walk", "walk"], r"^x: 1 samples, the first of them number 1 \(from 0\) with the value nan"),
        (X[[0, 2]], [False, True], "^y: 2 samples, .* with the label False: its label is none of sit, walk"),
        (X[[0, 2]].astype(str), [0, 1], "^x is <U32; it must be numbers"),
    ],
)
def test_without_a_list_for_them_the_first_is_an_error(x: np.ndarray, y: list[object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        fitted(x, np.array(y), NAMES, where=WHERE)
