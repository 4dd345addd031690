"""Which data sets are at hand, and what to do where one is not."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

from hushfleet.data.download import ORIGINS, user_data_dir
from hushfleet.data.sets import is_at_hand, looked_for


def missing_data(names: Collection[str], data_dir: Path | None) -> dict[str, str]:
    """Those that are not there, and for each: what it is, where it comes from, where to put it."""
    return {name: words for name in sorted(names) if (words := _missing(name, data_dir))}


@cache
def _missing(name: str, data_dir: Path | None) -> str:
    where = data_dir or user_data_dir()
    if is_at_hand(name, data_dir=where):
        return ""
    return f"fetch it from {ORIGINS[name]} and put it into {where}: {looked_for(name)}"
