"""Makes a table of samples from Home Assistant's recorder, at home: `home-assistant_v2.db` stays where it is.

    python make_table.py home-assistant_v2.db OUT.csv --inside sensor.living_room --outside sensor.garden --heating ID

A row has the last 24 hours of inside and outside temperature (degrees C) and of heating (share of the time), as means
of six hours each, and as its target the hours of heating within the next six. `--heating` is an energy meter of the
heater (its largest hour counts as a full one), a switch or binary sensor that is `on`, or a thermostat whose
`hvac_action` is `heating`. Hours come from long-term statistics, and where there are none from states, which Home
Assistant deletes after ten days unless told otherwise.

Read are `statistics`, `statistics_meta`, `states`, `states_meta` and `state_attributes` with the columns of schema 43
of the recorder (homeassistant/components/recorder/db_schema.py, Home Assistant 2024.4); `states_meta` is
there since schema 38.
"""

import argparse
import csv
import itertools
import json
import math
import sqlite3
import sys
from pathlib import Path

HOUR_S, PAST, AHEAD, MEAN = 3600, 24, 6, 6  # seconds, hours
LONGEST_GAP = 2  # hours that are filled by a line between their neighbours
CHANNELS, TARGET = ("inside", "outside", "heating"), "heating_ahead"
COLUMNS = [f"{channel}_{PAST - hour}h" for channel in CHANNELS for hour in range(0, PAST, MEAN)]

Hours = dict[int, float]  # by hour since 1970


def celsius(value: float, unit: str | None) -> float:
    return {"°F": (value - 32) / 1.8, "K": value - 273.15}.get(unit or "", value)


def by_statistics(db: sqlite3.Connection, entity: str, *, is_heating: bool) -> Hours:
    """Returns hourly means of a temperature, or of an energy meter the shares of its largest hour."""
    rows = db.execute(
        "SELECT start_ts, mean, sum, unit_of_measurement FROM statistics JOIN statistics_meta ON metadata_id = "
        "statistics_meta.id WHERE statistic_id = ? AND start_ts IS NOT NULL ORDER BY start_ts",
        (entity,),
    ).fetchall()
    if not is_heating:
        return {int(at // HOUR_S): celsius(mean, unit) for at, mean, _, unit in rows if mean is not None}
    sums = {int(at // HOUR_S): total for at, _, total, _ in rows if total is not None}
    used = Hours()
    for before, after in itertools.pairwise(sums):
        if after - before <= LONGEST_GAP + 1:
            each = (sums[after] - sums[before]) / (after - before)
            used |= dict.fromkeys(range(before + 1, after + 1), each)
    most = max(used.values(), default=0.0)
    return {hour: min(1.0, max(0.0, energy / most)) for hour, energy in used.items()} if most > 0 else {}


def by_states(db: sqlite3.Connection, entity: str, *, is_heating: bool) -> Hours:
    """Returns hourly means of what states say; a state that is `unknown` or `unavailable` is a gap."""
    rows = db.execute(
        "SELECT last_updated_ts, state, shared_attrs FROM states JOIN states_meta USING (metadata_id) LEFT JOIN "
        "state_attributes USING (attributes_id) WHERE entity_id = ? AND last_updated_ts IS NOT NULL "
        "ORDER BY last_updated_ts",
        (entity,),
    ).fetchall()
    sums, known = Hours(), Hours()
    for (at, state, attributes), (until, *_) in itertools.pairwise(rows):
        value = value_of(state, json.loads(attributes or "{}"), is_heating=is_heating)
        while value is not None and at < until:
            hour = int(at // HOUR_S)
            end = min(until, (hour + 1) * HOUR_S)
            sums[hour] = sums.get(hour, 0.0) + value * (end - at)
            known[hour] = known.get(hour, 0.0) + end - at
            at = end
    return {hour: sums[hour] / seconds for hour, seconds in known.items() if seconds >= HOUR_S / 2}


def value_of(state: str | None, attributes: dict[str, object], *, is_heating: bool) -> float | None:
    """Returns the temperature, or 1 while it heats and 0 while it does not; None if it is not known."""
    if state in (None, "unknown", "unavailable"):
        return None
    if is_heating:
        action = attributes.get("hvac_action")
        return float(action == "heating" if action is not None else state == "on")
    try:
        value = celsius(float(state), str(attributes.get("unit_of_measurement")))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def series(db: sqlite3.Connection, entity: str, *, is_heating: bool) -> Hours:
    """Returns an entity's hours, with short gaps filled. Stops the program if there are none."""
    hours = by_states(db, entity, is_heating=is_heating) | by_statistics(db, entity, is_heating=is_heating)
    if not hours:
        names = "SELECT statistic_id FROM statistics_meta UNION SELECT entity_id FROM states_meta ORDER BY 1"
        sys.exit(f"{entity} has no values; the recorder has {', '.join(str(name) for (name,) in db.execute(names))}")
    ordered = sorted(hours)
    for before, after in itertools.pairwise(ordered):
        if after - before <= LONGEST_GAP + 1:
            for hour in range(before + 1, after):
                share = (hour - before) / (after - before)
                hours[hour] = (1 - share) * hours[before] + share * hours[after]
    return hours


def samples(path: Path, *entities: str) -> list[tuple[int, float, list[float]]]:
    """Returns the hour, the target and the values of each sample whose hours are all known.

    :param entities: of inside, outside and heating.
    """
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        channels = [
            series(db, entity, is_heating=name == "heating") for name, entity in zip(CHANNELS, entities, strict=True)
        ]
    finally:
        db.close()
    found, heating = [], channels[-1]
    for now in range(min(heating) + PAST, max(heating) + 2 - AHEAD):
        ahead, means = [heating.get(hour) for hour in range(now, now + AHEAD)], []
        for channel in channels:
            for first in range(now - PAST, now, MEAN):
                known = [channel[hour] for hour in range(first, first + MEAN) if hour in channel]
                means.append(sum(known) / MEAN if len(known) == MEAN else None)
        if now % AHEAD == 0 and None not in (*ahead, *means):
            found.append((now, sum(filter(None, ahead)), [each for each in means if each is not None]))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorder", type=Path)
    parser.add_argument("out", type=Path)
    for channel in CHANNELS:
        parser.add_argument(f"--{channel}", required=True, metavar="ENTITY")
    given = parser.parse_args()
    try:
        rows = samples(given.recorder, given.inside, given.outside, given.heating)
    except sqlite3.Error as error:
        sys.exit(f"{given.recorder} cannot be read as a file of Home Assistant's recorder: {error}")
    with given.out.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([TARGET, *COLUMNS])
        lines.writerows([round(each, 3) for each in (target, *values)] for _, target, values in rows)
    print(f"{len(rows)} samples in {given.out}")
