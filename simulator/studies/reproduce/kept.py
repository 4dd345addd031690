"""Stores the record of a finished cell: one small JSON file, which is found by the digest of the task that was run."""

from __future__ import annotations

import copy
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.result import write_whole
from hushfleet.errors import BadInput
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.models import get_model
from hushfleet.plain_json import from_json, to_json
from hushfleet.simulator.studies.reproduce.cells import AS_A_PAPER, Cell
from hushfleet.simulator.studies.reproduce.recipe import LAST_ROUNDS, Metric, Window
from hushfleet.wire.format.spec import PrivacySpec

SCHEMA = 1
CELLS = "cells"
View = Literal["server", "release", "median"]


@dataclass(frozen=True, kw_only=True)
class KeptCell:
    """A finished cell.

    :param digest: the digest of what was run; see `Cell.digest`. `epochs`: see `Cell.epochs`.
    :param accuracies: by metric, one value per round, None if it was not measured; fractions of 1. Also `round_time`,
        one value for all rounds.
    :param epsilon_server: epsilon of the noised values, for the device that has spent most; a paper's accounting covers
        this. Likewise `epsilon_release`. inf without noise. With `raw_values`, the true epsilon is infinite.
    :param uplink_bytes: the sum over all devices and rounds.
    :param epsilon_server_median: the same for the median device, which in APDP-FL adds about the standard noise. None
        if it was not stored; likewise `commit` and `digests` of older cells.
    :param digests: SHA-256 of images and labels, by the name of the data.
    :param largest_stretch: DP-FedSim's largest T_s / b over all devices, layers and rounds, before the cap; None for
        other methods and in older cells.
    :param by_round: epsilon after each round: `server` and `release` of the device that has spent most, `median` of the
        median device against the server. Empty without rounds and in older cells.
    :param seconds: processor time of all its processes, all parts of an interrupted run together (in the oldest cells,
        and on a GPU, wall-clock time).
    """

    cell: str
    digest: str
    quick: bool
    task: dict[str, Any]
    accuracies: dict[str, list[float | None]]
    epsilon_server: float
    epsilon_release: float
    noise_multiplier: float = 0.0
    rounds: int = 0
    uplink_bytes: int = 0
    seconds: float
    runtime: str
    processor: str
    versions: dict[str, str]
    epsilon_server_median: float | None = None
    commit: str | None = None
    digests: dict[str, str] | None = None
    largest_stretch: float | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    by_round: dict[View, list[float]] = field(default_factory=dict)

    @cached_property
    def raw_values(self) -> tuple[str, ...]:
        """The names of the values that the cell's method sends without noise; see `Cost.raw`."""
        if not self.uplink_bytes:  # each device was alone
            return ()
        plain = copy.deepcopy(self.task)
        task = parse_task(plain | {"privacy": {**AS_A_PAPER, **plain.get("privacy", {})}}, where=self.cell)
        section = task.privacy
        privacy = PrivacySpec(
            section.unit,
            section.accounting,
            section.clip_norm,
            self.noise_multiplier,
            task.delta,
            secure=task.secure_spec(),
        )
        layout = get_model(task.model.name).layout
        method = make_method(task.method.name, task.method.settings, privacy, layout, rounds=self.rounds)
        return method.cost(RoundTerms()).raw

    def value(self, metric: Metric, window: Window, round: int | None = None) -> float | None:
        """Returns the accuracy for the table as a fraction; None if a needed value was not measured.

        :param round: the last round that counts; None for all rounds of the run.
        """
        values = self.accuracies.get(metric, [])[:round]
        asked = values[-{"last": 1, "mean-last-10": LAST_ROUNDS, "best": len(values)}[window] :]
        measured = [value for value in asked if value is not None]
        if not measured or len(measured) < len(asked):
            return None
        return max(measured) if window == "best" else math.fsum(measured) / len(measured)

    def value_of(self, cell: Cell, column: str | None = None) -> float | None:
        """Returns the accuracy that the cell's table shows, as a fraction; None if a needed value was not measured.

        :param column: id of the column, for a cell that is in several.
        """
        return self.value(cell.metric, cell.recipe.window, self.round_of(cell, column))

    def round_of(self, cell: Cell, column: str | None = None) -> int | None:
        """Returns the round whose accuracy the table shows; None for the last rounds of the run."""
        stop = self.stop(cell)
        return cell.recipe.round_of(cell.group, column or cell.column_id) if stop is None else stop

    def stop(self, cell: Cell) -> int | None:
        """Returns the last round within the budget of the cell's reading, 0 if none; None if it has no budget."""
        budget = cell.stop_epsilon
        return None if budget is None else bisect_right(self.by_round.get("median", []), budget)

    def epsilon(self, view: View, cell: Cell) -> float | None:
        """Returns epsilon of the noised values, after the round where the cell's reading stops if it does."""
        if stop := self.stop(cell):
            return self.by_round[view][stop - 1]
        whole = {
            "server": self.epsilon_server,
            "release": self.epsilon_release,
            "median": self.epsilon_server_median,
        }
        return whole[view]

    def noise(self, cell: Cell) -> float:
        """Returns the norm of the noise in a round's mean, in clip norms; NaN if the unit is not `device` or epsilon is
        inf."""
        task = cell.task()
        if task.privacy.unit != "device" or math.isinf(self.epsilon_server):
            return math.nan
        size = get_model(task.model.name).layout.size
        return self.noise_multiplier * math.sqrt(size) / (task.round.cohort_size or task.data.devices)

    def save(self, out: Path) -> Path:
        """Writes the file whole or not at all. Raises `StoreError`."""
        path = cell_path(out, self.cell)
        write_whole(path, json.dumps(to_json({"schema": SCHEMA, **asdict(self)}), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> KeptCell:
        """Reads a record. Raises `BadInput`."""
        try:
            plain = from_json(json.loads(path.read_text("utf-8")))
            if plain.pop("schema") != SCHEMA:
                raise ValueError("it is of another schema")
            return cls(**{name: value for name, value in plain.items() if name not in _FORMER})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"{path} is no finished cell: {error}; delete it to have it run again") from error


_FORMER = {"samples", "tested", "rate"}
"""Keys of older files, which are ignored."""


def cell_path(out: Path, key: str) -> Path:
    return out / CELLS / f"{key}.json"


class Kept:
    """The finished cells of some folders, by the digest of the task that was run.

    :param folders: each has `cells/`; new cells are written to the first one.
    """

    def __init__(self, *folders: Path) -> None:
        self.out = folders[0]
        self._by_digest: defaultdict[str, list[KeptCell]] = defaultdict(list)
        self._epochs: list[dict[str, int]] = []
        paths = (path.resolve() for folder in folders for path in sorted((folder / CELLS).glob("**/*.json")))
        for path in dict.fromkeys(paths):
            self.add(KeptCell.load(path))

    def __iter__(self) -> Iterator[KeptCell]:
        return (kept for several in self._by_digest.values() for kept in several)

    def add(self, kept: KeptCell) -> None:
        self._by_digest[kept.digest].append(kept)
        if kept.epochs not in self._epochs:
            self._epochs.append(kept.epochs)

    def of(self, cell: Cell) -> KeptCell | None:
        """Returns a result of the same run with the accuracy for the cell's table; None if none, or if left open."""
        return None if cell.left_open else self._first(cell, cell.digest)

    def stale(self, cell: Cell) -> KeptCell | None:
        """Returns a result of the same settings by older code, if there is none by this version's."""
        if cell.left_open or self.of(cell):
            return None
        return self._first(cell, *map(cell.digest_at, self._epochs))

    def shown(self, cell: Cell) -> KeptCell | None:
        """Returns the cell's result, by older code if there is none by this version's."""
        return self.of(cell) or self.stale(cell)

    def _first(self, cell: Cell, *digests: str) -> KeptCell | None:
        found = (kept for digest in digests for kept in self._by_digest.get(digest, ()))
        return next((kept for kept in found if kept.value_of(cell) is not None), None)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
