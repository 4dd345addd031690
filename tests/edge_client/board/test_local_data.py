"""Sensor values on a board: .npz and CSV files that fit a task, and words for those that do not."""

from __future__ import annotations

import os
import re
import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hushfleet import progress
from hushfleet.data.csv_file import load_csv_set, read_csv
from hushfleet.data.form import SampleForm
from hushfleet.data.targets import Targets
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.notes import DataUse, notes_in, read_data_use
from hushfleet.edge_client.board.sample_files import load_file
from hushfleet.errors import BadInput
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, ModelSpec

SERIES = np.arange(24, dtype=float).reshape(4, 2, 3)


@pytest.fixture
def model() -> ModelSpec:
    layout, graph = ParamLayout(("w",), ((2,),)), BlobRef(bytes(32), 1)
    return ModelSpec("own", layout, (2, 1, 3), ("sit", "walk"), (1.0, 2.0), (4.0, 5.0), (), graph, graph)


def samples(kind: Any, path: Any, model: ModelSpec) -> Any:
    return LocalData(OwnDataSection(kind, str(path)), model).samples()


def test_arrays_and_csv_of_the_same_values_are_the_same_samples(tmp_path, model):
    np.savez(tmp_path / "d.npz", x=SERIES, y=[0, 1, 1, 0])
    np.savez(tmp_path / "named.npz", x=SERIES, y=["sit", "walk", "walk", "sit"])
    lines = [
        f"{label},{','.join(map(str, row))}"
        for label, row in zip(("sit", "walk", "walk", "sit"), SERIES.reshape(4, -1), strict=True)
    ]
    (tmp_path / "d.csv").write_text("\n".join(["label,a0,a1,a2,b0,b1,b2", *lines]))
    expected = (SERIES[:, :, None] - [[[1.0]], [[2.0]]]) / [[[4.0]], [[5.0]]]
    for kind, name in (("arrays", "d.npz"), ("arrays", "named.npz"), ("csv", "d.csv")):
        found = samples(kind, tmp_path / name, model)
        np.testing.assert_allclose(found.x, expected, rtol=1e-6)
        assert found.y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("type_of_values", "mean", "std", "said"),
    [
        ("uint8", 0.5, 0.25, ""),
        ("int64", 0.5, 0.25, "taken as they are, not as pixels"),
        ("float64", 0.5, 0.25, "taken as they are, not as pixels"),
        ("int64", 100.0, 50.0, ""),
        ("uint8", 100.0, 50.0, "uint8, which is read as pixels and divided by 255"),
    ],
)
def test_values_in_another_unit_than_the_tasks_are_told(tmp_path, model, caplog, type_of_values, mean, std, said):
    """Nothing is cut or wrapped; but a task for pixels sees those of wider types 255 times too large."""
    task = replace(model, input_shape=(1, 4, 4), mean=(mean,), std=(std,))
    pixels = np.random.default_rng(0).integers(0, 256, (9, 1, 4, 4))
    np.savez(tmp_path / "d.npz", x=pixels.astype(type_of_values), y=[0] * 9)
    found = samples("arrays", tmp_path / "d.npz", task)
    scale = 255 if type_of_values == "uint8" else 1
    np.testing.assert_allclose(found.x, (pixels / scale - mean) / std, rtol=1e-5, atol=1e-5)
    told = [record.getMessage() for record in caplog.records]
    assert [said in text for text in told] == [True] * bool(said), told


@pytest.mark.parametrize("targets", [Targets(), Targets("squared", tolerance=1.0)])
def test_a_file_that_has_no_line_yet_holds_no_samples(tmp_path, model, targets):
    names = ("sit", "walk") if targets.are_classes else ("power",)
    task = replace(model, class_names=names, targets=targets)
    (tmp_path / "d.csv").write_text(f"{'label' if targets.are_classes else 'power'},a0,a1,a2,b0,b1,b2\n")
    np.savez(tmp_path / "d.npz", x=SERIES[:0], y=targets.blank(0, 1))
    for kind in ("csv", "arrays"):
        path = tmp_path / f"d.{'csv' if kind == 'csv' else 'npz'}"
        assert len(LocalData(OwnDataSection(kind, str(path)), task, may_be_empty=True).samples()) == 0
        with pytest.raises(BadInput, match="holds no samples"):
            LocalData(OwnDataSection(kind, str(path)), task).samples()


