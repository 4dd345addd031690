"""Measures the damage by dishonest devices to the global model, with each defence, and the cost of the defences.

    python -m benchmarks.liars [--rounds N] [--kept FILE] [--json FILE]

A hundred devices share the digits (14 images each) and train `digits-cnn` by DP-FedAvg: clipped updates without noise,
or with each device's hundredth of the noise variance (`as-published`, multiplier 1). None, one or ten of them attack:

- `flip`: the direction opposite to the update from their own data;
- `scaled`: the direction of a wrong model (trained on labels that are all off by one);
- `targeted`: an update trained only to classify sevens as ones.

All attackers of a run use the same direction. With the norm test on, signed updates go through `RoundEngine.accept` and
its aggregation, and attackers send the largest update that the test accepts: one clip norm, or with noise the noise's
norm, spread so that no value is larger than the limit for noise. With the test off, they send a hundred clip norms, and
SciPy and NumPy do the aggregation. Training is plain PyTorch, so that a cell takes seconds. All cells have the same
seed, and are kept in --kept, so that an interrupted table continues.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import trim_mean
from torch.nn import functional as F

from benchmarks.common import Figures, console, make_parser, seconds_of, table, write
from benchmarks.updates import IDENTITY, train_update
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.publish.prepare import prepare
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.fleet import make_fleet
from hushfleet.wire.format.update import encode_update

DEVICES, CLIP_NORM, MULTIPLIER, TRIM = 100, 1.5, 1.0, 0.15
LOUD = 100.0  # clip norms that an attacker sends without a norm test
SOURCE, TARGET = 7, 1
LEARNING_RATE, BATCH, EPOCHS = 0.5, 16, 5
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "trimmed-mean": {"aggregation": "trimmed-mean", "trim": TRIM},
    "median": {"aggregation": "median"},
}
WITHOUT_TEST = {
    "mean": lambda updates: updates.mean(axis=0),
    "trimmed-mean": lambda updates: trim_mean(updates, TRIM, axis=0),
    "median": lambda updates: np.median(updates, axis=0),
}
GROUPS = ((10, "flip"), (10, "targeted"), (1, "flip"), (1, "targeted"), (10, "scaled"), (1, "scaled"))


@dataclass(frozen=True)
class LiarRun:
    """One run: `noise` and `tested` state whether updates are noised, and checked by the norm test."""

    noise: bool
    attack: str
    liars: int
    tested: bool
    aggregation: str

    @property
    def name(self) -> str:
        return "-".join(str(each) for each in asdict(self).values())


def cells() -> list[LiarRun]:
    """Yields the most important cells first, so that an early stop keeps them."""
    honest = [LiarRun(noise, "none", 0, True, aggregation) for noise in (False, True) for aggregation in AGGREGATIONS]
    return honest + [
        LiarRun(noise, attack, liars, tested, aggregation)
        for liars, attack in GROUPS
        for tested in (True, False)
        for noise in (False, True)
        for aggregation in AGGREGATIONS
    ]


class Lab:
    """The parts that all cells share: the data, the network, and a header as from the task's devices."""

    def __init__(self, *, rounds: int, devices: int) -> None:
        self.rounds, self.devices, self.headers = rounds, devices, {}
        for noise in (False, True):
            with tempfile.TemporaryDirectory(prefix="liars-") as folder:
                task = self.task(noise, "mean", rounds=1)
                simulation, update = train_update(task, Path(folder) / "run", data_dir=None)
            self.headers[noise] = update.header
        self.model, self.dataset = simulation.prepared.model, simulation.prepared.dataset
        self.data = [(each.train.samples.x, each.train.samples.y) for each in make_fleet(task, self.dataset).devices]
        self.layout, self.noise_std = self.model.layout, update.header.noise_stds[0]

    def task(self, noise: bool, aggregation: str, *, rounds: int) -> Task:
        training = {"optimizer": "sgd", "learning_rate": LEARNING_RATE, "batch_size": BATCH, "local_epochs": EPOCHS}
        return parse_task(
            {
                "name": "liars",
                "model": {"name": "digits-cnn"},
                "method": {"name": "dp-fedavg", **training},
                "privacy": {
                    "accounting": "as-published",
                    "clip_norm": CLIP_NORM,
                    "noise_multiplier": MULTIPLIER if noise else 0.0,
                },
                "data": {"name": "digits", "devices": self.devices, "test_fraction": 0.0},
                "round": {"rounds": rounds, **AGGREGATIONS[aggregation]},
                "wire": {"codec": "float32"},
            }
        )

    def run(self, cell: LiarRun) -> Figures:
        """Returns the accuracy on the common test set, the share of its sevens that are classified as ones, the number
        of refused updates of attackers, and the median time to close a round."""
        prepared = prepare(self.task(cell.noise, cell.aggregation, rounds=self.rounds), run_id="liars")
        names = [f"device-{index}" for index in range(self.devices)]
        counts = [layer.size for layer in self.layout.layers]
        refused, closing_s, params = 0, [], prepared.initial
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="liars-")))
            store = stack.enter_context(AggregatorStore(folder, durable=False))
            for name in names:
                store.add_device(name, public_key=IDENTITY.public_key)
            engine = RoundEngine(store, prepared)
            for number in range(1, self.rounds + 1):
                updates = self.updates(cell, params, number)
                if not cell.tested:
                    closing_s.append(seconds_of(partial(WITHOUT_TEST[cell.aggregation], updates)))
                    params = params + WITHOUT_TEST[cell.aggregation](updates).astype(np.float32)
                    continue
                plan = engine.open_round(names)
                for index, name in enumerate(names):
                    if not np.isfinite(updates[index]).all():
                        continue  # the model is destroyed: training diverges, and a device declines
                    changes = {"device": name, "public_digest": plan.cohort[name], "rounds_charged": number}
                    header = replace(self.headers[cell.noise], task=plan.task, round=number, **changes)
                    data = encode_update(header, updates[index], counts=counts, identity=IDENTITY).data
                    verdict = engine.accept(name, data)
                    if not verdict.acknowledged and index >= cell.liars:
                        raise SystemExit(f"{name} was refused: {verdict.reason}")
                    refused += not verdict.acknowledged
                closing_s.append(seconds_of(engine.close))
                params = engine.global_params
        test = self.dataset.test
        seen = np.argmax(prepared.inference(np.ascontiguousarray(params), test.x), axis=1)
        fooled = float(np.mean(seen[test.labels == SOURCE] == TARGET))
        about = {"accuracy": float(np.mean(seen == test.labels)), "fooled": fooled}
        return {**about, "refused": refused, "close_s": float(np.median(closing_s))}

    def updates(self, cell: LiarRun, params: np.ndarray, number: int) -> np.ndarray:
        """Returns float32 `[devices, d]`, the update of each device in a round; the attackers come first."""
        made = []
        for index, data in enumerate(self.data):
            update = self.trained(params, *data, seed=(number, index))
            update *= min(1.0, CLIP_NORM / max(float(np.linalg.norm(update)), 1e-12))
            noise = np.random.default_rng((number, index, 1)).normal(size=update.size)
            made.append(update + cell.noise * self.noise_std * noise)
        if cell.liars:
            made[: cell.liars] = [self.lie(cell, params, number)] * cell.liars
        return np.asarray(made, np.float32)

    def trained(self, params: np.ndarray, x: np.ndarray, y: np.ndarray, *, seed: tuple[int, int]) -> np.ndarray:
        """Returns the change `[d]` by local training in plain PyTorch."""
        order, start = np.random.default_rng(seed), torch.from_numpy(np.array(params))
        vector, images, labels = start.clone().requires_grad_(), torch.from_numpy(x), torch.from_numpy(y)
        for _ in range(EPOCHS):
            for rows in np.array_split(order.permutation(len(y)), math.ceil(len(y) / BATCH)):
                logits = self.model.forward(self.layout.unflatten(vector), images[rows], [])
                (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels[rows]), vector)
                with torch.no_grad():
                    vector -= LEARNING_RATE * gradient
        return (vector.detach() - start).numpy()

    def lie(self, cell: LiarRun, params: np.ndarray, number: int) -> np.ndarray:
        """Returns the update of all attackers of a round: as much of their direction as the test accepts."""
        x, y = (np.concatenate(parts) for parts in zip(*self.data[: cell.liars], strict=True))
        if cell.attack == "scaled":
            y = (y + 1) % 10
        elif cell.attack == "targeted":
            sevens = np.flatnonzero(self.dataset.train.labels == SOURCE)[:50]
            x, y = self.dataset.train.x[sevens], np.full(len(sevens), TARGET)
        direction = np.nan_to_num(self.trained(params, x, y, seed=(number, 1 << 20)).astype(np.float64))
        direction *= (-1.0 if cell.attack == "flip" else 1.0) / max(float(np.linalg.norm(direction)), 1e-12)
        if not cell.tested:
            return LOUD * CLIP_NORM * direction
        if not cell.noise:
            return 0.999 * CLIP_NORM * direction
        std = self.noise_std
        parts = (direction[layer.start : layer.stop] for layer in self.layout.layers)
        return np.concatenate([spread(part, norm=std * math.sqrt(part.size), most=6 * std) for part in parts])


