"""A network is given the same numbers, whichever file holds the samples, in a simulation and on a board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hushfleet as hf
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.data.conversion import as_data
from hushfleet.data.folder import scan_folder
from hushfleet.data.samples import LabelledSamples, Samples, inputs_of
from hushfleet.data.sets import load
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.worker.predict import read_sample
from hushfleet.errors import BadInput

COUNT, NAMES = 40, tuple(str(digit) for digit in range(10))
DIGITS = load("digits").test.take(slice(COUNT))
PIXELS, LABELS = DIGITS.images, DIGITS.labels
SENSORS = np.random.default_rng(0).normal(500, 90, (COUNT, 6)).astype(np.float32)


def task(name: str, path: Path, **data: Any) -> PreparedTask:
    plain: dict[str, Any] = {
        "name": "one", "model": {"name": "linear"}, "method": {"name": "hush"}, "round": {"rounds": 1},
        "data": {"name": name, "path": str(path), "class_names": list(NAMES), "devices": 2, **data},
    }  # fmt: skip
    if name == "folder" or len(data.get("input_shape", ())) == 3:
        plain["model"]["features"] = "filters"
        plain["data"]["input_shape"] = [1, 8, 8]
    return prepare(parse_task(plain), run_id="1")


def folder(path: Path) -> Path:
    for part in ("train", "test"):
        for place, (image, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
            (path / part / NAMES[label]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(path / part / NAMES[label] / f"{place:03}.png")
    return path


def csv(path: Path, x: np.ndarray) -> Path:
    rows = x.reshape(len(x), -1).tolist()
    lines = [",".join([NAMES[label], *map(repr, row)]) for label, row in zip(LABELS, rows, strict=True)]
    path.write_text("\n".join([",".join(["label", *(f"v{place}" for place in range(len(rows[0])))]), *lines, ""]))
    return path


def rows_of(samples: LabelledSamples) -> list[bytes]:
    """The network's inputs with their labels, in an order of their own: folders are sorted by class."""
    return sorted(x.tobytes() + y.tobytes() for x, y in zip(samples.x, samples.labels, strict=True))


def on_a_board(kind: Any, path: Path, prepared: PreparedTask, **form: Any) -> list[bytes]:
    section = OwnDataSection(kind, str(path), **form)
    return rows_of(LocalData(section, prepared.spec.model, features=prepared.features).samples())


def test_features_of_images_are_equal_to_the_bit(tmp_path: Path) -> None:
    images = folder(tmp_path / "images")
    hf.Data(PIXELS, LABELS, PIXELS, LABELS).save(tmp_path / "all.npz")
    (tmp_path / "tables").mkdir()
    for part in ("train", "test"):
        csv(tmp_path / "tables" / f"{part}.csv", PIXELS)
    shape = {"input_shape": [1, 8, 8]}
    prepared = {
        "folder": task("folder", images),
        "arrays": task("arrays", tmp_path / "all.npz", **shape),
        "csv": task("csv", tmp_path / "tables", **shape, values="pixels"),
    }
    np.savez(tmp_path / "mine.npz", x=PIXELS, y=[NAMES[label] for label in LABELS])
    found = {}
    for name, each in prepared.items():
        assert each.dataset is not None
        assert each.features is not None
        assert (each.spec.model.mean, each.spec.model.std) == ((0.0,), (1.0,))
        for part in (each.dataset.train, each.dataset.test):
            found[f"{name} {len(found)}"] = rows_of(each.features.of(part))
        found[f"{name} on a board: folder"] = on_a_board("folder", images / "train", each)
        found[f"{name} on a board: arrays"] = on_a_board("arrays", tmp_path / "mine.npz", each)
        found[f"{name} on a board: csv"] = on_a_board("csv", tmp_path / "tables" / "train.csv", each, values="pixels")
    expected = next(iter(found.values()))
    assert len(set(expected)) == COUNT
    assert all(rows == expected for rows in found.values()), [name for name in found if found[name] != expected]


def test_images_to_predict_without_labels_and_to_test_with_are_given_as_images_to_train_with(tmp_path: Path) -> None:
    images = folder(tmp_path / "images")
    prepared = task("folder", images, input_shape=[1, 8, 8])
    assert prepared.dataset is not None
    model, features = prepared.spec.model, prepared.features
    section = OwnDataSection("folder", str(images / "train"), unlabelled=str(images / "train"))
    data = LocalData(section, model, features=features, held_out=0.5, by_content=True)
    expected = {x.tobytes() for x in inputs_of(prepared.dataset.train, features).x}
    files = sorted((images / "train").rglob("*.png"))
    predicted = {inputs_of(read_sample(file, model), features).x.tobytes() for file in files}
    unlabelled = data.unlabelled()
    assert unlabelled is not None
    trained, held_out = ({x.tobytes() for x in part.x} for part in (data.samples(), data.held_out()))
    assert predicted == {x.tobytes() for x in unlabelled.x} == trained | held_out == expected
    assert trained
    assert held_out