def test_a_vector_is_an_image_of_one_pixel(tmp_path, model):
    np.savez(tmp_path / "d.npz", x=SERIES[:, :, 0], y=[0, 1, 1, 0])
    assert samples("arrays", tmp_path / "d.npz", replace(model, input_shape=(2, 1, 1))).x.shape == (4, 2, 1, 1)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": SERIES}, "lacks the array 'y'; it needs 'x' and 'y'"),
        ({"x": SERIES[:, :1], "y": [0] * 4}, r"shape \[1, 1, 3\], and the task takes \[2, 1, 3\]"),
        ({"x": SERIES, "y": [0, 1, 2, 0]}, "label 2: its label is none of sit, walk, or of their numbers 0 to 1"),
        ({"x": SERIES, "y": ["run"] * 4}, "number 0 .from 0. with the label run: its label is none of sit, walk"),
        ({"x": SERIES, "y": [0]}, r"shape \[1\]; it must be \[4\]"),
        ({"x": np.where(SERIES == 7, np.inf, SERIES), "y": [0] * 4}, "first of them number 1"),
        ({"x": SERIES[:0], "y": np.zeros(0, int)}, "holds no samples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_words(tmp_path, model, arrays, said):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(BadInput, match=said):
        samples("arrays", tmp_path / "d.npz", model)


def test_csv_that_does_not_fit_is_refused_in_words(tmp_path, model):
    (tmp_path / "d.csv").write_text("label,a,b\nsit,1,2\n")
    with pytest.raises(BadInput, match="2 columns of values, the task wants 6: 2 x 1 x 3"):
        samples("csv", tmp_path / "d.csv", model)


@pytest.fixture
def numbers(model) -> ModelSpec:
    targets = Targets("squared", 0.5, (10.0, 0.0), (2.0, 1.0))
    return replace(model, input_shape=(2, 1, 1), class_names=("load", "heat"), targets=targets)


def test_targets_of_arrays_and_csv_are_the_same_and_scaled_for_the_loss_alone(tmp_path, numbers):
    x, y = np.arange(6.0).reshape(3, 2), np.array([[10, 1], [12.5, -1], [8, 0]])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    lines = [f"{b},{load},{a},{heat}" for (a, b), (load, heat) in zip(x[:, ::-1].tolist(), y.tolist(), strict=True)]
    (tmp_path / "d.csv").write_text("\n".join(["first,load,second,heat", *lines]))
    for kind, name in (("arrays", "d.npz"), ("csv", "d.csv")):
        found = samples(kind, tmp_path / name, numbers)
        np.testing.assert_allclose(found.x[..., 0, 0], (x - [1, 2]) / [4, 5], rtol=1e-6)
        assert found.labels.dtype == found.y.dtype == np.float32
        assert found.labels.tolist() == y.tolist()
        assert found.y.tolist() == [[0, 1], [1.25, -1], [-1, 0]]
        assert found.take(np.array([1])).y.tolist() == [[1.25, -1]]


@pytest.mark.parametrize(
    ("loss", "y", "said"),
    [
        ("squared", [[1, 2], [1, np.nan]], r"1 samples, the first of them number 1 .* with \[1.0, nan\]"),
        ("squared", [[1e39, 2], [1, 2]], "not finite float32"),
        ("squared", [1.0, 2.0], r"shape \[2, 1\]; with model.loss = 'squared' it must be \[2, 2\].*: load, heat"),
        ("squared", [["a", "b"]] * 2, "must be numbers"),
        ("binary", [[0, 1], [1, 0.5]], "first of them number 1 .* neither 0 nor 1"),
    ],
)
def test_targets_that_do_not_fit_are_refused_in_words(tmp_path, numbers, loss, y, said):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 2)), y=y)
    targets = numbers.targets if loss == "squared" else Targets(loss)
    with pytest.raises(BadInput, match=said):
        samples("arrays", tmp_path / "d.npz", replace(numbers, targets=targets))


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [("squared", [np.nan, 2]), ("squared", [1e39, 2]), ("binary", [1, 0.5])],
)
def test_targets_that_do_not_fit_are_left_out_where_a_device_may_have_none(tmp_path, numbers, loss, wrong):
    y = [[0, 1], wrong, [1, 1]]
    np.savez(tmp_path / "d.npz", x=np.arange(6.0).reshape(3, 2), y=y)
    task = replace(numbers, targets=numbers.targets if loss == "squared" else Targets(loss))
    section = OwnDataSection("arrays", str(tmp_path / "d.npz"))
    found = LocalData(section, task, may_be_empty=True).samples()
    assert found.labels.tolist() == [[0, 1], [1, 1]]