def spread(part: np.ndarray, *, norm: float, most: float) -> np.ndarray:
    """Returns `part` scaled to the norm, with no value above `most`: clipping makes the other values larger."""
    low, high = 0.0, 1e9
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if np.linalg.norm(np.clip(scale * part, -most, most)) < norm else (low, scale)
    return np.clip(low * part, -most, most)


def show(figures: Figures) -> None:
    """Prints one row per attack: accuracy in each column, and for `targeted` the share of sevens classified as ones."""
    rows: dict[tuple[Any, ...], Figures] = {}
    for cell in figures["cells"]:
        place = cell["liars"], cell["attack"], cell["tested"]
        row = rows.setdefault(place, {"liars": f"{place[0]} {place[1]}", "norm test": "on" if place[2] else "off"})
        shown = f"{100 * cell['accuracy']:.1f}"
        shown += f" / {100 * cell['fooled']:.0f}" if cell["attack"] == "targeted" else ""
        row[f"{'noise' if cell['noise'] else 'no noise'}: {cell['aggregation']}"] = shown
    table("Accuracy %; targeted: accuracy / sevens seen as ones %", [rows[place] for place in sorted(rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--cells", type=int, help="only so many, the most telling first")
    parser.add_argument("--kept", type=Path, help="finished cells are kept in this file, and not run again")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept = json.loads(options.kept.read_text()) if options.kept and options.kept.exists() else {}
    lab, found = Lab(rounds=options.rounds, devices=options.devices), []
    for cell in cells()[: options.cells]:
        key = f"{options.rounds}-{options.devices}-{cell.name}"
        if key not in kept:
            kept[key] = lab.run(cell)
            console.print(cell.name, kept[key])
            if options.kept:
                options.kept.write_text(json.dumps(kept, indent=1))
        found.append({**asdict(cell), **kept[key]})
    figures = {"rounds": options.rounds, "devices": options.devices, "parameters": lab.layout.size, "cells": found}
    show(figures)
    write(options, figures)


if __name__ == "__main__":
    main()
