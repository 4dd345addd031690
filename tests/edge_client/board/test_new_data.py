"""Data that come while the client runs: new files, half-written ones, and folders of CSV files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.notes import notes_in, read_data_use
from hushfleet.errors import BadInput
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, ModelSpec

LONG_S = 3600.0  # whatever the machine does meanwhile, a file that was written now has not settled


@pytest.fixture
def model() -> ModelSpec:
    layout, graph = ParamLayout(("w",), ((2,),)), BlobRef(bytes(32), 1)
    return ModelSpec("own", layout, (1, 1, 2), ("sit", "walk"), (0.0,), (1.0,), (), graph, graph)


def settle(*files: Path) -> None:
    for file in files:
        os.utime(file, (1e9, 1e9))


def test_a_half_written_picture_waits_for_the_next_round(tmp_path: Path, model: ModelSpec, caplog) -> None:
    old, new = tmp_path / "sit/old.png", tmp_path / "walk/new.png"
    for file in (old, new):
        file.parent.mkdir()
        Image.new("L", (2, 1), 9).save(file)
    whole = new.read_bytes()
    settle(old)
    new.write_bytes(whole[:20])
    data = LocalData(OwnDataSection("folder", str(tmp_path)), model, settled_s=LONG_S)
    assert data.samples().y.tolist() == [0]
    assert caplog.records == [], "nobody is told of a file that is being written"
    new.write_bytes(whole)
    settle(new)
    assert data.samples().y.tolist() == [0, 1]


def test_a_file_of_the_future_is_read(tmp_path: Path, model: ModelSpec) -> None:
    """The board's clock was set back since."""
    (tmp_path / "sit").mkdir()
    Image.new("L", (2, 1), 9).save(tmp_path / "sit/1.png")
    os.utime(tmp_path / "sit/1.png", (4e9, 4e9))
    assert len(LocalData(OwnDataSection("folder", str(tmp_path)), model, settled_s=LONG_S).samples()) == 1


def test_what_cannot_be_read_is_told_once(tmp_path: Path, model: ModelSpec, caplog) -> None:
    (tmp_path / "sit").mkdir()
    (tmp_path / "sit/broken.png").write_bytes(b"no image")
    note, _ = notes_in(tmp_path.parent)
    data = LocalData(OwnDataSection("folder", str(tmp_path)), model, may_be_empty=True, note=note)
    told = []
    for name in ("1", "2", "3"):
        if name == "3":
            (tmp_path / "sit/also.png").write_bytes(b"no image")
        Image.new("L", (2, 1), 9).save(tmp_path / f"sit/{name}.png")
        caplog.clear()
        assert len(data.samples()) == int(name)
        told.append([record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING])
    assert [len(each) for each in told] == [1, 0, 1]
    assert "1 are left out" in told[0][0]
    use = read_data_use(tmp_path.parent)
    assert use is not None
    assert (use.used, use.left_out) == (3, 2), "status knows all of them"


def test_of_a_csv_file_that_is_written_the_complete_lines_are_read(tmp_path: Path, model: ModelSpec) -> None:
    """A logger adds a line now and then; half of 12.5 is 1."""
    file = tmp_path / "log.csv"
    data = LocalData(OwnDataSection("csv", str(file)), model, settled_s=LONG_S)
    file.write_text("label,a,b\nsit,1,2\nwalk,3,1")
    assert data.samples().x.ravel().tolist() == [1, 2]
    with file.open("a") as more:
        more.write("2.5\n")
    assert data.samples().x.ravel().tolist() == [1, 2, 3, 12.5]
    file.write_text("label,a,b\nsit,1,2\nwalk,3,4")
    assert len(data.samples()) == 1
    file.write_bytes("label,a,b\nsit,1,2\nwalk,3,4\nÄ".encode()[:-1])
    assert len(data.samples()) == 2, "half of a character is none yet"
    file.write_text("label,a,b\nsit,1,2\nwalk,3,4")
    settle(file)
    assert data.samples().x.ravel().tolist() == [1, 2, 3, 4], "a file without a last newline is whole when it is old"


@pytest.mark.parametrize("may_be_empty", [False, True])
def test_a_folder_of_csv_files_grows(tmp_path: Path, model: ModelSpec, may_be_empty: bool, caplog) -> None:
    data = LocalData(OwnDataSection("csv", str(tmp_path)), model, may_be_empty=may_be_empty, settled_s=LONG_S)
    (tmp_path / "2026-11").mkdir()
    first, second = tmp_path / "2026-11/01.csv", tmp_path / "2026-11/02.csv"
    first.write_text("label,a,b\nsit,1,2\nwalk,3,4\n")
    settle(first)
    assert data.samples().y.tolist() == [0, 1]
    second.write_text("a,label,b\n5,walk,6\n7,si")
    (tmp_path / ".02.csv.part").write_text("label,a")
    assert data.samples().x.ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert caplog.records == []
    for name, text in {
        "swapped.csv": "label,b,a\nsit,1,2\n",
        "wide.csv": "label,a,b,c\nsit,1,2,3\n",
        "notes.txt": "nothing",
        "odd.csv": "label,a,b\nsit,x,2\nrun,1,2\nsit,8,9\n",
    }.items():
        (tmp_path / name).write_text(text)
        settle(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.csv")
    assert data.samples().x.ravel().tolist() == [1, 2, 3, 4, 5, 6, 8, 9]
    for said in (
        "2: no file whose name ends in .csv, as notes.txt",
        "1: 'a' = 'x' is not a number, as odd.csv, line 2",
        "1: its columns of values are not those of 2026-11/01.csv, in the same order, as swapped.csv",
        "1: has 3 columns of values, the task wants 2: 1 x 1 x 2, as wide.csv",
        "1: its label is none of sit, walk, as sample 3 (run)",
    ):
        assert said in caplog.text


@pytest.mark.parametrize(
    "line", ['sit;"3,5;4,5', '"sit;3,5;4,5', "sit;1.234,5;4,5", 'sit;3,5;4,5"', "sit;3,5"], ids=lambda line: line
)
def test_a_bad_line_takes_no_other_line_along(line: str, tmp_path: Path, model: ModelSpec) -> None:
    """With the unit `record`, a line that comes or goes may change its own gradient alone."""
    file = tmp_path / "log.csv"
    file.write_text(f"label;a;b\nsit;1,5;2,5\n{line}\nwalk;5,5;6,5\nwalk;7;8\n")
    note, _ = notes_in(tmp_path)
    data = LocalData(OwnDataSection("csv", str(file)), model, may_be_empty=True, note=note)
    assert data.samples().x.ravel().tolist() == [1.5, 2.5, 5.5, 6.5, 7, 8]
    use = read_data_use(tmp_path)
    assert use is not None
    assert (use.used, use.left_out) == (3, 1)
    assert "line 3" in use.why


def test_a_folder_without_a_csv_file_is_said(tmp_path: Path, model: ModelSpec) -> None:
    with pytest.raises(BadInput, match=r"holds no CSV file that can be read$"):
        LocalData(OwnDataSection("csv", str(tmp_path)), model).samples()
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match=r"can be read: 1: the first line must name the columns, .* as a.csv"):
        LocalData(OwnDataSection("csv", str(tmp_path)), model).samples()
    assert np.array_equal(LocalData(OwnDataSection("csv", str(tmp_path)), model, may_be_empty=True).samples().y, [])