@pytest.mark.parametrize("normal", [{}, {"mean": [500.0] * 6, "std": [90.0] * 6}])
def test_numbers_go_to_a_network_as_they_are_or_as_the_task_says(
    tmp_path: Path, normal: dict[str, Any], caplog
) -> None:
    hf.Data(SENSORS, LABELS, SENSORS, LABELS).save(tmp_path / "all.npz")
    np.savez(tmp_path / "mine.npz", x=SENSORS, y=LABELS)
    plain: dict[str, Any] = {
        "name": "one", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "round": {"rounds": 1},
        "data": {"name": "arrays", "path": str(tmp_path / "all.npz"), "class_names": list(NAMES), **normal},
    }  # fmt: skip
    prepared = prepare(parse_task(plain), run_id="1")
    assert prepared.dataset is not None
    expected = (SENSORS - np.float32(500)) / np.float32(90) if normal else SENSORS
    np.testing.assert_allclose(prepared.dataset.train.x[..., 0, 0], expected, rtol=1e-5, atol=1e-5)
    mean = prepared.spec.model.mean
    assert mean == tuple(normal.get("mean", [0.0] * 6))
    for kind, path in (("arrays", tmp_path / "mine.npz"), ("csv", csv(tmp_path / "mine.csv", SENSORS))):
        assert on_a_board(kind, path, prepared) == rows_of(prepared.dataset.train), kind
    said = "data.mean and data.std, public numbers for each of the 6 channels. Those of the samples at hand are ["
    assert (said in caplog.text) == (not normal)


@pytest.mark.parametrize(("method", "warned"), [("hush", False), ("fedavg", True)])
def test_no_numbers_of_the_data_are_named_that_nobody_can_paste_or_use(
    tmp_path: Path, method: str, warned: bool, caplog
) -> None:
    """Vectors of `hush` are scaled to norm 1, and a task with many channels needs more numbers than a line shows."""
    wide = np.repeat(SENSORS, 3, 1)
    hf.Data(wide, LABELS, wide, LABELS).save(tmp_path / "all.npz")
    data = {"name": "arrays", "path": str(tmp_path / "all.npz"), "class_names": list(NAMES), "devices": 2}
    prepare(parse_task({"name": "one", "model": {"name": "linear"}, "method": {"name": method}, "data": data}))
    assert ("public numbers for each of the 18 channels." in caplog.text) == warned
    assert "samples at hand" not in caplog.text


def test_one_part_in_bytes_and_one_in_numbers_say_what_they_are(tmp_path: Path) -> None:
    mixed = hf.Data(PIXELS, LABELS, PIXELS.astype(np.float64), LABELS)
    mixed.save(tmp_path / "all.npz")
    with pytest.raises(BadInput, match="or say what they are: data"):
        task("arrays", tmp_path / "all.npz", input_shape=[1, 8, 8])
    prepared = task("arrays", tmp_path / "all.npz", input_shape=[1, 8, 8], values="pixels")
    assert prepared.dataset is not None
    assert rows_of(prepared.dataset.train) == rows_of(prepared.dataset.test)
    hf.Data(PIXELS / 255, LABELS).save(tmp_path / "scaled.npz")
    with pytest.raises(BadInput, match=r"values are no pixels, whole numbers from 0 to 255 \(data.values\)"):
        task("arrays", tmp_path / "scaled.npz", input_shape=[1, 8, 8], values="pixels")


DEEP = np.random.default_rng(0).integers(0, 4096, (COUNT, 1, 8, 8)).astype(np.uint16)


