"""Arranges the rows of a table: by their times, and as the steps of one sample, a series, by their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from hushfleet.errors import BadInput


def arranged(
    values: np.ndarray,
    fixed: Sequence[Any],
    *,
    times: np.ndarray | None,
    records: np.ndarray | None,
    where: str,
    steps: int | None = None,
    skipped: list[str] | None = None,
) -> tuple[np.ndarray, list[Any]]:
    """Returns the rows in the order of their times; or a sample for each record, `[records, C, T]`, in the order of
    their first rows. And what is fixed in each.

    :param values: `[rows, C]`.
    :param fixed: arrays `[rows, ...]` that do not change within a record, such as its label; None stays None.
    :param times: as `time_of` takes them, `[rows]`; equal times keep the order of the table; None: the table's order.
    :param records: texts `[rows]`; None: each row is a sample.
    :param steps: T; None: as many as the first record has rows.
    :param skipped: the list that receives a text for each record that does not fit; None: the first is an error.
    """
    moments = (
        None if times is None else [_time(text, row, where) for row, text in enumerate(times.astype(str).tolist())]
    )
    order = np.arange(len(values)) if moments is None else np.argsort(moments, kind="stable")
    values, fixed = values[order], [None if each is None else each[order] for each in fixed]
    if records is None:
        return values, fixed
    names, first, group = np.unique(records[order].astype(str), return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[group]
    rows = np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place))[:-1]) if len(place) else []
    steps, kept = steps or (len(rows[0]) if rows else 1), list[np.ndarray]()
    for row in rows:
        changes = any(each is not None and (each[row] != each[row[:1]]).any() for each in fixed)
        if len(row) == steps and not changes:
            kept.append(row)
            continue
        said = "several labels or devices" if changes else f"{len(row)} rows, and a sample has {steps} steps"
        if skipped is None:
            raise BadInput(
                f"{where}: the record {str(names[group[row[0]]])!r} has {said}; leave it out, cut it, or pad it"
            )
        skipped.append(f"record {names[group[row[0]]]}: it has {said}")
    places = np.array(kept, np.int64).reshape(-1, steps)
    return values[places].transpose(0, 2, 1), [None if each is None else each[places[:, 0]] for each in fixed]


def _time(text: str, row: int, where: str) -> float:
    try:
        return time_of(text)
    except BadInput as error:
        raise BadInput(f"{where}: row {row} (from 0): {error}") from error


def time_of(text: str) -> float:
    """Returns a time as a number: a number, or the seconds of a date in the form of ISO 8601. Raises `BadInput`."""
    readers: tuple[Callable[[str], float], ...] = (float, _seconds)
    for read in readers:
        try:
            time = read(text)
        except ValueError:
            continue
        if np.isfinite(time):
            return time
    raise BadInput(f"{text!r} is no time; give numbers, or dates like 2026-11-29T08:30")


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