def test_what_is_left_out_is_told_on_the_board(tmp_path, model, caplog):
    path, (note, _) = tmp_path / "d.npz", notes_in(tmp_path)
    np.savez(path, x=SERIES, y=["sit", "run", "walk", "sit"])
    data = LocalData(OwnDataSection("arrays", str(path)), model, may_be_empty=True, note=note)
    assert len(data.samples()) == 3
    why = "1: its label is none of sit, walk, as sample 1 (run)"
    assert read_data_use(tmp_path) == DataUse(3, 1, why, noise_alone=True)
    assert f"data.path = {str(path)!r}: 3 samples are used; 1 are left out: {why}" in caplog.text
    path.unlink()
    assert len(data.samples()) == 0
    found = read_data_use(tmp_path)
    assert found is not None
    assert (found.used, found.left_out, "No such file" in found.why) == (0, 0, True)
    assert "takes part with noise alone" in caplog.text
    np.savez(path, x=SERIES, y=["sit", "walk", "walk", "sit"])
    assert len(data.samples()) == 4
    assert read_data_use(tmp_path) == DataUse(4, noise_alone=True)


def test_a_board_refuses_what_a_simulation_refuses(tmp_path, model):
    """Or leaves it out, where a device may have no samples."""
    far, nan = SERIES.copy(), np.array([0, np.nan, 1, 0])
    far[1, 0, 0] = 1e30
    for x, y, said in (
        (far, [0, 1, 1, 0], "1 samples, the first of them number 1 (from 0) with the value 1e+30"),
        (SERIES, nan, "1 samples, the first of them number 1 (from 0) with the label nan"),
        (SERIES, ["sit", "NA", "walk", "sit"], "number 1 (from 0) with the label NA"),
    ):
        np.savez(tmp_path / "d.npz", x=x, y=y)
        with pytest.raises(BadInput, match=re.escape(said)):
            samples("arrays", tmp_path / "d.npz", model)
        section = OwnDataSection("arrays", str(tmp_path / "d.npz"))
        assert LocalData(section, model, may_be_empty=True).samples().labels.tolist() == [0, 1, 0]


def test_a_number_that_may_be_a_name_takes_no_other_sample_along(tmp_path, model):
    """An aggregator may call classes as it likes: by one such sample it would see whether a board has any."""
    np.savez(tmp_path / "d.npz", x=SERIES, y=[0, 1, 2, 0])
    task, note = replace(model, class_names=("sit", "walk", "1")), notes_in(tmp_path)[0]
    with pytest.raises(BadInput, match="with the label 1: its label may be the name of a class or its place from 0"):
        samples("arrays", tmp_path / "d.npz", task)
    section = OwnDataSection("arrays", str(tmp_path / "d.npz"))
    assert LocalData(section, task, may_be_empty=True, note=note).samples().labels.tolist() == [0, 2, 0]
    use = read_data_use(tmp_path)
    assert use is not None
    assert (use.left_out, use.why.startswith("1: its label may be the name of a class")) == (1, True)


