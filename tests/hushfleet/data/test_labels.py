"""Labels: those that are missing, those that are codes, and names in two Unicode forms."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hushfleet as hf
from hushfleet.data.arrays import load_arrays
from hushfleet.data.conversion import as_data
from hushfleet.data.csv_file import load_csv_set
from hushfleet.data.labels import NO_CLASS, read_labels
from hushfleet.data.samples import DataSet
from hushfleet.errors import BadInput

COUNT, GAP = 40, 3
X = np.random.default_rng(0).normal(size=(COUNT, 6)).astype(np.float32)
WHOLE = pd.Series(np.arange(COUNT) % 3)
WORDS = pd.Series(np.where(np.arange(COUNT) % 2, "a", "b"))
IS_GAP = pd.Series(np.arange(COUNT) == GAP)


def through_a_file(data: hf.Data, folder: Path) -> DataSet:
    """As a run's data go."""
    data.save(folder / "d.npz")
    return load_arrays(folder / "d.npz").dataset("try")


@pytest.mark.parametrize(
    "y",
    [
        WHOLE.astype(float).mask(IS_GAP),
        WHOLE.astype("Int64").mask(IS_GAP),
        WORDS.mask(IS_GAP),
        WORDS.astype(object).mask(IS_GAP, None),
        WORDS.astype("category").mask(IS_GAP),
        *(WORDS.mask(IS_GAP, text).to_numpy(str) for text in ("nan", "NA", "N/A", "", "  ", "None", "<NA>", "null")),
        np.ma.masked_array(WHOLE, IS_GAP),
    ],
    ids=lambda y: f"{type(y).__name__}-{y.dtype}-{y[GAP]}",
)
def test_a_missing_label_is_refused_with_its_sample(tmp_path: Path, y) -> None:
    said = rf"1 samples, the first of them number {GAP} \(from 0\)"
    with pytest.raises(BadInput, match=said):
        as_data((X, y)).dataset("try")
    with pytest.raises(BadInput, match=said):
        hf.Data(X, y).dataset("try", class_names=("b", "a") if isinstance(y[0], str) else ("0", "1", "2"))
    with pytest.raises(BadInput, match=said):
        through_a_file(hf.Data(X, y), tmp_path)


def test_a_class_may_be_called_as_a_gap_is_where_the_task_says_so() -> None:
    salts = np.where(np.arange(COUNT) % 2, "NA", "K")
    assert as_data((X, salts)).dataset("try", class_names=("K", "NA")).train.labels.max() == 1


def test_a_missing_label_in_a_csv_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("label,device,x,y\na,1,1,2\nNaN,1,1,2\n")
    with pytest.raises(BadInput, match=r"number 1 \(from 0\), have no label \('NaN'\); leave these samples"):
        load_csv_set(tmp_path / "d.csv").dataset("try")
    (tmp_path / "d.csv").write_text("label,device,x,y\na,1,1,2\nb,NA,1,2\n")
    with pytest.raises(BadInput, match=r"train_device: .* number 1 \(from 0\), have no device \('NA'\)"):
        load_csv_set(tmp_path / "d.csv").dataset("try")


def test_hidden_values_are_not_used() -> None:
    hidden = np.ma.masked_greater(np.where(X > 2, 9e9, X), 1e9)
    for make in (lambda: as_data((hidden, WHOLE)), lambda: hf.Data(hidden, WHOLE).dataset("try")):
        with pytest.raises(BadInput, match="a mask hides values"):
            make()
    with pytest.raises(BadInput, match="data: sample 1: "):
        as_data([(X[0], 0), (np.ma.masked_array(X[1], X[1] > 0), 1)])
    open_masks = np.ma.masked_array(X), np.ma.masked_array(WHOLE)
    np.testing.assert_array_equal(
        as_data(open_masks).dataset("try").train.labels, as_data((X, WHOLE)).dataset("try").train.labels
    )


def test_words_of_pandas_go_through_a_file(tmp_path: Path) -> None:
    assert through_a_file(as_data((X, WORDS)), tmp_path).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("y", "outputs", "said"),
    [
        ([0, 1, 2], 3, None),
        ([1, 2], 3, "labels 1 to 2 make 3 outputs, and 1 of these never occurs; give them as texts"),
        (range(1, 11), 11, "labels 1 to 10 make 11 outputs, and 1 of these never occurs"),
        ([2023, 2024], None, "labels 2023 to 2024 make 2025 outputs, and 2023 of these never occur; .* name all 2025"),
        ([0.0, 60000.0], None, "labels 0 to 60000 make 60001 outputs"),
        ([5, 70000], None, "labels must be whole numbers from 0 to 65535, or names of classes"),
    ],
)
def test_labels_that_are_codes_say_the_outputs_that_they_make(caplog, y, outputs, said) -> None:
    labels = np.resize(y, COUNT)
    if outputs is None:
        with pytest.raises(BadInput, match=said):
            as_data((X, labels)).dataset("try")
        assert len(as_data((X, labels.astype(int).astype(str))).dataset("try").class_names) == len(y)
    else:
        assert len(as_data((X, labels)).dataset("try").class_names) == outputs
        assert (said or "") in caplog.text
        assert bool(caplog.text) == (said is not None)


def test_a_name_in_two_unicode_forms_is_one_class_and_one_device() -> None:
    both = np.resize([unicodedata.normalize(form, "café") for form in ("NFC", "NFD")] + ["thé", "thé"], COUNT)
    made = hf.Data(X, both, train_device=both).dataset("try")
    assert made.class_names == ("café", "thé")
    assert made.owners is not None
    assert set(made.owners) == {0, 1}
    as_macos = [unicodedata.normalize("NFD", name) for name in made.class_names]
    assert hf.Data(X, both).dataset("try", class_names=as_macos).train.labels.max() == 1


@pytest.mark.parametrize("kind", ["float32", "float64", "complex64", "str"])
def test_a_number_is_one_label_whatever_the_type_of_its_array(kind: str) -> None:
    names = ("0.1", "3", "-2.5")
    y = np.array([0.1, 3, -2.5, 0.2], np.float64).astype(kind)
    assert read_labels(y, names, "names").tolist() == [0, 1, 2, NO_CLASS]


def test_a_text_that_no_program_writes_for_a_number_is_a_name() -> None:
    y = np.array(["7", "007", "7e0", "+7", "7.0"])
    assert read_labels(y, ("7", "007"), "names").tolist() == [0, 1, NO_CLASS, NO_CLASS, 0]
    assert read_labels(y, ("a",) * 8, "numbers").tolist() == [7, NO_CLASS, NO_CLASS, NO_CLASS, 7]
