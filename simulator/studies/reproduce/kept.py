"""What is kept of a finished cell: one small JSON, found again by what was run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.result import Result, write_whole
from hushfleet.config.spec import PrivacySpec
from hushfleet.errors import BadInput
from hushfleet.methods import make_method
from hushfleet.methods.state import RoundTerms
from hushfleet.model.params import ParamLayout
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.recipe import LAST_ROUNDS, Metric, Window

SCHEMA = 1
CELLS = "cells"
_ANY_LAYOUT = ParamLayout(("layer.weight",), ((1,),))  # raw values are a matter of the settings alone


@dataclass(frozen=True)
class KeptCell:
    """A finished cell.

    :param digest: of the task that was run; see `Cell.digest`.
    :param accuracies: by metric, one value a round, None where it was not measured; fractions of 1.
    :param epsilon_server, epsilon_release: of the noised values, for the device that has spent most: what a paper's
        accounting covers. inf without noise. Where there are `raw_values`, what holds is infinite.
    :param uplink_bytes: of all devices and rounds.
    :param seconds: of computing, all parts of an interrupted run together; on one core.
    :param samples: that were trained on, epochs counted.
    :param tested: images that own models were tested on.
    """

    cell: str
    digest: str
    quick: bool
    task: dict[str, Any]
    accuracies: dict[str, list[float | None]]
    epsilon_server: float
    epsilon_release: float
    noise_multiplier: float
    rounds: int
    uplink_bytes: int
    seconds: float
    samples: float
    tested: float
    runtime: str
    processor: str
    versions: dict[str, str]
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def raw_values(self) -> tuple[str, ...]:
        """What the cell's method sends without noise, in words; see `Cost.raw`."""
        task = parse_task(json.loads(json.dumps(self.task)), where=self.cell)
        section = task.privacy
        privacy = PrivacySpec(section.unit, section.accounting, section.clip_norm, self.noise_multiplier, task.delta)
        method = make_method(task.method.name, task.method.settings, privacy, _ANY_LAYOUT, rounds=self.rounds)
        return method.cost(RoundTerms()).raw

    def value(self, metric: Metric, window: Window) -> float | None:
        """The accuracy of the table as a fraction; None if what it takes was not measured."""
        values = self.accuracies.get(metric, [])
        if window == "best":
            measured = [value for value in values if value is not None]
            return max(measured) if len(measured) == len(values) and values else None
        last = values[-1:] if window == "last" else values[-LAST_ROUNDS:]
        measured = [value for value in last if value is not None]
        return math.fsum(measured) / len(measured) if measured and len(measured) == len(last) else None

    def save(self, out: Path) -> Path:
        """Writes the file whole or not at all. Raises `StoreError`."""
        path = cell_path(out, self.cell)
        plain = {"schema": SCHEMA, **{name: value for name, value in asdict(self).items() if name != "path"}}
        write_whole(path, json.dumps(_to_json(plain), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> KeptCell:
        """Raises `BadInput`."""
        try:
            plain = _from_json(json.loads(path.read_text("utf-8")))
            if plain.pop("schema") != SCHEMA:
                raise ValueError("it is of another schema")
            return cls(**plain, path=path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"{path} is no finished cell: {error}; delete it to have it run again") from error


def cell_path(out: Path, key: str) -> Path:
    return out / CELLS / f"{key}.json"


class Kept:
    """The finished cells of some folders, by what was run.

    :param folders: each with `cells/`; in the first one new cells are written.
    """

    def __init__(self, *folders: Path) -> None:
        self.out = folders[0]
        self._by_digest: dict[str, list[KeptCell]] = {}
        seen = set()
        for folder in folders:
            for path in sorted((folder / CELLS).glob("**/*.json")):
                if path.resolve() not in seen:
                    seen.add(path.resolve())
                    self.add(KeptCell.load(path))

    def __iter__(self) -> Iterator[KeptCell]:
        return (kept for several in self._by_digest.values() for kept in several)

    def add(self, kept: KeptCell) -> None:
        self._by_digest.setdefault(kept.digest, []).append(kept)

    def of(self, cell: Cell) -> KeptCell | None:
        """The result of the same run that has what the cell's table takes."""
        window = cell.entry.recipe.window
        fitting = [
            kept for kept in self._by_digest.get(cell.digest, []) if kept.value(cell.metric, window) is not None
        ]
        return fitting[0] if fitting else None


def kept_cell(
    cell: Cell, result: Result, *, seconds: float, samples: float, tested: float, runtime: str, processor: str
) -> KeptCell:
    names = ("accuracy_own_common", "accuracy_own_local", "accuracy_global")
    return KeptCell(
        cell=cell.key,
        digest=cell.digest,
        quick=cell.quick,
        task=cell.plain,
        accuracies={name: [_rounded(getattr(row, name)) for row in result.rounds] for name in names},
        epsilon_server=max(
            (_either(row.noised_server, row.epsilon_server) for row in result.privacy), default=math.inf
        ),
        epsilon_release=max(
            (_either(row.noised_release, row.epsilon_release) for row in result.privacy), default=math.inf
        ),
        noise_multiplier=result.noise_multiplier,
        rounds=len(result.rounds),
        uplink_bytes=sum(row.uplink_bytes for row in result.rounds),
        seconds=round(seconds, 1),
        samples=samples,
        tested=tested,
        runtime=runtime,
        processor=processor,
        versions=result.versions,
    )


def _either(noised: float | None, whole: float) -> float:
    return whole if noised is None else noised


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _to_json(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return "inf" if isinstance(value, float) and value == math.inf else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _from_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    return math.inf if value == "inf" else value
