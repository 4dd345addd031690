"""Values that look like measurements and are none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hushfleet as hf
from hushfleet.data.arrays import load_arrays
from hushfleet.data.conversion import as_data
from hushfleet.data.csv_file import load_csv_set
from hushfleet.errors import BadInput

COUNT = 60
NOISE = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)
Y = np.repeat([0, 1], COUNT // 2)
FRAME = pd.DataFrame(NOISE, columns=list("abc"))


@pytest.mark.parametrize("header", [",a,b,label", "Unnamed: 0,a,b,label", "Unnamed: 0_level_0,a,b,label", "label,a,b,"])
def test_a_column_without_a_name_is_refused(tmp_path: Path, header: str) -> None:
    number = 4 if header.endswith(",") else 1
    (tmp_path / "d.csv").write_text(f"{header}\n0,1,2,3\n1,2,3,4\n")
    with pytest.raises(BadInput, match=rf"d.csv: column {number} (has no name|is called 'Unnamed: 0)"):
        load_csv_set(tmp_path / "d.csv")


def test_the_index_of_a_frame_is_refused_by_every_door(tmp_path: Path) -> None:
    FRAME.assign(label=Y).to_csv(tmp_path / "d.csv")
    with pytest.raises(BadInput, match="column 1 has no name"):
        load_csv_set(tmp_path / "d.csv")
    read = pd.read_csv(tmp_path / "d.csv").drop(columns="label")
    for made in (as_data((read, Y)), hf.Data(read, Y)):
        with pytest.raises(BadInput, match="column 1 is called 'Unnamed: 0'"):
            made.dataset("try")
    as_data((read, Y)).save(tmp_path / "d.npz")
    with pytest.raises(BadInput, match="column 1 is called 'Unnamed: 0'"):
        load_arrays(tmp_path / "d.npz").dataset("try")


@pytest.mark.parametrize(
    "numbers",
    [
        np.arange(COUNT),
        np.arange(1, COUNT + 1),
        np.random.default_rng(1).permutation(COUNT) + 500,
        np.delete(np.arange(COUNT + 20), np.arange(0, 40, 2)),  # some rows were dropped
    ],
)
def test_row_numbers_are_warned_of_by_every_door(tmp_path: Path, caplog, numbers) -> None:
    frame = FRAME.assign(id=numbers)
    said = f"has the whole numbers {min(numbers)} to {max(numbers)}, each of them once"
    as_data((frame, Y)).dataset("try")
    as_data((frame.to_numpy(), Y)).dataset("try")
    as_data((frame, Y)).save(tmp_path / "d.npz")
    load_arrays(tmp_path / "d.npz").dataset("try")
    frame.assign(label=Y.astype(str)).to_csv(tmp_path / "d.csv", index=False)
    load_csv_set(tmp_path / "d.csv").dataset("try")
    texts = [record.getMessage() for record in caplog.records]
    assert [said in text for text in texts] == [True] * 4
    assert ["'id'" in text for text in texts] == [True, False, True, True]


def test_measurements_are_not_called_row_numbers(caplog) -> None:
    rng = np.random.default_rng(0)
    columns = [NOISE, rng.integers(0, 1000, (COUNT, 5)), rng.integers(0, COUNT, (COUNT, 5)), 5 * np.ones((COUNT, 1))]
    as_data((np.concatenate(columns, 1), Y)).dataset("try")
    as_data((np.arange(COUNT, dtype=np.uint8)[:, None], Y)).dataset("try")  # pixels
    as_data((np.arange(4.0)[:, None], np.arange(4) % 2)).dataset("try")  # too few to say
    assert caplog.text == ""


@pytest.mark.parametrize(("value", "refused"), [(1e30, True), (-1e30, True), (1e6, True), (-9999, False), (9, None)])
def test_one_wild_value_does_not_flatten_the_others_in_silence(caplog, value: float, refused: bool | None) -> None:
    x = NOISE.copy()
    x[7, 1] = value
    data = hf.Data(x, Y, x, Y, column_names=list("abc"))
    if refused:
        with pytest.raises(
            BadInput,
            match=r"of sample 7 \(from 0\), b, makes .* leave out|number 7 .from 0. with the value .?1e",
        ):
            data.dataset("try")
    else:
        data.dataset("try")
        assert (f"{value:g} of sample 7 (from 0), b, makes" in caplog.text) == (refused is False)
    with (
        pytest.raises(BadInput, match="a million standard deviations from the mean")
        if abs(value) > 1e7
        else nullcontext()
    ):
        data.dataset("try", mean=(0,) * 3, std=(1,) * 3)


@pytest.mark.parametrize("sample", range(0, COUNT, 7))
def test_a_wild_value_is_named_by_its_place_in_the_whole(sample: int) -> None:
    """A fifth is held out, and the wild value may be there."""
    x = NOISE.copy()
    x[sample, 1] = 1e30
    with pytest.raises(BadInput, match=rf"of sample {sample} |number {sample} \(from 0\)"):
        as_data((x, Y)).dataset("try")


def test_a_wild_value_of_the_test_part_is_refused() -> None:
    wild = NOISE.copy()
    wild[7, 1] = 1e30
    with pytest.raises(BadInput, match=r"test_x: 1 samples, the first of them number 7 \(from 0\) with the value .*1e"):
        hf.Data(NOISE, Y, wild, Y).dataset("try")


def test_frames_of_pandas_own_types_are_numbers_and_gaps() -> None:
    nullable = FRAME.convert_dtypes().assign(on=Y.astype(bool), count=pd.array([1, 2] * (COUNT // 2), dtype="Int64"))
    assert as_data((nullable, Y)).dataset("try").input_shape == (5, 1, 1)
    nullable.loc[5, "count"] = pd.NA
    with pytest.raises(BadInput, match=r"number 5 \(from 0\) with the value nan"):
        as_data((nullable, Y)).dataset("try")
    with pytest.raises(BadInput, match=r"the column 'day' is datetime64.*; it must be numbers"):
        as_data((FRAME.assign(day=pd.Timestamp("2026-01-01")), Y))


def test_parts_whose_columns_or_classes_differ_are_refused() -> None:
    with pytest.raises(BadInput, match="test_x must have the columns of train_x"):
        hf.Data(FRAME, Y, FRAME[["b", "a", "c"]], Y)
    with pytest.raises(BadInput, match=r"column_names of 'test' are \['b', 'a', 'c'\]"):
        as_data({"train": (FRAME, Y), "test": (FRAME[["b", "a", "c"]], Y)})
    assert hf.Data(FRAME, Y, FRAME, Y).column_names == ("a", "b", "c")

    class Folder(list):
        classes = ("cat", "dog")

    class FolderOfDogs(list):
        classes = ("dog",)

    pairs = [(NOISE[0], 0), (NOISE[1], 0)]
    with pytest.raises(BadInput, match=r"class_names of 'test' are \['dog'\], and of 'train' \['cat', 'dog'\]"):
        as_data({"train": Folder(pairs), "test": FolderOfDogs(pairs)})


def test_rare_events_and_constants_are_no_wild_values(caplog) -> None:
    rare = np.zeros((1000, 3), np.float32)
    rare[::100, 0], rare[500, 1], rare[:, 2] = 1, 1e6, 7
    as_data((rare, np.arange(1000) % 2)).dataset("try")
    assert caplog.text == ""
