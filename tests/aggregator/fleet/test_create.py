"""A fleet's folder and its boards: everything is checked before anything is written."""

from __future__ import annotations

import stat
import tomllib
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.device_file import device_toml
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetConfig, FleetFolder
from hushfleet.aggregator.fleet.trust.members import counted, from_csv
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.edge_client.board.config import load_config
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.toml_text import to_toml
from support.command import hushfleet
from support.desk import TASK, make_folder
from support.written_keys import Key, changed, changes, check_text, keys_of

KEYS = st.text("abcdefgh_", min_size=1, max_size=8)
PLAIN = st.one_of(
    st.booleans(),
    st.integers(-(1 << 62), 1 << 62),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.text("ab\"'\\\n"), max_size=3),
)


@given(st.recursive(st.dictionaries(KEYS, PLAIN, max_size=4), lambda inner: st.dictionaries(KEYS, inner | PLAIN)))
def test_toml_that_is_written_is_read_as_it_was(values: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(values)) == values


run = partial(hushfleet, "fleet")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / "task.toml"
    file.write_text(TASK)
    return file


FLEET_KEYS = list(keys_of(FleetConfig))


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_any_value_of_any_key_of_fleet_toml_is_read_or_the_key_is_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    drawn: list[tuple[Key, Any]] = data.draw(changes(FLEET_KEYS))
    folder = tmp_path_factory.getbasetemp()
    try:
        text = to_toml(changed({"federation": "plant", "broker": {"names": ["localhost"]}}, drawn))
    except (BadInput, TypeError, ValueError):
        assume(False)  # TOML has no such value
    (folder / FILE_NAME).write_text(text, "utf-8")
    try:
        FleetFolder(folder)
    except HushfleetError as error:
        check_text(str(error), drawn, FLEET_KEYS)


def test_init_makes_all_or_nothing(tmp_path: Path, task: Path) -> None:
    words = ("--broker-name", "broker.example", "--broker-name", "10.0.0.1", "--task", task)
    assert "mqtts://broker.example:8883" in run("init", tmp_path / "plant", *words)
    folder = FleetFolder(tmp_path / "plant")
    assert folder.config.broker.names == ("broker.example", "10.0.0.1")
    for file in folder.path.rglob("*"):
        if file.suffix == ".key" or "password" in file.name:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    with pytest.raises(BadInput, match="not empty"):
        run("init", tmp_path / "plant", *words)
    before = set(tmp_path.iterdir())
    for wrong in (
        ("init", tmp_path / "Not A Name", *words),
        ("init", tmp_path / "b", "--broker-name", "bro\nker", "--task", task),
        ("init", tmp_path / "c", "--broker-name", "x", "--task", task, "--classes", "a,b"),
    ):
        with pytest.raises(BadInput):
            run(*wrong)
    assert set(tmp_path.iterdir()) == before, "nothing is left of what failed"


