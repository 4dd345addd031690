"""Tables with named columns: the same samples from every source, and what is asked."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hushfleet.data.arrays import Data
from hushfleet.data.conversion import as_data
from hushfleet.data.csv_file import CsvLayout, load_csv_set
from hushfleet.data.form import SampleForm
from hushfleet.data.samples import DataSet
from hushfleet.errors import BadInput

RNG = np.random.default_rng(0)
ROWS = 30
TABLE = pd.DataFrame(
    {
        "anna": RNG.normal(size=ROWS),
        "activity": np.arange(ROWS) % 3 + 1,
        "b": RNG.integers(-9, 9, ROWS),
        "person": [f"p{row % 4}" for row in range(ROWS)],
        "small": RNG.normal(size=ROWS).astype(np.float32),
        "when": pd.date_range("2026-11-29", periods=ROWS, freq="min")[RNG.permutation(ROWS)],
    }
)
NAMED: dict[str, Any] = {"label_column": "activity", "device_column": "person", "time_column": "when"}


def by_csv(table: pd.DataFrame, path: Path, **named: Any) -> Data:
    table.to_csv(path / "d.csv", index=False)
    return load_csv_set(path / "d.csv", CsvLayout(SampleForm(**named)))


def by_parquet(table: pd.DataFrame, path: Path, **named: Any) -> Data:
    pytest.importorskip("pyarrow")
    table.to_parquet(path / "d.parquet")
    return as_data(path / "d.parquet", **named)


def by_arrow(table: pd.DataFrame, path: Path, **named: Any) -> Data:
    return as_data(pytest.importorskip("pyarrow").Table.from_pandas(table), **named)


class HuggingFace:
    """What is used of a `datasets.Dataset`: columns as lists, and the names of classes."""

    def __init__(self, table: pd.DataFrame, **classes: list[str]) -> None:
        self._table, self.column_names = table, list(table.columns)
        self.features = {name: SimpleNamespace(names=classes.get(name)) for name in table}

    def __getitem__(self, name: str) -> list[Any]:
        return self._table[name].to_numpy().tolist() if name != "when" else list(self._table[name])


def by_datasets(table: pd.DataFrame, path: Path, **named: Any) -> Data:
    return as_data(HuggingFace(table), **named)


SOURCES: dict[str, Callable[..., Data]] = {
    "frame": lambda table, path, **named: as_data(table, **named),
    "rows": lambda table, path, **named: as_data(table.to_dict("records"), **named),
    "csv": by_csv, "parquet": by_parquet, "arrow": by_arrow, "datasets": by_datasets,
}  # fmt: skip


def bits(data: DataSet) -> tuple:
    parts = [(part.images.tobytes(), part.labels.tobytes(), part.images.shape) for part in (data.train, data.test)]
    return *parts, data.class_names, data.column_names, None if data.owners is None else data.owners.tobytes()


@pytest.mark.parametrize("named", [NAMED, {**NAMED, "columns": ("small", "anna")}], ids=["the rest", "a list"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_table_is_the_same_from_every_source(source: str, named: dict[str, Any], tmp_path: Path) -> None:
    found = SOURCES[source](TABLE, tmp_path, **named).dataset("d")
    order = np.argsort(TABLE["when"].to_numpy(), kind="stable")
    x = np.stack([TABLE[name].to_numpy(np.float32) for name in named.get("columns", ("anna", "b", "small"))], 1)
    _, owners = np.unique(TABLE["person"].to_numpy(str), return_inverse=True)
    expected = Data(x[order], TABLE["activity"].to_numpy()[order].astype(str), train_device=owners[order])
    assert bits(found)[:3] == bits(expected.dataset("d"))[:3]
    assert bits(found) == bits(SOURCES["frame"](TABLE, tmp_path, **named).dataset("d"))


LONG = pd.DataFrame(
    [
        {
            "trip": f"t{trip}",
            "step": step,
            "ax": 10.0 * trip + step,
            "ay": -step,
            "label": "ab"[trip % 2],
            "device": trip,
        }
        for trip in range(12)
        for step in range(5)
    ]
)
SERIES = np.array([[[10 * trip + step for step in range(5)], [-step for step in range(5)]] for trip in range(12)])


@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_a_record_are_the_steps_of_a_series(source: str, tmp_path: Path) -> None:
    mixed = LONG.sample(frac=1, random_state=1)
    data = SOURCES[source](mixed, tmp_path, record_column="trip", time_column="step")
    order = np.argsort([int(each) for each in data.train_device])
    x = np.asarray(data.train_x)[order].reshape(12, 2, 5)
    assert (x == SERIES).all()
    assert data.train_y[order].tolist() == list("ab" * 6)
    made = data.dataset("d")
    assert made.input_shape == (2, 1, 5)
    assert made.column_names == ("ax",) * 5 + ("ay",) * 5


@given(st.permutations(range(len(LONG))))
def test_times_and_not_the_order_of_rows_make_a_series(order: list[int]) -> None:
    data = as_data(LONG.iloc[order], record_column="trip", time_column="step")
    found = {int(device): x.tolist() for device, x in zip(data.train_device, data.train_x, strict=True)}
    assert found == {trip: x.tolist() for trip, x in enumerate(SERIES)}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PIXELS = RNG.integers(0, 256, (6, 9, 8, 3)).astype(np.uint8)
CODED = [png(each) for each in PIXELS]


def tar_of(path: Path) -> Path:
    with tarfile.open(path / "w.tar", "w") as tar:
        for place, image in enumerate(CODED):
            for ending, content in (("png", image), ("cls", str(place % 2).encode()), ("json", b"{}")):
                member = tarfile.TarInfo(f"part/{place:03}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path / "w.tar"


IMAGES: dict[str, Callable[[Path], Any]] = {
    "not decoded": lambda path: pd.DataFrame({"image": [{"bytes": each} for each in CODED], "y": list("010101")}),
    "bytes": lambda path: [{"png": image, "cls": place % 2, "__key__": "1"} for place, image in enumerate(CODED)],
    "PIL": lambda path: [(Image.fromarray(each), str(place % 2)) for place, each in enumerate(PIXELS)],
    "lists": lambda path: ([Image.fromarray(each) for each in PIXELS], list("010101")),
    "arrays": lambda path: (PIXELS, np.array(list("010101"))),
    "an iterable": lambda path: iter([(torch.tensor(each), str(place % 2)) for place, each in enumerate(PIXELS)]),
    "WebDataset": tar_of,
}  # fmt: skip


@pytest.mark.parametrize("source", IMAGES)
def test_images_are_the_same_from_every_source(source: str, tmp_path: Path) -> None:
    made = as_data({"train": IMAGES[source](tmp_path), "validation": IMAGES[source](tmp_path)}).dataset("d")
    assert (made.test.images == PIXELS.transpose(0, 3, 1, 2)).all()
    assert made.test.labels.tolist() == [0, 1] * 3
    assert made.has_test


def test_classes_that_a_table_names_are_places() -> None:
    made = as_data(HuggingFace(pd.DataFrame({"x": [[1.0], [2.0]], "label": [2, 0]}), label=["a", "b", "c"]))
    assert made.dataset("d").class_names == ("a", "b", "c")
    assert made.train_y.tolist() == [2, 0]


def test_sparse_matrices_and_half_precision_are_taken() -> None:
    x = np.eye(6)
    for each in (
        scipy.sparse.csr_matrix(x),
        scipy.sparse.coo_array(x),
        torch.tensor(x).bfloat16(),
        torch.eye(6).to_sparse(),
    ):
        assert (as_data((each, np.arange(6) % 2)).train_x == x).all()


def test_tokens_are_a_column_of_lists() -> None:
    made = as_data(pd.DataFrame({"input_ids": [[1, 2, 3], [4, 5, 6]], "label": ["a", "b"]}))
    assert made.train_x.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_targets_that_are_numbers_are_columns() -> None:
    data = as_data(TABLE.drop(columns=["activity", "person", "when"]), label_column=["anna", "small"])
    assert data.train_x.tolist() == TABLE[["b"]].to_numpy().tolist()
    assert data.train_y.tolist() == TABLE[["anna", "small"]].to_numpy().tolist()


X, Y = np.zeros((6, 3)), np.arange(6) % 2
FRAME = pd.DataFrame({"a": np.arange(6.0), "label": Y})


@pytest.mark.parametrize(
    ("source", "named", "said"),
    [
        ((X[:0], Y[:0]), {}, "the train part has no samples; add some"),
        ({"train": (X, Y), "test": (X[:0], Y[:0])}, {}, "the test part has no samples"),
        ([], {}, "the train part has no samples"),
        (FRAME[:0], {}, "the train part has no samples"),
        ({"train": (X, Y), "tset": (X, Y)}, {}, "['train', 'tset']: it needs 'train'"),
        ({"validation": (X, Y)}, {}, "it needs 'train'"),
        ((X * 1j, Y), {}, "samples are complex128; they must be numbers, such as abs(x)"),
        ((X, Y), {"label_column": "a"}, "label_column names a column, and (x, y) arrays have none"),
        ((X, Y), {"collumns": "a"}, "no argument 'collumns'"),
        ((X, Y), {"bit_depth": 4}, "bit_depth"),
        (FRAME, {"label_column": "klass"}, "no column is called klass (label_column); there are a, label"),
        (FRAME, {"columns": ("c",)}, "no column is called c (columns); there are a, label"),
        (FRAME.drop(columns="label"), {}, "no column is called label or labels"),
        (FRAME.assign(y=0), {}, "the columns 'label' and 'y' may both be meant; say label_column = 'label'"),
        (FRAME[["label"]], {}, "no column of values is left beside label"),
        (FRAME.assign(city="Ulm"), {}, "the column 'city' is str; it must be numbers; leave it out"),
        (FRAME.assign(image=[X] * 6), {"columns": ("a", "image")}, "'image' has a whole sample in each row"),
        (FRAME.set_axis(["a", "a"], axis=1), {}, "two columns have one name"),
        (FRAME.assign(when="now"), {"time_column": "when"}, "row 0 (from 0): 'now' is no time; give numbers"),
        (LONG[1:], {"record_column": "trip"}, "the record 't1' has 5 rows, and a sample has 4 steps; leave it out"),
        (LONG.assign(label=list("abcde") * 12), {"record_column": "trip"}, "has several labels or devices"),
        ([{"a": 1, "label": 0}, {"a": 1}], {}, "sample 1 (from 0) lacks 'label'"),
        ([(X[0], 0, 7)] * 4, {}, "a pair (sample, label), or a dict"),
        ([(np.zeros(3), 0), (np.zeros(4), 1)], {}, "must have one shape, and have (3,), (4,); resize images"),
        ([{"png": b"no image", "cls": 1}] * 2, {}, "png: sample 0 (from 0): "),
        (torch.utils.data.DataLoader(list(zip(X, Y, strict=True))), {}, "a DataLoader, which gives batches"),
        ((scipy.sparse.csr_matrix((6, 5000)), Y), {}, "a sparse matrix with 5000 columns; a sample has at most 4096"),
        (7, {}, "data = int: give (x, y) arrays"),
        (Path("none.parquet"), {}, "none.parquet"),
        (Path("none.tar"), {}, "none.tar cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused_in_words(source: Any, named: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        as_data(source, **named)


def test_a_usual_name_is_no_label_where_another_is_named() -> None:
    made = as_data(FRAME.assign(y=2.0), label_column="label")
    assert made.column_names == ("a", "y")


def test_parts_that_are_left_out_are_told(caplog) -> None:
    as_data({"train": (X, Y), "validation": (X, Y), "test": (X[:2], Y[:2])})
    assert "the test part is 'test'; not used: validation" in caplog.text
    as_data({"train": (X, Y), "val": (X, Y)})
    assert "the test part is 'val'; not used: none" in caplog.text


def test_classes_of_one_part_alone_are_told(caplog) -> None:
    Data(X, Y, X, Y + 1).dataset("d")
    assert "only the test part has the classes 2; no device can learn them" in caplog.text
    assert "only the train part has the classes 0" in caplog.text


def test_an_argument_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        BadInput, match=r"'device_colum' \(did you mean 'device_column'\?\); it has label_column, .*, labels"
    ):
        as_data(([[1.0]], [0]), device_colum="d")
    with pytest.raises(BadInput, match=r"as_data has no argument 'label_colum' \(did you mean 'label_column'\?\)"):
        as_data(([[1.0]], [0]), label_colum="d")
