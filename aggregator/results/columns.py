"""Writes many rows with the same names as columns, and reads them: a line of JSON for thousands of simulated devices.

A column has the values of all rows (`each`), or the value that all of them share (`all`); with `at`, `each` has the
values of the rows at these places, and the others have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """Returns the columns by name.

    >>> columns_of([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}])
    {'a': {'all': 1}, 'b': {'each': [2, 3], 'at': [0, 1]}}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column(name, rows) for name in names}


def rows_of(columns: Mapping[str, Row], count: int) -> list[Row]:
    """Returns the rows of `columns_of`."""
    rows: list[Row] = [{} for _ in range(count)]
    for name, column in columns.items():
        values = column["each"] if "each" in column else [column["all"]] * count
        for place, value in zip(column.get("at", range(count)), values, strict=True):
            rows[place][name] = value
    return rows


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> Row:
    at = [place for place, row in enumerate(rows) if name in row]
    values = [rows[place][name] for place in at]
    if len(at) < len(rows):
        return {"each": values, "at": at}
    return {"all": values[0]} if all(value == values[0] for value in values) else {"each": values}