def test_init_says_which_folders_boards_need(tmp_path: Path, task: Path) -> None:
    task.write_text(TASK.replace('"digits"', '"folder"\nclass_names = ["a", "b"]\ninput_shape = [1, 8, 8]'))
    words = ("--broker-name", "broker.example", "--task", task, "--classes", "cat,dog")
    assert "one for each class: cat, dog\n" in run("init", tmp_path / "plant", *words)


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        ("folder", "folder", "folders of images, one for each class: a, b\n"),
        ("sound", "sound", "folders of sound, one for each class: a, b\n"),
        ("table", "csv", "data, of kind 'csv', with the labels: a, b\n"),
        ("arrays", "arrays", "data, of kind 'arrays', with the labels: a, b\n"),
    ],
)
def test_boards_get_the_kind_of_data_of_the_task(tmp_path: Path, task: Path, data: str, kind: str, said: str) -> None:
    """Each fleet got `kind = "folder"`: boards of a task with sound were charged for noise alone, and nobody saw it."""
    shape = "" if data == "sound" else f"\ninput_shape = {[1, 8, 8] if data == 'folder' else [9, 1, 1]}"
    model = 'name = "digits-cnn"' if data == "folder" else 'name = "linear"'
    text = TASK.replace('"digits"', f'"{data}"\nclass_names = ["a", "b"]{shape}')
    task.write_text(text.replace('name = "digits-cnn"', model))
    path, said_by_init = tmp_path / "plant", run("init", tmp_path / "plant", "--broker-name", "x", "--task", task)
    assert f"each board's {said}" in said_by_init
    assert "for a smaller fleet lower data.devices = 2 (and" in said_by_init
    assert FleetFolder(path).config.device["data"]["kind"] == kind
    with FleetRegistry(path) as registry:
        registry.add(counted("plant", 2, known=[], board="generic-x86"))
    key = keys.service(FleetFolder(path)).public_key.hex()
    found = run("status", path, "--details")
    assert f'fleet.service_key = "{key}"' in found
    assert "charged for noise alone" not in found
    file, other = path / FILE_NAME, "folder" if kind == "sound" else "sound"
    file.write_text(file.read_text().replace(f'kind = "{kind}"', f'kind = "{other}"'))
    warning = f"trains on data of kind {kind!r}, and cards get data.kind = {other!r}: such boards are charged for noise"
    assert warning in " ".join(run("status", path).split())
    task.write_text(task.read_text().replace('"small"', '"next"'))
    with patch("hushfleet.aggregator.payloads.prepare.prepare"):
        assert f"note: next {warning}" in run("task", path, task, "--now")


def test_class_names_are_written_as_they_are(tmp_path: Path, task: Path) -> None:
    task.write_text(TASK.replace('"digits"', '"folder"\nclass_names = ["a", "b"]\ninput_shape = [1, 8, 8]'))
    words = ("--broker-name", "broker.example", "--task", task, "--classes", r"Äpfel,\1 und \\,🍐")
    assert "one for each class: Äpfel, " in run("init", tmp_path / "plant", *words)
    assert load_task(tmp_path / "plant" / "task.toml").data.class_names == ("Äpfel", r"\1 und \\", "🍐")


