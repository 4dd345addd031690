"""Results of methods, losses and the personalized head change only together with their epochs.

`epochs.json` has a line for each: its epoch, and what came out when the line was written. Published cells name the
epochs of the code that ran them, so a change without a new epoch would leave old numbers on the page unseen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.samples import FeatureSamples
from hushfleet.data.sets import load
from hushfleet.learning import personalized_head
from hushfleet.losses import LOSSES
from hushfleet.methods import METHODS, Published
from hushfleet.params import PRIOR, WEIGHT, ParamLayout
from hushfleet.simulator.engines.fast.device import NotKept, store_of
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of
from hushfleet.simulator.studies.reproduce.command import to_run
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import find_recipe

FILE = Path(__file__).with_name("epochs.json")
WRITTEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
PUBLISHED = Path(__file__).parents[4] / "docs" / "results"
LAYERED = ("fedrep", "perfreezeclip")
"""Methods whose head and backbone train in different epochs of a round."""


class OneNewer(dict[str, Published]):
    """The methods, of which one has another epoch."""

    def __init__(self, name: str) -> None:
        super().__init__({each: METHODS[each] for each in METHODS})
        self[name] = replace(self[name], epoch=self[name].epoch + 1)


def cell_named(key: str) -> Cell:
    paper, table = key.split("/")[:2]
    recipe = find_recipe(paper, table=table.removeprefix("table-"))
    return next(cell for cell in cells_of(recipe, seeds=1, quick=False) if cell.key == key)


def check(name: str, epoch: int, values: Any, *, atol: float = 0.02) -> None:
    """Compares with the line of this name.

    :param atol: passes another processor's rounding, also where it exchanges a few entries of a mask.
    """
    found = {"epoch": epoch, "values": [float(f"{value:.5g}") for value in np.ravel(values)]}
    line, written = f'"{name}": {json.dumps(found)}', WRITTEN.get(name)
    assert written is not None, f"add this line to {FILE.name}: {line}"
    assert epoch == written["epoch"], f"put this line into {FILE.name}: {line}"
    same = np.allclose(found["values"], written["values"], rtol=5e-3, atol=atol)
    assert same, f"{name} gives other results: raise its `epoch` ({epoch}). The new line: {line}"


def figures(vector: np.ndarray) -> list[float]:
    """A few numbers that any change of a vector changes, and rounding does not."""
    places = np.arange(vector.size)
    return [float(np.linalg.norm(vector)), *(float(vector @ np.cos(step * places)) for step in (0.1, 0.7, 2.0))]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method(name: str, short_task: Callable[..., Any], tmp_path: Path) -> None:
    task = short_task(
        method={"name": name, "learning_rate": 0.01, "local_epochs": 3 if name in LAYERED else 1},
        privacy={"noise_multiplier": 0.0 if name == "fedavg" else 0.1, "clip_norm": 1.0},
        data={"devices": 3, "limit": 90, "min_samples": 10},
        round={"rounds": 2, "min_updates": 3},
        wire={"codec": "float32"},
    )
    simulation = begin(task, tmp_path / "run", data_dir=None)
    with Workers(1) as pool, EventLog(simulation.folder.events) as events:
        run_rounds(simulation, pool, events, runtime="onnx")
    layout = simulation.prepared.spec.model.layout
    values = figures(Checkpoints(simulation.folder.aggregator, layout, durable=False).read(2))
    for device in simulation.took_part:
        with store_of(simulation.folder, device) as store:
            own = store.load_state(simulation.prepared.spec.task).own
        values += [] if isinstance(own, NotKept) else figures(own)
    check(f"method {name}", METHODS[name].epoch, values)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss(name: str) -> None:
    rng, loss = np.random.default_rng(0), LOSSES[name]
    outputs = rng.normal(size=(6, 4))
    losses, slopes = loss.losses_and_slopes(outputs, loss.random(6, 4, rng))
    check(f"loss {name}", loss.epoch, [*losses, *slopes[:, 0]], atol=1e-4)


def test_the_personalized_head() -> None:
    """Two devices of digits with few and with more images, at a weak and at a strong shared head."""
    digits, values = load("digits").train, list[float]()
    layout = ParamLayout((WEIGHT, PRIOR), ((10, 64), (10,)))
    for seed, (count, signal) in enumerate(((20, 9.0), (60, 30.0), (20, None))):
        rng = np.random.default_rng(seed)
        samples = digits.take(rng.choice(len(digits), count, replace=False))
        pixels = samples.x.reshape(count, 64, 1, 1)
        features = FeatureSamples(pixels / np.linalg.norm(pixels, axis=1, keepdims=True), samples.labels)
        shared = rng.normal(size=layout.size).astype(np.float32)
        head = personalized_head.personalized_head_of(shared, layout, features, signal)
        values += figures(head.params)
    check("own head", personalized_head.EPOCH, values)


def test_a_cell_of_older_code_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, it does not count as finished, and what does not depend on the code stays finished."""
    kept, cell = Kept(PUBLISHED), cell_named("equal-privacy/table-1/own-local/ditto/eps-2/seed0")
    other = cell_named("equal-privacy/table-1/own-local/dp-fedavg/eps-2/seed0")
    for each in (cell, other):
        older = kept.shown(each)
        assert older
        kept.add(replace(older, digest=each.digest, epochs=each.epochs))
    assert kept.of(cell)
    assert not kept.stale(cell)
    monkeypatch.setattr("hushfleet.simulator.studies.reproduce.cells.METHODS", OneNewer("ditto"))
    cell, other = (cell_named(each.key) for each in (cell, other))
    assert not kept.of(cell)
    assert kept.stale(cell)
    assert kept.of(other)
    assert to_run([cell, other], kept, {}) == [cell]