def test_a_board_warns_of_row_numbers_and_takes_names_in_either_form(tmp_path, model, caplog):
    task = replace(model, class_names=("café", "thé"))
    names = [unicodedata.normalize("NFD", "café"), "thé"] * 10
    x = np.random.default_rng(0).normal(size=(20, 6))
    x[:, 2] = np.arange(20)
    np.savez(tmp_path / "d.npz", x=x.reshape(20, 2, 3), y=names)
    rows = (f"{name},{','.join(map(str, row))}" for name, row in zip(names, x, strict=True))
    (tmp_path / "d.csv").write_text("\n".join(["label,a,b,id,d,e,f", *rows]), encoding="utf-8")
    for kind, name in (("arrays", "number 2 (from 0) of a sample's values"), ("csv", "'id'")):
        for lenient in (False, True):
            section = OwnDataSection(kind, str(tmp_path / f"d.{'csv' if kind == 'csv' else 'npz'}"))
            found = LocalData(section, task, may_be_empty=lenient).samples()
            assert found.labels.tolist() == [0, 1] * 10
            assert f"{name} has the whole numbers 0 to 19" in caplog.text
            caplog.clear()


@pytest.mark.parametrize(
    ("y", "said"),
    [([1, 1, 2, 2], "with the label 1: its label may be"), ([0, 1, 1, 0], "with the label 1: its label may be")],
)
def test_numbers_that_may_be_names_or_places_are_refused(tmp_path, model, y, said):
    """In a CSV file 1 is the class of this name, which is the first one here."""
    task = replace(model, class_names=("1", "2"))
    np.savez(tmp_path / "d.npz", x=SERIES, y=y)
    with pytest.raises(BadInput, match=said):
        samples("arrays", tmp_path / "d.npz", task)
    np.savez(tmp_path / "d.npz", x=SERIES, y=["1", "1", "2", "2"])
    assert samples("arrays", tmp_path / "d.npz", task).labels.tolist() == [0, 0, 1, 1]
    np.savez(tmp_path / "d.npz", x=SERIES, y=[0, 1, 1, 0])
    assert samples("arrays", tmp_path / "d.npz", replace(model, class_names=("0", "1"))).labels.tolist() == [0, 1, 1, 0]


EXCEL = "label;device;ax;ay\nsit;anna;0,5;1\n;;;\nwalk;bert;-1,25;2\n;;;\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("separator", [";", "\t", ","])
def test_files_of_excel_are_read(tmp_path, encoding, separator):
    text = EXCEL.replace(",", ".") if separator == "," else EXCEL
    mark = "\ufeff" if encoding.endswith("e") else ""
    text = (mark + text).replace(";", separator).replace("\n", "\r\n")
    (tmp_path / "d.csv").write_bytes(text.encode(encoding))
    found = load_csv_set(tmp_path / "d.csv")
    assert found.train_x.tolist() == [[0.5, 1], [-1.25, 2]]
    assert (found.train_y.tolist(), found.train_device.tolist()) == (["sit", "walk"], ["anna", "bert"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"label;a\nup;1,5\nup;1.234,5\n", "line 3: 'a' = '1.234,5' is not a number"),
        (b"label;a\nup;1,5\nup;1.234\n", "line 3: 'a' = '1.234' is not a number"),
        (b"label;a\nup;1.234\nup;1,5\n", "line 3: 'a' = '1,5' is not a number"),
        (b"label,a\nup,1;5\n", "line 2: 'a' = '1;5' is not a number"),
        (b'label,a\nup,"1,5"\n', "line 2: 'a' = '1,5' is not a number"),
        ("label;a\nKüche;1\n".encode("cp1252"), "is not UTF-8 (invalid start byte); save it as CSV UTF-8"),
        ("label;a\nup;1\n".encode("utf-16")[:-1], "is not UTF-16-LE (truncated data); save it as CSV UTF-8"),
        ("label;a\nup;1\n".encode("utf-16-le"), "the first line must name the columns"),
    ],
)
def test_files_of_excel_that_cannot_be_read_for_sure_are_refused(tmp_path, text, said):
    (tmp_path / "d.csv").write_bytes(text)
    with pytest.raises(BadInput, match=re.escape(said)):
        load_csv_set(tmp_path / "d.csv")