@pytest.mark.parametrize("bit_depth", [12, 0])
def test_images_with_16_bits_keep_their_values(bit_depth: int, tmp_path: Path) -> None:
    for part in ("train", "test"):
        for place, (image, label) in enumerate(zip(DEEP, LABELS, strict=True)):
            (tmp_path / part / NAMES[label]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(
                tmp_path / part / NAMES[label] / f"{place:03}.{'png' if place % 2 else 'tiff'}"
            )
    most = {12: 4095, 0: 65535}[bit_depth]
    prepared = task("folder", tmp_path, bit_depth=bit_depth)
    assert prepared.dataset is not None
    assert prepared.spec.model.form.bit_depth == (bit_depth or 16)
    expected = rows_of(Samples((DEEP / np.float32(most)).astype(np.float32), LABELS, (0.0,), (1.0,)))
    assert rows_of(prepared.dataset.test) == expected
    assert on_a_board("folder", tmp_path / "train", prepared) == rows_of(
        inputs_of(prepared.dataset.train, prepared.features)
    )
    pictures = as_data(
        [(Image.fromarray(each[0]), label) for each, label in zip(DEEP, LABELS, strict=True)], bit_depth=bit_depth
    )
    assert pictures.train_x.tobytes() == (DEEP / np.float32(most)).astype(np.float32).tobytes()


def test_whole_numbers_of_a_bit_depth_are_the_same_from_every_source(tmp_path: Path) -> None:
    hf.Data(DEEP, LABELS, DEEP, LABELS).save(tmp_path / "all.npz")
    np.savez(tmp_path / "mine.npz", x=DEEP.astype(np.int64), y=LABELS)
    shape = {"input_shape": [1, 8, 8], "bit_depth": 12}
    prepared = task("arrays", tmp_path / "all.npz", **shape)
    assert prepared.dataset is not None
    expected = rows_of(Samples((DEEP / np.float32(4095)).astype(np.float32), LABELS, (0.0,), (1.0,)))
    assert rows_of(prepared.dataset.test) == expected
    trained = rows_of(inputs_of(prepared.dataset.train, prepared.features))
    for kind, path in (("arrays", tmp_path / "mine.npz"), ("csv", csv(tmp_path / "mine.csv", DEEP))):
        assert on_a_board(kind, path, prepared) == trained, kind
    (tmp_path / "tables").mkdir()
    for part in ("train", "test"):
        csv(tmp_path / "tables" / f"{part}.csv", DEEP)
    of_table = task("table", tmp_path / "tables", **shape).dataset
    assert of_table is not None
    assert rows_of(of_table.test) == expected
    given = as_data({"train": (DEEP, LABELS), "test": (DEEP, LABELS)}, bit_depth=12).dataset("d")
    assert rows_of(given.test) == expected
    with pytest.raises(BadInput, match=r"whole numbers from 0 to 511 \(data.bit_depth\)"):
        task("arrays", tmp_path / "all.npz", input_shape=[1, 8, 8], bit_depth=9)
    with pytest.raises(BadInput, match=r"is uint8, and data\.bit_depth = 12 is for larger pixels"):
        hf.as_data((PIXELS, LABELS), bit_depth=12).dataset("d")


def test_an_image_with_more_bits_than_the_task_says_is_named(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    Image.fromarray(np.full((8, 8), 5000, np.uint16)).save(tmp_path / "1" / "a.png")
    form: Any = {"input_shape": (1, 8, 8), "class_names": ["1"], "mean": [0.0], "std": [1.0], "bit_depth": 12}
    with pytest.raises(BadInput, match=r"it has the pixel 5000, and data\.bit_depth = 12 ends at 4095"):
        scan_folder(tmp_path, **form)


def test_channels_last_are_read_alike_in_a_simulation_and_on_a_board(tmp_path: Path) -> None:
    colours = np.random.default_rng(1).integers(0, 256, (COUNT, 3, 6, 5)).astype(np.uint8)
    last = np.moveaxis(colours, 1, -1)
    hf.Data(last, LABELS, last, LABELS).save(tmp_path / "all.npz")
    np.savez(tmp_path / "mine.npz", x=last, y=LABELS)
    plain = {
        "name": "one", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "round": {"rounds": 1},
        "data": {"name": "arrays", "path": str(tmp_path / "all.npz"), "class_names": list(NAMES), "devices": 2},
    }  # fmt: skip
    prepared = prepare(parse_task(plain), run_id="1")
    assert prepared.dataset is not None
    assert prepared.spec.model.input_shape == (3, 6, 5)
    expected = rows_of(Samples(colours, LABELS, (0.0,) * 3, (1.0,) * 3))
    assert rows_of(prepared.dataset.train) == expected
    assert on_a_board("arrays", tmp_path / "mine.npz", prepared) == expected
    assert on_a_board("arrays", tmp_path / "mine.npz", prepared, layout="channels-last") == expected
    by_line = csv(tmp_path / "mine.csv", last)
    assert on_a_board("csv", by_line, prepared, values="pixels", layout="channels-last") == expected


def test_the_columns_of_a_task_are_those_of_its_boards(tmp_path: Path) -> None:
    rows = [
        {"trip": trip, "at": step, "class": NAMES[trip % 2], "who": "me", "ax": trip + step / 7, "ay": -step, "note": 1}
        for trip in range(12)
        for step in reversed(range(4))
    ]
    lines = "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows), ""])
    for name in ("train", "test", "mine"):
        (tmp_path / f"{name}.csv").write_text(lines)
    named = {"label_column": "class", "device_column": "who", "time_column": "at", "record_column": "trip"}
    plain = {
        "name": "one", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "round": {"rounds": 1},
        "data": {"name": "table", "path": str(tmp_path), "devices": 1, "columns": ["ay", "ax"], **named},
    }  # fmt: skip
    prepared = prepare(parse_task(plain), run_id="1")
    assert prepared.dataset is not None
    assert prepared.spec.model.input_shape == (2, 1, 4)
    x = np.array([[[-step for step in range(4)], [trip + step / 7 for step in range(4)]] for trip in range(12)])
    expected = rows_of(Samples(x[:, :, None].astype(np.float32), np.arange(12) % 2, (0.0,) * 2, (1.0,) * 2))
    assert rows_of(prepared.dataset.train) == expected
    assert on_a_board("csv", tmp_path / "mine.csv", prepared) == expected
    (tmp_path / "mine.csv").write_text(lines.rsplit("\n", 2)[0] + "\n")  # the last trip lacks a step
    data = LocalData(OwnDataSection("csv", str(tmp_path / "mine.csv")), prepared.spec.model, may_be_empty=True)
    assert rows_of(data.samples()) == sorted(set(expected) & set(rows_of(data.samples())))
    assert len(data.samples()) == 11
