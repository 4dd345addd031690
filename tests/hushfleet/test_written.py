"""What is wrong with a file that a person wrote: all of it, with lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from hushfleet.errors import BadInput, Malformed
from hushfleet.faults import faults
from hushfleet.schema import Checked, from_plain, require
from hushfleet.written import read_written


@dataclass(frozen=True)
class Place(Checked):
    city: str
    floor: Annotated[int, Meta(ge=0)] = 0
    rooms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.floor < 9 or self.city != "Bonn", "floor", self.floor, "below 9 in Bonn")


@dataclass(frozen=True)
class House(Checked):
    name: str
    place: Place
    height_m: float | None = None
    parts: dict[str, int] = field(default_factory=dict)


GOOD = {"name": "a", "place": {"city": "Ulm", "floor": 1, "rooms": ["b"]}, "height_m": 2.5, "parts": {"c": 1}}


def test_everything_is_said_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "house.toml"
    path.write_text('height_m = "tall"\nneme = "a"\n\n[place]\n  city = 3\nflor = 1\n[other]\n')
    with pytest.raises(BadInput) as refused:
        read_written(House, path)
    said = str(refused.value).removeprefix(f"{path}: ").split("; line ")
    assert [each.partition("; known")[0] for each in said] == [
        "line 1, column 1: height_m = 'tall': expected a number, got a text",
        "2, column 1: unknown field 'neme' (did you mean 'name'?)",
        "5, column 3: place.city = 3: expected a text, got an integer",
        "6, column 1: place: unknown field 'flor' (did you mean 'floor'?)",
        "7, column 1: unknown field 'other'",
    ]
    assert said[-1].endswith("missing field `name`")


def test_a_rule_of_two_fields_has_the_line_of_the_one_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "house.toml"
    path.write_text('name = "a"\n[place]\ncity = "Bonn"\nfloor = 12\n')
    with pytest.raises(BadInput, match=r"line 4, column 1: place.floor = 12: must be below 9 in Bonn"):
        read_written(House, path)
    path.write_text('name = "a"\n[place]\ncity = "Ulm"\n[place.more]\n')
    with pytest.raises(BadInput, match="line 4, column 1: place: unknown field 'more'"):
        read_written(House, path)
    path.write_text('name = "a"\nplace = "Bonn\n')
    with pytest.raises(BadInput, match=r"not valid TOML: .*line 2, column"):
        read_written(House, path)


def test_of_repeated_tables_it_is_the_one_that_is_wrong(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Street(Checked):
        house: tuple[Place, ...]

    path = tmp_path / "street.toml"
    path.write_text('[[house]]\ncity = "Ulm"\n\n[[house]]\ncity = "Ulm"\nfloor = -1\n')
    with pytest.raises(BadInput, match=r"line 4, column 1: house\[1\].floor = -1"):
        read_written(Street, path)


def test_the_mark_that_windows_editors_begin_a_file_with_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "place.toml"
    path.write_bytes('\ufeffcity = "Ulm"\r\nfloor = 3\r\n'.encode())
    assert read_written(Place, path) == Place("Ulm", 3)
    path.write_bytes("\ufefffloor = 3\r\n".encode())
    with pytest.raises(BadInput, match="missing field `city`"):
        read_written(Place, path)
    path.write_bytes("\ufeffcity = 3\r\n".encode())
    with pytest.raises(BadInput, match="line 1, column 1: city = 3"):
        read_written(Place, path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.floats() | st.sampled_from(["Bonn", "Ulm"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*GOOD, *GOOD["place"], "x"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "x"]), VALUES), st.sets(st.sampled_from([*GOOD])))
def test_there_are_faults_exactly_where_the_schema_refuses(changed: dict[str, object], kept: set[str]) -> None:
    plain = changed | {name: GOOD[name] for name in kept}
    try:
        from_plain(House, plain)
    except Malformed:
        assert faults(House, plain)
    else:
        assert faults(House, plain) == []
