"""One record decides which other records train, or what they mean.

With the unit `record`, and with windows of data, the ledger counts what one record changes by its own gradient. In
0.3.0 the decimal mark of one line was that of all lines, one `nan` shifted all later windows of a series, the first
file of a folder named the columns for all, one text among the labels made names of all numbers, and one large image was
the end of others: the update moved by 13 deviations of its noise where the ledger charged 0.033.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from hushfleet.data import csv_file
from hushfleet.data.form import SampleForm
from hushfleet.data.samples import LabelledSamples
from hushfleet.data.targets import Targets
from hushfleet.durations import Period
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, WireSpec
from hushfleet.wire.format.update_values import decode_update
from support.edge import CHUNK_BYTES, Bench, Package

GRAPH, LAYOUT = BlobRef(bytes(32), 1), ParamLayout(("w",), ((2,),))
NAMES = ("sit", "walk", "1")  # a number is a place, and also a name
MODEL = ModelSpec("own", LAYOUT, (2, 1, 1), NAMES, (0.0,) * 2, (1.0,) * 2, (), GRAPH, GRAPH)
STEPS = 3
SERIES = replace(
    MODEL, input_shape=(2, 1, STEPS), class_names=("fault",), targets=Targets("reconstruction", false_alarms=0.2)
)
RATE = 0.1
IMAGES = replace(MODEL, input_shape=(1, 4, 4), mean=(0.0,), std=(1.0,))

Found = Counter[tuple[bytes, bytes]]
MANY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def counted(*parts: LabelledSamples) -> Found:
    return Counter(
        (bytes([number]) + value.tobytes(), label.tobytes())
        for number, part in enumerate(parts)
        for value, label in zip(part.kept, part.labels, strict=True)
    )


def trained(section: OwnDataSection, model: ModelSpec) -> Found:
    """The samples that train, and those that are held out."""
    data = LocalData(section, model, may_be_empty=True, by_content=True, held_out=0.3)
    return counted(data.samples(), data.held_out())


def trained_later(section: OwnDataSection, model: ModelSpec, change: Callable[[], None]) -> Found:
    """The samples that train in the second of two windows, which come by this change."""
    clock, seen = [0], dict[bytes, int]()
    data = LocalData(
        section, model, may_be_empty=True, by_content=True,
        arrivals=lambda keys: [seen.setdefault(key, clock[0]) for key in keys],
    )  # fmt: skip
    data.samples(Period(0, 10))
    clock[0] = 10
    change()
    return counted(data.samples(Period(10, 20)))


def check(without: Found, with_one: Found) -> None:
    assert not without - with_one, "others went or changed"
    assert (with_one - without).total() <= 1, "others came"


# lines

CELLS = st.sampled_from(["0", "1.5", "-2,5", "1.234", "1e3", " 7 ", "nan", "inf", "", "x", "1_0", '"3"', "٣", "1e400"])
CLASSES = st.sampled_from([*NAMES, "0", "2", "1.0", "run", "", " sit "])
GOOD = st.tuples(CLASSES, CELLS, CELLS).map(";".join)
NO_BREAK = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=30)
LINES = st.lists(st.one_of(GOOD, NO_BREAK), min_size=2, max_size=12)
ANY_LINE = st.one_of(
    GOOD.map(str.encode),
    NO_BREAK.map(str.encode),
    st.binary(max_size=30).map(lambda raw: raw.translate(None, b"\n\r")),
    st.sampled_from(
        [b'sit;"1;2', b";;", b"sit;" + b"1" * 200_000 + b";2", b"sit;1;2;3", b"\xef\xbb\xbfsit;1;2", b"\x00"]
    ),
)
FORMS = st.builds(SampleForm, st.sampled_from([(), ("b", "a")]), st.sampled_from(["", ".", ","]))


def at(lines: Sequence[bytes], place: int, more: Sequence[bytes]) -> list[bytes]:
    place %= len(lines) + 1
    return [*lines[:place], *more, *lines[place:]]


@MANY
@given(lines=LINES, one=ANY_LINE, place=st.integers(0, 12), form=FORMS, separator=st.sampled_from(";\t,"))
def test_a_line(tmp_path_factory, lines, one, place, form, separator) -> None:
    file = tmp_path_factory.mktemp("lines") / "d.csv"

    def found(rows: Sequence[bytes]) -> Found:
        file.write_bytes(b"\n".join([b"label;a;b", *rows, b""]).replace(b";", separator.encode()))
        return trained(OwnDataSection("csv", str(file)), replace(MODEL, form=form))

    whole = [line.encode() for line in lines]
    check(found(whole), found(at(whole, place, [one])))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_that_is_as_long_as_what_is_read_at_once(tmp_path: Path, end: str, monkeypatch) -> None:
    monkeypatch.setattr(csv_file, "MOST_CHARACTERS", 64)
    file = tmp_path / "d.csv"

    def found(*rows: str) -> Found:
        file.write_bytes(end.join(["label;a;b", *rows, ""]).encode())
        return trained(OwnDataSection("csv", str(file)), MODEL)

    without = found("sit;1;2", "walk;3;4", "sit;5;6")
    for length in range(60, 68):
        check(without, found("sit;1;2", f"{'sit;1;':0<{length}}", "walk;3;4", "sit;5;6"))


def test_a_very_long_label_takes_its_own_memory_alone(tmp_path: Path) -> None:
    """In an array of texts each label took as much, and all were lost for lack of memory."""
    file = tmp_path / "d.csv"
    lines = [f"walk;{number};{number}" for number in range(500)]
    file.write_text("\n".join(["label;a;b", "x" * 100_000 + ";1;2", *lines, ""]))
    tracemalloc.start()
    try:
        assert trained(OwnDataSection("csv", str(file)), MODEL).total() == 500
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # the array had 200 MB
    finally:
        tracemalloc.stop()


def test_a_line_that_has_just_come(tmp_path: Path) -> None:
    """A last line without an end may be half written if its file has just changed, for whatever reason."""
    file = tmp_path / "d.csv"
    data = LocalData(OwnDataSection("csv", str(file)), MODEL, may_be_empty=True, by_content=True, settled_s=60.0)
    file.write_text("label;a;b\nsit;1;2\nwalk;3;4")
    os.utime(file, (0, 0))
    without = counted(data.samples())
    assert without.total() == 2
    file.write_text("label;a;b\nsit;5;6\nsit;1;2\nwalk;3;4")
    check(without, counted(data.samples()))


@MANY
@given(lines=LINES, one=ANY_LINE, header=st.sampled_from(["label;a;b", "label;b;a", "b;a;label", "label;a", "x"]))
def test_a_file_of_a_folder(tmp_path_factory, lines, one, header) -> None:
    folder = tmp_path_factory.mktemp("files")
    model = replace(MODEL, form=SampleForm(("a", "b")))
    (folder / "m.csv").write_bytes(b"\n".join([b"label;a;b", *(line.encode() for line in lines), b""]))
    without = trained(OwnDataSection("csv", str(folder)), model)
    for name in ("a.csv", "z.csv"):  # before the others, and behind them
        (folder / name).write_bytes(b"\n".join([header.encode(), one, b""]))
        check(without, trained(OwnDataSection("csv", str(folder)), model))
        (folder / name).unlink()


STEP = st.tuples(CELLS, CELLS).map(";".join)
WHOLE = st.lists(STEP.map(str.encode), min_size=STEPS, max_size=STEPS)
BROKEN = st.lists(st.one_of(STEP.map(str.encode), ANY_LINE), min_size=STEPS, max_size=STEPS)


@MANY
@given(
    windows=st.lists(st.one_of(WHOLE, BROKEN), max_size=8), one=st.one_of(WHOLE, BROKEN), place=st.integers(0, 8),
    header=st.sampled_from([b"a;b", b"a;device;b"]),
)  # fmt: skip
def test_a_window_of_a_series(tmp_path_factory, windows, one, place, header) -> None:
    """A column `device` has a meaning in a simulation alone: another name in one line must begin no window."""
    file = tmp_path_factory.mktemp("series") / "d.csv"

    def found(parts: Sequence[Sequence[bytes]]) -> Found:
        lines = [line for part in parts for line in part]
        if b"device" in header:
            lines = [line.replace(b";", b";" + line[:1] + b";", 1) for line in lines]
        file.write_bytes(b"\n".join([header, *lines, b""]))
        return trained(OwnDataSection("csv", str(file)), SERIES)

    check(found(windows), found([*windows[: place % 9], one, *windows[place % 9 :]]))


@MANY
@given(lines=LINES, one=st.one_of(st.sampled_from([b"sit;777;1", b"walk;777,5;1", b"run;777.5;1"]), ANY_LINE))
def test_a_line_of_an_earlier_window(tmp_path_factory, lines, one) -> None:
    """Equal rows are one sample (docs/privacy.md), so it equals none of the others here."""
    file, body = tmp_path_factory.mktemp("rows") / "d.csv", [line.encode() for line in lines]

    def write(*rows: bytes) -> None:
        file.write_bytes(b"\n".join([b"label;a;b", *rows, b""]))

    section = OwnDataSection("csv", str(file))
    write()
    alone = trained_later(section, MODEL, lambda: write(one))
    write()
    without = trained_later(section, MODEL, lambda: write(*body))
    assume(not {value for value, _ in alone} & {value for value, _ in without})
    write(one)
    assert trained_later(section, MODEL, lambda: write(one, *body)) == without
    write(one)
    assert trained_later(section, MODEL, lambda: write(*body, one)) == without


# arrays

NUMBERS = st.one_of(st.integers(-3, 260), st.floats(-1e3, 1e3, width=32), st.sampled_from([0.5, 7.0, -0.0, 255]))
TEXTS = st.one_of(st.sampled_from([*NAMES, "0", "2", "1.0", "nan", "run", "True"]), st.text(max_size=8))
ANY_NUMBER = st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf, 1e39, 1 + 2j, True, b"7"]), TEXTS)
ROW = st.tuples(NUMBERS, NUMBERS)
BASE = st.lists(st.tuples(ROW, st.one_of(st.integers(0, 3), st.sampled_from([*NAMES, "0"]))), min_size=1, max_size=10)
ONE = st.tuples(st.tuples(ANY_NUMBER, ANY_NUMBER), st.one_of(st.integers(-2, 5), st.floats(), TEXTS, st.booleans()))


@MANY
@given(
    rows=BASE, one=ONE, place=st.integers(0, 10), values=st.sampled_from(["pixels", "numbers"]),
    labels=st.sampled_from(["", "names", "numbers"]), of_numbers=st.booleans(),
)  # fmt: skip
def test_a_sample_of_an_array(tmp_path_factory, rows, one, place, values, labels, of_numbers) -> None:
    """An array has one type: one text makes texts of all numbers, one fraction makes floats of all bytes."""
    file = tmp_path_factory.mktemp("arrays") / "d.npz"
    if of_numbers:  # the commonest case: nothing but numbers until one text comes
        rows = [(x, y if isinstance(y, int) else 1) for x, y in rows]

    def found(samples: Sequence[tuple[Any, Any]]) -> Found:
        x, y = (np.array([sample[part] for sample in samples]) for part in (0, 1))
        np.savez(file, x=x, y=y)
        return trained(OwnDataSection("arrays", str(file)), replace(MODEL, form=SampleForm((), "", labels, values)))

    check(found(rows), found([*rows[: place % 11], one, *rows[place % 11 :]]))


LABELS = st.one_of(
    st.sampled_from([True, False, -1, 0, 1, 2, 1.0, 2.5, np.float32(0.1), 4006381333931, 9007199254740993, 1e16, -0.0]),
    st.sampled_from(["1", "-1", "0.1", "True", "sit", "007", "4006381333931", b"1", b"sit", 1 + 0j, 1 + 2j]),
)
NAMED = st.sampled_from([
    NAMES, ("-1", "1"), ("4006381333931", "4006381333948"), ("False", "True"), ("True", "False"), ("0.1", "2.5"),
    ("007", "7"), ("9007199254740993", "10000000000000000"),
])  # fmt: skip


@settings(MANY, max_examples=400)
@given(
    labels=st.lists(LABELS, min_size=1, max_size=6), one=LABELS, names=NAMED,
    kind=st.sampled_from(["", "names", "numbers"]), place=st.integers(0, 6),
)  # fmt: skip
def test_a_label_of_another_type(tmp_path_factory, labels, one, names, kind, place) -> None:
    """The type of an array of labels decides how a number is written: 1, 1.0, (1+0j), True or b'1'."""
    file = tmp_path_factory.mktemp("labels") / "d.npz"
    model = replace(MODEL, class_names=names, form=SampleForm((), "", kind, "numbers"))

    def found(samples: Sequence[tuple[int, Any]]) -> Found:
        np.savez(file, x=[[number, 0] for number, _ in samples], y=np.array([label for _, label in samples]))
        return trained(OwnDataSection("arrays", str(file)), model)

    rows = list(enumerate(labels))
    check(found(rows), found([*rows[:place], (99, one), *rows[place:]]))


@MANY
@given(
    rows=st.lists(st.tuples(ROW, NUMBERS), min_size=1, max_size=10),
    one=st.tuples(st.tuples(ANY_NUMBER, NUMBERS), ANY_NUMBER),
)
def test_a_target_that_is_no_number(tmp_path_factory, rows, one) -> None:
    file = tmp_path_factory.mktemp("targets") / "d.npz"
    targets = Targets("squared", tolerance=1.0)
    model = replace(MODEL, class_names=("load",), targets=targets, form=SampleForm(values="numbers"))

    def found(samples: Sequence[tuple[Any, Any]]) -> Found:
        np.savez(file, x=np.array([x for x, _ in samples]), y=np.array([y for _, y in samples]))
        return trained(OwnDataSection("arrays", str(file)), model)

    check(found(rows), found([*rows, one]))


# images


def png(size: tuple[int, int], grey: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", size, grey).save(out, "PNG")
    return out.getvalue()


@MANY
@given(
    greys=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 255)), min_size=1, max_size=6),
    one=st.one_of(st.binary(max_size=40), st.builds(png, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.just(3))),
    name=st.sampled_from(["sit/0.png", "walk/z.png", "run/a.png", "a.png", "sit/.a.png", "sit/a.txt", "sit/in/a.png"]),
)
def test_a_file_of_a_folder_of_images(tmp_path_factory, greys, one, name) -> None:
    folder = tmp_path_factory.mktemp("images")
    for number, (kind, grey) in enumerate(greys):
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / f"m{number}.png").write_bytes(png((5, 5), grey))
    section = OwnDataSection("folder", str(folder))
    without = trained(section, IMAGES)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(one)
    check(without, trained(section, IMAGES))


def deep(place: Path) -> None:
    """Makes an image in more folders than Python calls functions in each other."""
    folder = os.open(place.parent, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a", dir_fd=folder)
        inside = os.open("a", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inside
    with open(os.open("x.png", os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
        file.write(png((5, 5), 9))
    os.close(folder)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "link with a name that no file can have": lambda place: os.symlink("x" * 300, place),
    "link to itself": lambda place: os.symlink(place.name, place),
    "link to nothing": lambda place: os.symlink("nothing", place),
    "link to the whole": lambda place: os.symlink("..", place),
    "device": lambda place: os.symlink("/dev/zero", place),
    "pipe": os.mkfifo,
    "bytes that are no UTF-8": lambda place: Path(os.fsdecode(os.fsencode(place) + b"\xff")).write_bytes(b"x"),
    "deep": deep,
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("where", ["sit", "run", "."])
@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_a_file_that_is_none(tmp_path: Path, special: str, where: str, kind: Any) -> None:
    folder = tmp_path / "d"
    for number, name in enumerate(("sit", "walk", "run")):
        (folder / name).mkdir(parents=True)
        (folder / name / "m.png").write_bytes(png((5, 5), number))
        (folder / name / "m.csv").write_text(f"label;a;b\nsit;{number};1\n")
    model = IMAGES if kind == "folder" else replace(MODEL, form=SampleForm(("a", "b")))
    section = OwnDataSection(kind, str(folder))
    without = trained(section, model)
    SPECIAL[special](folder / where / f"a.{'png' if kind == 'folder' else kind}")
    with_one = trained(section, model)
    subprocess.run(["rm", "-r", str(folder)], check=True)  # `shutil.rmtree`, by pytest, calls itself for each level
    check(without, with_one)


# what the aggregator sees


def update_of(
    make: Callable[..., Bench], task: Package, board: DeviceConfig, file: Path, lines: Sequence[str]
) -> np.ndarray:
    """A board's update with these lines, `[d]`."""
    pixels = math.prod(task.spec.model.input_shape)
    file.write_text("\n".join(["label;" + ";".join(f"p{place}" for place in range(pixels)), *lines, ""]))
    privacy = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=1.0, batches=1)
    method = {**task.spec.method_config, "batch_size": 300, "optimizer": "sgd", "learning_rate": RATE}
    wire = WireSpec(codec="float32", chunk_bytes=CHUNK_BYTES)
    asked = task.with_spec(task="asked", wire=wire, privacy=privacy, method_config=method)
    changed = replace(
        board,
        data=OwnDataSection("csv", str(file)),
        device=replace(board.device, state_dir=str(file.with_suffix(""))),
        limits=replace(board.limits, epsilon_server=1e6, constant_time=False),
    )
    bench = make(package=asked, config=changed)
    bench.server.open_round(1)
    bench.until(lambda: bench.entry_status(1) == "acked", most=4000)
    key, counts = bench.store.identity.public_key, [layer.size for layer in asked.spec.model.layout.layers]
    [update] = bench.server.updates
    return np.asarray(decode_update(update, public_key=key, counts=counts).values, np.float64).ravel()


def test_the_update_moves_by_one_gradient(make_bench, linear, config, tmp_path) -> None:
    """The seed is the same, so the noise is: what is left is what the record has changed."""
    rng, names = np.random.default_rng(5), linear.spec.model.class_names
    pixels = math.prod(linear.spec.model.input_shape)
    lines = [f"{names[3]};" + ";".join(f"{value:.2f}" for value in rng.normal(0.5, 0.3, pixels)) for _ in range(300)]
    one = f"{names[3]};" + ";".join(["0,50"] * pixels)
    without = update_of(make_bench, linear, config, tmp_path / "without.csv", lines)
    with_one = update_of(make_bench, linear, config, tmp_path / "with.csv", [one, *lines])
    moved = np.linalg.norm(with_one - without) * 300 / RATE  # in gradients: the divisor of the sum, and the rate
    assert 0.1 < moved < 1.02, "one record has a gradient of at most the clip norm, 1; noised values are rounded"
