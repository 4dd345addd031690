"""Board profiles: every number has a source or is called an estimate, and the command shows it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import typer
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles import Board, Quantity, board_names, load_board
from hushfleet.firmware_profiles.board import parse_board

EXPECTED = {
    "generic-x86",
    "jetson-agx-orin",
    "jetson-nano-2019",
    "jetson-orin-nano",
    "jetson-orin-nx",
    "raspberry-pi-4-2gb",
    "raspberry-pi-4-4gb",
    "raspberry-pi-4-8gb",
    "raspberry-pi-5-16gb",
    "raspberry-pi-5-4gb",
    "raspberry-pi-5-8gb",
    "raspberry-pi-zero-2-w",
}

PROFILE = """
title = "A board"
cpu = "a core"
cores = { value = 2, source = "its data sheet" }
clock_mhz = { value = 1000, source = "its data sheet" }
relative_cpu_speed = { value = 0.5, estimated = true, basis = "half the clock" }
memory_mib = { value = 256, source = "its data sheet" }
accelerator = "none"
os = "some Linux"
architecture = "aarch64"
first_boot = "by hand"
python = "3.13"
glibc = "2.41"
network = "LoRa"
network_down_mbit_s = { value = 0.02, estimated = true }
network_up_mbit_s = { value = 0.01, estimated = true }
network_latency_ms = { value = 2000, estimated = true }
storage = "flash"
storage_write_mb_s = { value = 1, estimated = true }
power_idle_w = { value = 0.1, estimated = true }
power_active_w = { value = 0.5, estimated = true }
"""


def test_the_boards_are_there() -> None:
    assert set(board_names()) == EXPECTED
    assert list(board_names()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_says_where_it_comes_from(name: str) -> None:
    board = load_board(name)
    assert board.name == name
    numbers = dict(board.quantities())
    assert len(numbers) == 10
    for quantity in numbers.values():
        assert quantity.value > 0
        assert (quantity.source is None) == quantity.estimated
    assert board.power_idle_w.value < board.power_active_w.value
    assert board.network_up_mbit_s.value <= board.network_down_mbit_s.value
    # No board was measured here, so no speed may claim a source.
    assert board.relative_cpu_speed.estimated
    assert board.relative_cpu_speed.basis
    assert tuple(map(int, board.python.split("."))) >= (3, 10)


def test_sizes_agree_with_names() -> None:
    for name in EXPECTED:
        if name.endswith("gb"):
            assert load_board(name).memory_mib.value == 1024 * int(name.rsplit("-", 1)[1][:-2])
    assert load_board("raspberry-pi-zero-2-w").memory_mib.value == 512


def test_generic_x86_is_the_yardstick() -> None:
    speeds = {name: float(load_board(name).relative_cpu_speed) for name in EXPECTED}
    assert speeds.pop("generic-x86") == 1.0
    assert max(speeds.values()) < 1.0


def test_a_wrong_name_gets_the_close_ones() -> None:
    with pytest.raises(BadInput, match=r"did you mean .*raspberry-pi-4-4gb"):
        load_board("rasberry-pi4-4gb")
    with pytest.raises(BadInput, match=r"did you mean .*jetson-agx-orin"):
        load_board("Jetson AGX Orin")
    with pytest.raises(BadInput, match="the boards are generic-x86, "):
        load_board("zzzzzz")
    for name in ("../boards/generic-x86", "", "generic-x86.toml"):
        with pytest.raises(BadInput, match="there is no board"):
            load_board(name)


def test_a_profile_is_read_field_by_field() -> None:
    board = parse_board("mine", PROFILE)
    assert board.cores == Quantity(2, "its data sheet")
    assert board.relative_cpu_speed == Quantity(0.5, None, True, "half the clock")
    assert (board.network, board.network_up_mbit_s.value) == ("LoRa", 0.01)
    assert board.notes == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        board.title = "another"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('value = 2, source = "its data sheet"', "value = 2", "needs a source or estimated"),
        ("value = 1, estimated = true", "value = 1, estimated = false", "needs a source or estimated"),
        ('value = 2, source = "its data sheet"', 'value = 2, source = "x", estimated = true', "not both"),
        ('value = 2, source = "its data sheet"', 'value = 2, source = "x", basis = "y"', "only an estimate"),
        ('value = 2, source = "its data sheet"', 'value = 2, source = ""', "source = '': must be a text"),
        ("{ value = 1, estimated = true }", "1", "storage_write_mb_s = 1: expected a table"),
        ("value = 1,", "value = 0,", "value = 0: must be positive"),
        ("value = 1,", "value = inf,", "value = inf: must be positive"),
        ("value = 1,", "value = true,", "value = True: must be positive"),
        ("value = 1,", 'value = "1",', "value = '1': must be positive"),
        ('python = "3.13"', "python = 3.13", "python = 3.13: must be a text"),
        ('storage = "flash"', 'storage = "flash"\ncolour = "red"', "unknown field 'colour'"),
        ('accelerator = "none"', 'gpu = "none"', "missing field `accelerator`"),
        ('title = "A board"', 'title = "A board"\nnotes = "one"', "notes = 'one': expected a list"),
        ('title = "A board"', "title = ", "not valid TOML"),
    ],
)
def test_a_profile_that_breaks_a_rule_is_refused(old: str, new: str, reason: str) -> None:
    assert PROFILE.count(old) == 1 or old.startswith("value = 1,")
    with pytest.raises(BadInput, match=reason):
        parse_board("mine", PROFILE.replace(old, new, 1))


@pytest.fixture
def app() -> typer.Typer:
    return build_app()


def test_the_command_lists_all_boards(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["boards"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for name in EXPECTED:
        assert name in done.output
    assert "~0.15" in done.output


def test_the_command_shows_one_board_with_its_sources(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["boards", "raspberry-pi-4-4gb"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "Raspberry Pi documentation, Power supply: stress 1.2 A" in done.output
    assert "estimate: peak float32" in done.output
    assert "installed by hushfleet push" in done.output


def test_the_command_speaks_json(app: typer.Typer) -> None:
    one = json.loads(CliRunner().invoke(app, ["boards", "jetson-orin-nano", "--json"]).output)
    assert one["cores"] == dataclasses.asdict(load_board("jetson-orin-nano").cores)
    everything = json.loads(CliRunner().invoke(app, ["boards", "--json"]).output)
    assert {board["name"] for board in everything} == EXPECTED
    assert set(everything[0]) == {field.name for field in dataclasses.fields(Board)}


def test_the_command_refuses_an_unknown_board(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["boards", "raspberry-pi-9"])  # `main` says it in words
    assert isinstance(done.exception, BadInput)
    assert "did you mean raspberry-pi-" in str(done.exception)