def test_data_that_have_become_unusable_are_refused_each_time(tmp_path, model):
    """And not replaced by those that were read before."""
    path = tmp_path / "d.npz"
    np.savez(path, x=SERIES, y=[0, 1, 1, 0])
    data = LocalData(OwnDataSection("arrays", str(path)), model)
    assert len(data.samples()) == 4
    path.write_bytes(b"garbage")
    for _ in range(2):
        with pytest.raises(BadInput):
            data.samples()


def test_a_line_without_a_label_is_refused_and_makes_no_class(tmp_path):
    (tmp_path / "d.csv").write_text("label,a\nup,1\n ,2\n")
    with pytest.raises(BadInput, match="line 3: 'label' is empty"):
        load_csv_set(tmp_path / "d.csv")


def test_both_files_of_a_set_have_their_columns_in_one_order(tmp_path):
    (tmp_path / "train.csv").write_text("label,ax,ay\nwalk,1,2\nrun,3,4\n")
    (tmp_path / "test.csv").write_text("ax,label,ay\n1,walk,2\n")
    assert load_csv_set(tmp_path).test_x.tolist() == [[1, 2]]
    (tmp_path / "test.csv").write_text("label,ay,ax\nwalk,2,1\n")
    with pytest.raises(BadInput, match=r"test.csv must have the columns of values of .*train.csv"):
        load_csv_set(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("first,second,load\n1,2,3\n", "must name the columns, one of them 'heat'"),
        ("first,second,load,heat\n1,2,3,\n", "line 2: 'heat' = '' is not a number"),
        ("first,second,load,heat\n1,2,inf,4\n", "line 2: 'load' = 'inf': must be finite"),
    ],
)
def test_columns_of_targets_that_do_not_fit_are_refused_in_words(tmp_path, numbers, text, said):
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(BadInput, match=said):
        samples("csv", tmp_path / "d.csv", numbers)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """One of each class, of the same size and date."""
    for name in ("sit", "walk"):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        Image.new("L", (3, 1), 9).save(folder / f"{name}.png")
        os.utime(folder / f"{name}.png", (1e9, 1e9))
    return tmp_path / "images"


def test_a_picture_in_another_class_is_another_sample(pictures: Path, model: ModelSpec) -> None:
    data = LocalData(
        OwnDataSection("folder", str(pictures)), replace(model, input_shape=(1, 1, 3), mean=(0,), std=(1,))
    )
    assert data.samples().y.tolist() == [0, 1]
    (pictures / "sit/sit.png").rename(pictures / "walk/sit.png")  # somebody has seen that the label was wrong
    assert data.samples().y.tolist() == [1, 1]


def test_a_class_may_be_a_link_to_another_disk(pictures: Path, model: ModelSpec) -> None:
    disk = pictures.with_name("disk")
    (pictures / "walk").rename(disk)
    (pictures / "walk").symlink_to(disk)
    (disk / "loop").symlink_to(pictures)
    data = LocalData(
        OwnDataSection("folder", str(pictures)), replace(model, input_shape=(1, 1, 3), mean=(0,), std=(1,))
    )
    assert data.samples().y.tolist() == [0, 1]
    Image.new("L", (3, 1), 7).save(disk / "new.png")
    assert data.samples().y.tolist() == [0, 1, 1]


