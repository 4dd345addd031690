"""Makes recorder files of 40 homes for a year. These are no measurements: no home was measured.

A home is one heat store (loss to the outside, capacity), a heater with a thermostat, the sun, and occupants with a
set point by day, another by night, days away and their own warmth. The weather has seasons, days and fronts; homes
share fronts. Sensors are noisy, are unavailable at times, and one in five speaks Fahrenheit. Half of the heaters have
an energy meter, which the long-term statistics keep; the others are switches whose states are kept.

    python make_data.py [FOLDER] [HOMES] [DAYS] [SEED]     # writes FOLDER/home-00.db ...
"""

import sqlite3
import sys
from pathlib import Path

import numpy as np

STEPS = 12  # an hour
FIRST_HOUR = 473_352  # 2024-01-01 00:00 UTC, in hours since 1970
ENTITIES = ("sensor.inside", "sensor.outside", "sensor.heater")
TABLES = """
CREATE TABLE states_meta (metadata_id INTEGER PRIMARY KEY, entity_id VARCHAR(255));
CREATE TABLE state_attributes (attributes_id INTEGER PRIMARY KEY, hash BIGINT, shared_attrs TEXT);
CREATE TABLE states (state_id INTEGER PRIMARY KEY, state VARCHAR(255), last_changed_ts FLOAT, last_updated_ts FLOAT,
    attributes_id INTEGER, metadata_id INTEGER);
CREATE TABLE statistics_meta (id INTEGER PRIMARY KEY, statistic_id VARCHAR(255), source VARCHAR(32),
    unit_of_measurement VARCHAR(255), has_mean BOOLEAN, has_sum BOOLEAN, name VARCHAR(255));
CREATE TABLE statistics (id INTEGER PRIMARY KEY, created_ts FLOAT, metadata_id INTEGER, start_ts FLOAT, mean FLOAT,
    min FLOAT, max FLOAT, last_reset_ts FLOAT, state FLOAT, sum FLOAT);
"""


def year(rng: np.random.Generator, homes: int, days: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inside and outside temperature and heating (0 or 1), each `[homes, 12 steps an hour]`."""
    count = 24 * STEPS * days
    day = np.arange(count) / (24 * STEPS)
    hour = 24 * (day % 1)
    fronts = np.interp(day, np.arange(0, days + 2, 2), 3.5 * rng.standard_normal(len(np.arange(0, days + 2, 2))))
    season, clouds = (
        -np.cos(2 * np.pi * (day - 20) / 365),
        np.interp(day, np.arange(days + 1), rng.uniform(0, 1, days + 1)),
    )
    offset = rng.normal(0, 2, (homes, 1))
    outside = 9 + offset + 9 * season + fronts + (2 + 2 * clouds) * np.sin(2 * np.pi * (hour - 9) / 24)
    sun = clouds * np.clip(np.sin(2 * np.pi * (hour - 6) / 24), 0, 1) * (0.7 + 0.3 * season)
    loss, power = rng.uniform(0.015, 0.05, homes), rng.uniform(1.2, 2.2, homes)  # an hour; degrees an hour
    window, warmth = rng.uniform(0.1, 0.5, homes), rng.uniform(0.02, 0.1, homes)
    by_day, by_night = rng.uniform(19.5, 22, homes), rng.uniform(15.5, 18.5, homes)
    wakes, sleeps = rng.uniform(5, 8, homes), rng.uniform(21, 23.5, homes)
    works = rng.random((homes, 1)) < 0.6  # nobody is at home from 9 to 16 on working days
    away = np.repeat(rng.random((homes, -(-days // 7))) < 0.05, 7, 1)[:, :days]  # weeks
    inside, heats = np.empty((homes, count)), np.empty((homes, count), bool)
    now, on = by_day.copy(), np.zeros(homes, bool)
    for step in range(count):
        date, at = step // (24 * STEPS), hour[step]
        at_home = ~away[:, date] & ~(works[:, 0] & (date % 7 < 5) & (9 <= at < 16))
        wanted = np.where((wakes <= at) & (at < sleeps) & at_home, by_day, by_night)
        on = now < wanted + np.where(on, 0.3, -0.3)
        inside[:, step], heats[:, step] = now, on
        change = loss * (outside[:, step] - now) + power * on + window * sun[step] + warmth * at_home
        now = now + change / STEPS + 0.01 * rng.standard_normal(homes)
    return inside, outside, heats


def write(path: Path, inside: np.ndarray, outside: np.ndarray, heats: np.ndarray, *, rng: np.random.Generator) -> None:
    """Writes one home's recorder file from values every five minutes."""
    fahrenheit, metered, hours = rng.random() < 0.2, rng.random() < 0.5, len(heats) // STEPS
    unit, (by, plus) = ("°F", (1.8, 32)) if fahrenheit else ("°C", (1, 0))
    noise = 0.1 * rng.standard_normal((2, len(heats)))
    kept = [("mean", unit, by * hourly(each + own) + plus) for each, own in zip((inside, outside), noise, strict=True)]
    if metered:
        kept.append(("sum", "kWh", np.cumsum(hourly(heats)) * rng.uniform(4, 12)))
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as db:
        db.executescript(TABLES)
        for number, (kind, unit, values) in enumerate(kept):
            names = (number, ENTITIES[number], unit, kind == "mean", kind == "sum")
            db.execute("INSERT INTO statistics_meta VALUES (?, ?, 'recorder', ?, ?, ?, NULL)", names)
            known = np.flatnonzero(~gaps(rng, hours)).tolist()
            rows = [(number, 3600.0 * (FIRST_HOUR + hour), float(values[hour])) for hour in known]
            db.executemany(f"INSERT INTO statistics (metadata_id, start_ts, {kind}) VALUES (?, ?, ?)", rows)
        if not metered:
            db.execute("INSERT INTO states_meta VALUES (1, ?)", ENTITIES[2:])
            words = np.where(np.repeat(gaps(rng, hours), STEPS), "unavailable", np.where(heats, "on", "off"))
            changes = [0, *(np.flatnonzero(words[1:] != words[:-1]) + 1).tolist(), len(words) - 1]
            states = [(str(words[step]), 3600 * (FIRST_HOUR + step / STEPS)) for step in changes]
            db.executemany("INSERT INTO states (state, last_updated_ts, metadata_id) VALUES (?, ?, 1)", states)
    db.close()


def hourly(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, STEPS).mean(1)


def gaps(rng: np.random.Generator, hours: int) -> np.ndarray:
    """Returns which hours a sensor is silent: single ones, and now and then a day."""
    silent = rng.random(hours) < 0.005
    for first in np.flatnonzero(rng.random(hours) < 0.0005):
        silent[first : first + 24] = True
    return silent


def make(folder: Path, *, homes: int = 40, days: int = 364, seed: int = 0) -> list[Path]:
    """Writes the files and returns their paths."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    inside, outside, heats = year(rng, homes, days)
    paths = [folder / f"home-{number:02d}.db" for number in range(homes)]
    for path, *home in zip(paths, inside, outside, heats, strict=True):
        write(path, *home, rng=rng)
    return paths


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:] or ["homes"]
    make(Path(folder), **dict(zip(("homes", "days", "seed"), map(int, numbers), strict=False)))
