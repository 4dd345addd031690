"""What members that lie do to the global model, with each defence, and what the defences cost when nobody lies.

    python -m benchmarks.liars [--rounds N] [--kept FILE] [--json FILE] [--plot FILE.png]

A hundred devices share the digits (14 images each) and train `digits-cnn` by DP-FedAvg: clipped updates without noise,
or with each device's hundredth of the noise variance (`as-published`, multiplier 1). None, one or ten of them lie:

- `flip`: against their own honest update;
- `scaled`: along their own honest update of a model that they want (trained on labels that are all off by one);
- `targeted`: so that sevens are seen as ones, by an update that was trained on nothing else.

All liars of a run share their direction. Without the norm test they send a hundred clip norms of it; with the test they
know it and send as much as it lets through: a clip norm, or with noise the noise's norm, spread so that no value is
larger than a value of noise may be. Aggregation is `RoundEngine`'s, verification its `Inbox`'s; only training is done
for all devices at once. Every cell is run with the same seed, and kept in --kept, so that an interrupted table goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.outputs import COLOURS, add_outputs, write_outputs
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.ingest.checks import Admitted, Inbox, VerifiedUpdate, row_of
from hushfleet.aggregator.ingest.decoding import Decoded
from hushfleet.aggregator.publish.prepare import PreparedTask, prepare
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.methods.state import RoundContext, RoundTerms
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.vmap.training import CohortTrainer, Member
from hushfleet.simulator.fleet import make_fleet
from hushfleet.training.draws import Inputs
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, encode_update

DEVICES = 100
CLIP_NORM, MULTIPLIER = 1.5, 1.0
CRUDE = 100.0  # clip norms
SOURCE, TARGET = 7, 1
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "trimmed-mean": {"aggregation": "trimmed-mean", "trim": 0.15},
    "median": {"aggregation": "median"},
}
Attack = Literal["none", "flip", "scaled", "targeted"]
GROUPS: tuple[tuple[int, Attack], ...] = (
    (10, "flip"),
    (10, "targeted"),
    (1, "flip"),
    (1, "targeted"),
    (10, "scaled"),
    (1, "scaled"),
)


@dataclass(frozen=True)
class Cell:
    """One run: `noise` and `tested` say whether updates are noised, and held to the norm test."""

    noise: bool
    attack: Attack
    liars: int
    tested: bool
    aggregation: str

    @property
    def name(self) -> str:
        return "-".join(str(each) for each in asdict(self).values())


@dataclass(frozen=True)
class Outcome:
    """:param accuracy: on the common test set; :param fooled: share of its sevens that are seen as ones.
    :param refused: updates of liars that were refused; :param close_s: median time to close a round.
    """

    accuracy: float
    fooled: float
    refused: int
    close_s: float


class Unheld(Inbox):
    """The checks without the one of norms."""

    def verify(self, admitted: Admitted, decoded: Decoded) -> VerifiedUpdate:
        return VerifiedUpdate(admitted, row_of(admitted, math.fsum(decoded.squares)), decoded)


def cells() -> list[Cell]:
    """What matters most comes first, for who stops early."""
    honest = [Cell(noise, "none", 0, True, aggregation) for noise in (False, True) for aggregation in AGGREGATIONS]
    return honest + [
        Cell(noise, attack, liars, tested, aggregation)
        for liars, attack in GROUPS
        for tested in (True, False)
        for noise in (False, True)
        for aggregation in AGGREGATIONS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kept", type=Path, help="finished cells are kept in this file, and not run again")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    console = Console()
    kept: dict[str, Any] = {}
    if options.kept is not None and options.kept.exists():
        kept = json.loads(options.kept.read_text())
    keys = {cell: f"{options.rounds}-{cell.name}" for cell in cells()}
    lab = Lab(options.rounds)
    try:
        for cell, key in keys.items():
            if key not in kept:
                kept[key] = asdict(lab.run(cell))
                if options.kept is not None:
                    options.kept.write_text(json.dumps(kept, indent=1))
                print(cell.name, kept[key], flush=True)
    except KeyboardInterrupt:
        console.print("stopped; what there is:")
    found = {cell: Outcome(**kept[key]) for cell, key in keys.items() if key in kept}
    for noise in (False, True):
        console.print(table(found, noise=noise))
    figures = [{**asdict(cell), **asdict(outcome)} for cell, outcome in found.items()]
    write_outputs(
        options,
        {"rounds": options.rounds, "devices": DEVICES, "parameters": lab.size, "cells": figures},
        title=f"{DEVICES} devices, digits, {options.rounds} rounds: accuracy with liars",
        draw=lambda figure: draw(figure, found),
        size=(11.0, 6.5),
    )


class Lab:
    """What all cells share: the data, the network and the devices' keys."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.prepared = {noise: prepare(self._task(noise, {}), run_id="liars") for noise in (False, True)}
        base = self.prepared[False]
        self.size = base.spec.model.layout.size
        self.devices = make_fleet(base.task, base.dataset).devices
        self.keys = {device.name: Identity.generate() for device in self.devices}
        self.train = {device.name: device.train.samples for device in self.devices}
        self.trainer = CohortTrainer(TorchGradient(base.model, objective=base.method.objective), "cpu")

    def _task(self, noise: bool, rules: dict[str, Any]) -> Any:
        return parse_task(
            {
                "name": "liars",
                "model": {"name": "digits-cnn"},
                "method": {
                    "name": "dp-fedavg",
                    "optimizer": "sgd",
                    "learning_rate": 0.5,
                    "batch_size": 16,
                    "local_epochs": 5,
                },
                "privacy": {"clip_norm": CLIP_NORM, "noise_multiplier": MULTIPLIER if noise else 0.0},
                "data": {"name": "digits", "devices": DEVICES, "test_fraction": 0.0},
                "round": {"rounds": self.rounds, **rules},
                "wire": {"codec": "float32"},
            }
        )

    def run(self, cell: Cell) -> Outcome:
        prepared = replace(self.prepared[cell.noise], task=self._task(cell.noise, AGGREGATIONS[cell.aggregation]))
        liars = {device.name for device in self.devices[: cell.liars]}
        refused, closing = 0, []
        with (
            tempfile.TemporaryDirectory(prefix="liars-") as folder,
            AggregatorStore(Path(folder), durable=False) as store,
        ):
            for name, key in self.keys.items():
                store.add_device(name, public_key=key.public_key)
            engine = RoundEngine(store, prepared)
            if not cell.tested:
                engine.inbox = Unheld(prepared.spec, prepared.method)
            while not engine.finished:
                plan = engine.open_round(self.keys)
                for index, (name, change) in enumerate(self._changes(prepared, plan, engine.global_params)):
                    if not np.isfinite(change).all():
                        continue  # the model is destroyed: training diverges, and a device declines
                    lie = self._lie(cell, prepared, plan, engine.global_params) if name in liars else None
                    verdict = engine.accept(name, self._signed(prepared, plan, name, index, change, lie))
                    if not verdict.acknowledged and name not in liars:
                        raise SystemExit(f"{name} was refused: {verdict.reason}")
                    refused += not verdict.acknowledged
                began = time.perf_counter()
                engine.close()
                closing.append(time.perf_counter() - began)
            return self._judged(prepared, engine.global_params, refused, float(np.median(closing)))

    def _changes(
        self, prepared: PreparedTask, plan: RoundPlan, params: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        state = prepared.method.init_state()
        rngs = [np.random.default_rng((plan.round, index)) for index in range(len(self.devices))]
        members = [
            Member(state, self.train[device.name], rng) for device, rng in zip(self.devices, rngs, strict=True)
        ]
        trained = self.trainer.train(prepared.method, members, params, inputs=Inputs((), "none"))
        for device, result in zip(self.devices, trained, strict=True):
            yield device.name, result.update

    def _lie(self, cell: Cell, prepared: PreparedTask, plan: RoundPlan, params: np.ndarray) -> np.ndarray:
        """The values that all liars of a round send."""
        if self._lied_in == (cell, plan.round):
            return self._lied
        everything = prepared.dataset.train
        samples = everything.take(np.concatenate([device.train.indices for device in self.devices[: cell.liars]]))
        if cell.attack == "scaled":
            samples = replace(samples, labels=(samples.labels + 1) % 10)
        elif cell.attack == "targeted":
            sevens = everything.take(np.flatnonzero(everything.labels == SOURCE)[:50])
            samples = replace(sevens, labels=np.full_like(sevens.labels, TARGET))
        member = Member(prepared.method.init_state(), samples, np.random.default_rng((plan.round, 7)))
        (trained,) = self.trainer.train(prepared.method, [member], params, inputs=Inputs((), "none"))
        direction = np.nan_to_num(trained.update.astype(np.float64))
        direction *= (-1.0 if cell.attack == "flip" else 1.0) / max(float(np.linalg.norm(direction)), 1e-12)
        self._lied_in, self._lied = (cell, plan.round), self._loud(cell, direction)
        return self._lied

    _lied_in: Any = None

    def _loud(self, cell: Cell, direction: np.ndarray) -> np.ndarray:
        """As much of a direction of norm 1 as the test lets through; a hundred clip norms where there is none."""
        if not cell.tested:
            return (CRUDE * CLIP_NORM * direction).astype(np.float32)
        if not cell.noise:
            return (0.999 * CLIP_NORM * direction).astype(np.float32)
        layout = self.prepared[True].spec.model.layout
        std, values = CLIP_NORM * MULTIPLIER / math.sqrt(DEVICES), np.empty(len(direction))
        for layer in layout.layers:
            part = direction[layer.start : layer.stop]
            values[layer.start : layer.stop] = _spread(part, norm=std * math.sqrt(layer.size), most=6 * std)
        return values.astype(np.float32)

    def _signed(
        self,
        prepared: PreparedTask,
        plan: RoundPlan,
        name: str,
        index: int,
        change: np.ndarray,
        lie: np.ndarray | None,
    ) -> bytes:
        terms = RoundTerms(plan.noise_split, plan.controls)
        state = prepared.method.init_state()
        context = RoundContext(prepared.method.setting(terms), state, 0 * change, 0 * change)
        release = prepared.method.release(context, change, SeededNoise(1, index, plan.round))
        layout = prepared.spec.model.layout
        header = UpdateHeader(
            task=plan.task,
            round=plan.round,
            device=name,
            codec="float32",
            value_count=layout.size,
            steps=(),
            noise_stds=tuple(release.noise_stds),
            clip_norms=tuple(release.clip_norms),
            public_digest=plan.cohort[name],
            rounds_charged=plan.round,
            epsilon_server=math.inf,
            multiplier_server=release.charge.noise_multiplier,
            noise_split=release.charge.noise_split,
        )
        counts = [layer.size for layer in layout.layers]
        values = release.values if lie is None else lie
        return encode_update(header, values, counts=counts, identity=self.keys[name]).data

    def _judged(self, prepared: PreparedTask, params: np.ndarray, refused: int, close_s: float) -> Outcome:
        test = prepared.dataset.test
        seen = np.argmax(prepared.inference(params, test.x), axis=1)
        fooled = float(np.mean(seen[test.labels == SOURCE] == TARGET))
        return Outcome(float(np.mean(seen == test.labels)), fooled, refused, close_s)


def _spread(part: np.ndarray, *, norm: float, most: float) -> np.ndarray:
    """`part` scaled to the norm, with no value above `most`: what is cut off makes the others larger."""
    low, high = 0.0, 1e9
    for _ in range(100):
        scale = (low + high) / 2
        if np.linalg.norm(np.clip(scale * part, -most, most)) < norm:
            low = scale
        else:
            high = scale
    return np.clip(low * part, -most, most)


def table(found: dict[Cell, Outcome], *, noise: bool) -> Table:
    """A row an attack; accuracy in each column, and for `targeted` the share of sevens seen as ones."""
    title = "with noise" if noise else "without noise"
    shown = Table(title=f"Accuracy %, {title}; targeted: accuracy / sevens seen as ones %")
    shown.add_column("liars")
    shown.add_column("norm test")
    for aggregation in AGGREGATIONS:
        shown.add_column(aggregation, justify="right")
    for liars, attack in ((0, "none"), *GROUPS):
        for tested in (True, False):
            row = [found.get(Cell(noise, attack, liars, tested, aggregation)) for aggregation in AGGREGATIONS]
            if any(row):
                texts = (_shown(outcome, attack) for outcome in row)
                shown.add_row(f"{liars} {attack}" if liars else "none", "on" if tested else "off", *texts)
    return shown


def _shown(outcome: Outcome | None, attack: Attack) -> str:
    if outcome is None:
        return "-"
    accuracy = f"{100 * outcome.accuracy:.1f}"
    return f"{accuracy} / {100 * outcome.fooled:.0f}" if attack == "targeted" else accuracy


def draw(figure: Any, found: dict[Cell, Outcome]) -> None:
    axes = figure.subplots(2, 2, sharey=True)
    colours = dict(zip(AGGREGATIONS, (COLOURS["other"], COLOURS["second"], COLOURS["ours"]), strict=True))
    for row, noise in enumerate((False, True)):
        for column, tested in enumerate((False, True)):
            axis = axes[row][column]
            groups = [("none", 0)] + [(attack, n) for n, attack in sorted(GROUPS)]
            for offset, aggregation in enumerate(AGGREGATIONS):
                wanted = [Cell(noise, attack, n, tested or not n, aggregation) for attack, n in groups]
                heights = [100 * found[cell].accuracy if cell in found else 0.0 for cell in wanted]
                places = np.arange(len(groups)) + (offset - 1) * 0.27
                axis.bar(places, heights, 0.25, color=colours[aggregation], label=aggregation)
            axis.set_xticks(range(len(groups)), [f"{n} {a}" if n else a for a, n in groups], fontsize=8, rotation=20)
            axis.set_title(
                f"{'noise' if noise else 'no noise'}, norm test {'on' if tested else 'off'}", fontsize=10
            )
            axis.set_ylim(0, 100)
            axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("accuracy, %")
    axes[1][0].set_ylabel("accuracy, %")
    axes[0][1].legend(fontsize=8, ncols=3, loc="upper right")


if __name__ == "__main__":
    main()