@pytest.mark.parametrize("may_be_empty", [False, True])
def test_pictures_without_a_class_are_left_out_by_every_method(
    pictures: Path, model: ModelSpec, may_be_empty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("unlabelled", "wolk"):
        (pictures / name).mkdir()
    for name in ("unlabelled/1.png", "unlabelled/2.png", "wolk/3.png", "4.png"):
        Image.new("L", (3, 1), 9).save(pictures / name)
    (pictures / "walk/5.png").write_bytes(b"half a fi")
    note, _ = notes_in(pictures.parent)
    section = OwnDataSection("folder", str(pictures))
    form = replace(model, input_shape=(1, 1, 3), mean=(0,), std=(1,))
    data = LocalData(section, form, may_be_empty=may_be_empty, note=note)
    assert data.samples().y.tolist() == [0, 1]
    use = read_data_use(pictures.parent)
    assert use is not None
    assert (use.used, use.left_out) == (2, 5)
    assert use.why.startswith("2: its folder is not a class of this task, as unlabelled/1.png; 1: ")
    assert "1: not in a class folder, as 4.png" in use.why
    assert "1: its folder is not a class of this task (did you mean walk?), as wolk/3.png" in use.why
    assert f"2 samples are used; 5 are left out: {use.why}" in caplog.text
    for name in ("sit/sit.png", "walk/walk.png"):
        (pictures / name).unlink()
    if may_be_empty:
        assert len(data.samples()) == 0
    else:
        with pytest.raises(BadInput, match="no samples that fit the task; left out: 2: its folder"):
            data.samples()
    use = read_data_use(pictures.parent)
    assert use is not None
    assert (use.used, use.left_out, use.noise_alone) == (0, 5, may_be_empty)


def test_a_supervisor_hears_of_each_picture(pictures: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(progress, "listeners", [lambda: heard.append(1)])
    data = LocalData(
        OwnDataSection("folder", str(pictures)), replace(model, input_shape=(1, 1, 3), mean=(0,), std=(1,))
    )
    assert len(data.samples()) == len(heard) == 2


def test_a_pipe_among_the_pictures_is_left_out(pictures: Path, model: ModelSpec, caplog) -> None:
    os.mkfifo(pictures / "walk/camera.jpg")
    end = os.open(pictures / "walk/camera.jpg", os.O_RDWR | os.O_NONBLOCK)  # so that a reader fails, and does not wait
    os.write(end, bytes(4096))
    data = LocalData(
        OwnDataSection("folder", str(pictures)), replace(model, input_shape=(1, 1, 3), mean=(0,), std=(1,))
    )
    assert len(data.samples()) == 2
    os.close(end)
    assert "1: it is a pipe, as walk/camera.jpg" in caplog.text


def test_a_long_csv_file_takes_the_memory_of_its_numbers(tmp_path: Path) -> None:
    """As texts they took twenty times that, too much for a small board."""
    file, count = tmp_path / "d.csv", 10_000
    rows = (",".join(f"{line + place}.25" for place in range(32)) for line in range(count))
    lines = (f"{('sit', 'walk')[line % 2]},{row}" for line, row in enumerate(rows))
    file.write_text("\n".join([f"label,{','.join(f'v{place}' for place in range(32))}", *lines, ""]))
    tracemalloc.start()
    values, labels, devices, _ = read_csv(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(values, np.arange(count)[:, None] + np.arange(32) + np.float32(0.25))
    assert labels.tolist() == ["sit", "walk"] * (count // 2)
    assert devices is None
    assert peak < 4 * values.nbytes
    with file.open("a") as more:
        more.write("walk,1\n" * 3)
    skipped: list[str] = []
    assert len(read_csv(file, skipped=skipped)[0]) == count
    assert len(skipped) == 3


def test_large_photographs_are_read_once_over(tmp_path, model):
    """Their unit is judged by a few: a hundred of them as floats would take a board's memory."""
    task = replace(model, input_shape=(3, 128, 128), mean=(0.0,) * 3, std=(1.0,) * 3)
    np.savez(tmp_path / "d.npz", x=np.zeros((60, 3, 128, 128), np.uint8), y=[0] * 60)
    tracemalloc.start()
    try:
        assert len(samples("arrays", tmp_path / "d.npz", task)) == 60
        assert tracemalloc.get_traced_memory()[1] < 12 << 20  # of 3 MB of pixels; as float64 they are 24
    finally:
        tracemalloc.stop()


def test_a_pipe_in_place_of_a_csv_file_is_refused(tmp_path, model):
    """Opening it would wait for a writer, perhaps for ever."""
    os.mkfifo(tmp_path / "d.csv")
    with pytest.raises(BadInput, match="csv is a pipe, and no CSV file"):
        samples("csv", tmp_path / "d.csv", model)


def test_an_empty_line_of_a_series_is_told_and_moves_no_other(tmp_path, model):
    """Those at the end are of no window."""
    task = replace(model, class_names=("fault",), targets=Targets("reconstruction", false_alarms=0.2))
    lines = [f"{step},{step}" for step in range(9)]
    file, note = tmp_path / "d.csv", notes_in(tmp_path)[0]
    file.write_text("\n".join(["a,b", *lines, "", ",", ""]))
    assert len(load_file(file, task)) == 3
    assert load_file(file, task).take(np.array([2, 0])).x.flags.c_contiguous, "a gradient takes no other order"
    file.write_text("\n".join(["a,b", *lines[:4], "", *lines[4:], ""]))
    with pytest.raises(BadInput, match="line 7: line 6 before it is empty, and each line is one step of a series"):
        load_file(file, task)
    data = LocalData(OwnDataSection("csv", str(file)), task, may_be_empty=True, note=note)
    data.samples()
    use = read_data_use(tmp_path)
    assert use is not None
    assert use.why == "1: a step is unusable or empty, as line 5 and those after it"


def test_what_a_file_contains_is_said_by_the_task_or_the_owner(tmp_path, model):
    """And never concluded from the samples: the owner's word is the last."""
    task = replace(model, input_shape=(2, 1, 1), form=SampleForm(("ax", "ay"), decimal="."), mean=(0.0,) * 2)
    (tmp_path / "d.csv").write_text("label;y;x\nsit;1,5;2\nwalk;3,5;4\n")
    path = str(tmp_path / "d.csv")
    with pytest.raises(BadInput, match=r"lacks the column 'ax', .* are ax, ay; data.columns names them.* DEVICE"):
        LocalData(OwnDataSection("csv", path), task).samples()
    with pytest.raises(BadInput, match=r"'y' = '1,5' is not a number; the decimal mark is '.', see data.decimal"):
        LocalData(OwnDataSection("csv", path, columns=("x", "y")), task).samples()
    found = LocalData(OwnDataSection("csv", path, columns=("x", "y"), decimal=","), task).samples()
    assert found.kept.reshape(2, 2).tolist() == [[2, 1.5], [4, 3.5]]


def test_labels_of_an_array_are_names_or_places(tmp_path, model):
    x = SERIES[:, :, 0]
    task = replace(model, input_shape=(2, 1, 1), class_names=("1", "2"))
    np.savez(tmp_path / "d.npz", x=x, y=[1, 0, 1, 0])
    section = OwnDataSection("arrays", str(tmp_path / "d.npz"))
    assert LocalData(replace(section, labels="numbers"), task).samples().labels.tolist() == [1, 0, 1, 0]
    with pytest.raises(BadInput, match="with the label 0: its label is none of 1, 2"):
        LocalData(replace(section, labels="names"), task).samples()
    np.savez(tmp_path / "d.npz", images=x, labels=["2", "1", "1", "2"])
    assert samples("arrays", section.path, task).labels.tolist() == [1, 0, 0, 1]
    np.savez(tmp_path / "d.npz", x=x, y=[2023, 2024, 2024, 2023])
    assert samples("arrays", section.path, replace(task, class_names=("2023", "2024"))).labels.tolist() == [0, 1, 1, 0]
