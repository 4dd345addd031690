"""The scripts of the thermostats: a recorder's file becomes the table that its series say."""

from __future__ import annotations

import csv
import importlib
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "thermostats"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("make_data", "make_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("make_data"), importlib.import_module("make_table")


def test_a_table_has_the_homes_series(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    """The oracle averages what the model of the homes gave, before it was written."""
    make_data, make_table = scripts
    inside, outside, heats = make_data.year(np.random.default_rng(5), 8, 8)
    seen, errors = set(), []
    for home in range(8):
        path = tmp_path / f"{home}.db"
        make_data.write(path, inside[home], outside[home], heats[home], rng=np.random.default_rng(home))
        with sqlite3.connect(path) as db:
            ids = dict(db.execute("SELECT statistic_id, unit_of_measurement FROM statistics_meta"))
        seen.add((ids["sensor.inside"], len(ids)))
        found = make_table.samples(path, *make_data.ENTITIES)
        assert len(found) > 10
        for hour, target, values in found:
            at = 12 * (hour - make_data.FIRST_HOUR)
            wanted = [each[home, at - 288 : at].reshape(4, -1).mean(1) for each in (inside, outside, heats)]
            tolerance = np.repeat([0.5, 0.5, 0.35], 4)  # the sensors' noise, and filled gaps
            assert (np.abs(np.array(values) - np.concatenate(wanted)) < tolerance).all()
            errors.append(abs(target - heats[home, at : at + 72].sum() / 12))
    assert np.mean(errors) < 0.05
    assert max(errors) < 2  # two hours that a switch was unavailable
    assert len(seen) >= 3  # both units, meters and switches


def recorder(path: Path, rows: dict[str, list[tuple[float, str, str]]], tables: str) -> None:
    """Writes states: by entity, hours, the state and its attributes as JSON."""
    with sqlite3.connect(path) as db:
        db.executescript(tables)
        for number, (entity, states) in enumerate(rows.items(), 1):
            db.execute("INSERT INTO states_meta VALUES (?, ?)", (number, entity))
            for hour, state, attributes in states:
                key = db.execute("INSERT INTO state_attributes (shared_attrs) VALUES (?)", (attributes,)).lastrowid
                db.execute(
                    "INSERT INTO states (state, last_updated_ts, attributes_id, metadata_id) VALUES (?, ?, ?, ?)",
                    (state, 3600 * hour, key, number),
                )
    db.close()


def test_states_are_read_with_units_gaps_and_actions(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    make_data, make_table = scripts
    fahrenheit, heats, idle = '{"unit_of_measurement": "°F"}', '{"hvac_action": "heating"}', '{"hvac_action": "idle"}'
    rows = {
        "sensor.in": [(0, "68", fahrenheit), (31, "unavailable", "{}"), (33, "86", fahrenheit), (60, "86", fahrenheit)],
        "sensor.out": [(0, "5.0", "{}"), (12.5, "unknown", "{}"), (20, "7", "{}"), (60, "7", "{}")],
        "climate.home": [(0, "heat", heats), (24.25, "heat", idle), (48, "heat", heats), (60, "heat", heats)],
    }
    recorder(tmp_path / "r.db", rows, make_data.TABLES)
    db = sqlite3.connect(tmp_path / "r.db")
    warm = make_table.series(db, "sensor.in", is_heating=False)
    assert [round(warm[hour], 2) for hour in (0, 30, 31, 32, 33)] == [20, 20, 23.33, 26.67, 30]  # two hours are filled
    cold = make_table.series(db, "sensor.out", is_heating=False)
    assert (cold[12], sorted({*range(60)} - {*cold})) == (5.0, [*range(13, 20)])  # half an hour is known of the 12th
    on = make_table.series(db, "climate.home", is_heating=True)
    assert [on[hour] for hour in (23, 24, 25, 47, 48)] == [1, 0.25, 0, 0, 1]
    (hour, target, values), later = make_table.samples(tmp_path / "r.db", *rows)
    assert (hour, later[0], target) == (48, 54, 6.0)
    np.testing.assert_allclose(values, [20, 80 / 3, 30, 30, 7, 7, 7, 7, 0.25 / 6, 0, 0, 0])
    with pytest.raises(SystemExit, match=r"switch.other has no values; .*climate.home, sensor.in, sensor.out"):
        make_table.series(db, "switch.other", is_heating=True)
    db.close()


def test_both_scripts_run(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "make_data.py", "homes", "2", "9"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = [sys.executable, FOLDER / "make_table.py", "homes/home-01.db", "out.csv", "--inside", "sensor.inside"]
    done = subprocess.run(
        [*command, "--outside", "sensor.outside", "--heating", "sensor.heater"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    header, *lines = csv.reader((tmp_path / "out.csv").open())
    assert header[:3] == ["heating_ahead", "inside_24h", "inside_18h"]
    assert done.stdout.decode() == f"{len(lines)} samples in out.csv\n"
    assert 15 < len(lines) <= 31
    assert all(len(line) == 13 for line in lines)


@pytest.mark.parametrize("content", [None, b"no database", b""])
def test_a_file_that_is_no_recorder_is_named_in_one_line(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "nope.db"
    if content is not None:
        file.write_bytes(content)
    given = [each for channel in ("inside", "outside", "heating") for each in (f"--{channel}", "sensor.a")]
    command = [sys.executable, FOLDER / "make_table.py", file, "out.csv", *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"{file} cannot be read as a file of Home Assistant's recorder: ")


def test_the_page_has_the_measured_figures() -> None:
    runs = json.loads((FOLDER.parents[1] / "docs" / "figures" / "thermostats.json").read_text())["runs"]
    rows = re.findall(r"^\| \d (.+) \|$", (FOLDER / "README.md").read_text("utf-8"), re.M)
    for quarter, row in enumerate(rows):
        values = {name: [run[quarter][name] for run in runs] for name in ("alone", "shared", "own")}
        assert row == "".join(f"| {np.mean(each):.1f} ±{np.std(each):.1f} " for each in values.values()).strip()
    assert len(rows) == 4