def test_add_names_boards_and_list_shows_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "plant", boards=0)
    run("add", folder.path, "--count", 3, "--board", "generic-x86")
    place = "behind the house [/b]"
    run("add", folder.path, "--count", 1, "--board", "generic-x86", "--prefix", "shed", "--place", place)
    assert "greenhouse-04" in run("add", folder.path, "--count", 1, "--board", "generic-x86")
    listed = run("status", folder.path)
    assert all(name in listed for name in ("greenhouse-01", "greenhouse-04", "shed-01", place))
    assert "certificate" not in run("status", folder.path, "shed-01")
    with pytest.raises(BadInput, match="no board with such a key asks as shed-01"):
        run("approve", folder.path, "shed-01")
    for wrong in (("--count", 1), ("--count", 1, "--board", "no-such"), (), ("--count", 1, "--csv", folder.task)):
        with pytest.raises(BadInput):
            run("add", folder.path, *wrong)
    with FleetRegistry(folder.path) as registry:
        assert len(registry.boards()) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,board\na-1,generic-x86\nA 2,generic-x86\n", "line 3: .*'A 2'"),
        ("id,board\na.1,generic-x86\n", "line 2: .*'a.1' has a '.'"),
        ("id,board\na-1,generic-x86\na-1,generic-x86\n", "names a-1 2 times"),
        ("id,board\na-1,\n", "line 2: no board"),
        ("id,colour\na-1,red\n", "must name columns"),
        ("board\ngeneric-x86\n", "must name columns"),
        ("id,board,key\na-1,generic-x86,12\n", "line 2: the key must be 64 hex digits"),
        ("id,board,labels\na-1,generic-x86,red\n", "name=value"),
        ("id,board\n", "names no board"),
        (f'id,board\na-1,"generic-x86\n{"a-2,generic-x86" * 9000}\n', "a quotation mark"),
        ("id,board\nfleet,generic-x86\n", "uses this name itself"),
    ],
)
def test_a_wrong_line_of_a_csv_file_adds_nothing(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fleet.csv"
    file.write_text(text)
    with pytest.raises(BadInput, match=said):
        from_csv(file, board=None)


def test_a_csv_file_says_all_of_a_board(tmp_path: Path) -> None:
    file = tmp_path / "fleet.csv"
    file.write_text(
        f"id, board, place, wifi, labels, key\nshed, generic-x86, behind, net, a=1; b=2, {'cd' * 32}\ntree,,,,,\n"
    )
    first, second = from_csv(file, board="raspberry-pi-4-4gb")
    assert (first.board, first.place, first.wifi, first.labels) == (
        "generic-x86",
        "behind",
        "net",
        {"a": "1", "b": "2"},
    )
    assert first.public_key == bytes.fromhex("cd" * 32)
    assert (second.board, second.public_key) == ("raspberry-pi-4-4gb", None)


def test_two_boards_with_one_key_are_not_added(tmp_path: Path) -> None:
    folder, file, key = make_folder(tmp_path / "plant"), tmp_path / "fleet.csv", "cd" * 32
    with FleetRegistry(folder.path) as registry:
        before = registry.boards()
    file.write_text(f"id,board,key\nshed,generic-x86,{key}\ntree,generic-x86,{key}\n")
    with pytest.raises(BadInput, match="tree has the key of shed"):
        run("add", folder.path, "--csv", file)
    with FleetRegistry(folder.path) as registry:
        assert registry.boards() == before


def test_numbers_go_on_after_the_highest() -> None:
    names = [row.device for row in counted("a", 2, known=["a-07", "a-3", "a-x", "b-99"], board="generic-x86")]
    assert names == ["a-08", "a-09"]


def test_device_toml_is_read_by_the_board_and_allows_what_the_task_asks(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "plant", task=TASK.replace("[privacy]", '[privacy]\naccounting = "as-published"'))
    with FleetRegistry(folder.path) as registry:
        board = registry.board("greenhouse-01")
    file = tmp_path / "device.toml"
    file.write_text(device_toml(folder, board))
    config = load_config(file)
    assert (config.limits.accounting, config.limits.epsilon_server) == ("as-published", 8.0)
    assert config.fleet is not None
    assert config.roster_key == bytes.fromhex(config.fleet.operator_key)
    assert config.server_key is not None


def small_sums(honest_fraction: float) -> str:
    words = f'[privacy]\naccounting = "secure"\nhonest_fraction = {honest_fraction}'
    return TASK.replace("[privacy]", words)


def test_a_card_says_what_secure_aggregation_may_count_on(tmp_path: Path) -> None:
    """A board that lacks it would take the same."""
    folder = make_folder(tmp_path / "plant")
    with FleetRegistry(folder.path) as registry:
        board = registry.board("greenhouse-01")
    limits = tomllib.loads(device_toml(folder, board))["limits"]
    assert (limits["honest_fraction"], limits["min_devices"]) == (0.9, 10)
    file = folder.path / FILE_NAME
    file.write_text(file.read_text().replace("honest_fraction = 0.9", "honest_fraction = 0.75"))
    assert tomllib.loads(device_toml(FleetFolder(folder.path), board))["limits"]["honest_fraction"] == 0.75


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "opens sums of 2 boards, and this fleet's boards take part in sums of 10 or more"),
        (("--min-devices", 2, "--honest-fraction", 0.8), "honest_fraction = 0.9 of the boards, and this fleet on 0.8"),
    ],
)
def test_a_task_that_counts_on_more_than_the_fleet_is_refused(tmp_path: Path, words: Any, said: str) -> None:
    file = tmp_path / "task.toml"
    file.write_text(small_sums(0.9))
    with pytest.raises(BadInput, match=said):
        run("init", tmp_path / "plant", "--broker-name", "b.example", "--task", file, *words)
    assert not (tmp_path / "plant").exists()
    run("init", tmp_path / "plant", "--broker-name", "b.example", "--task", file, "--min-devices", 2)
    sums = FleetFolder(tmp_path / "plant").config.secure_sums
    assert (sums.honest_fraction, sums.min_devices) == (0.9, 2)
    file.write_text(small_sums(1.0).replace('name = "', 'name = "next-', 1))
    with pytest.raises(BadInput, match="honest_fraction = 1 of the boards"):
        set_task(FleetFolder(tmp_path / "plant"), file)
