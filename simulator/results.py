"""Assembles the whole `result.json` of a simulation: the aggregator's record, and data that only a simulation has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np

from hushfleet.aggregator.results.device_metrics import read_all_metrics
from hushfleet.aggregator.results.record import record
from hushfleet.aggregator.results.result import LocalOnly, PersonalizedHead, Result, last_measured
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.engines.fast.local_only import DeviceLocalOnly
from hushfleet.simulator.run_folder import Simulation

Metrics = dict[int, dict[str, Any]]


def assemble(
    simulation: Simulation,
    *,
    engine: str,
    local_only_models: Sequence[DeviceLocalOnly] = (),
    runtime: str = "",
) -> Result:
    """Returns the result of the closed rounds.

    :param local_only_models: the local-only baseline, in the fleet's order; may be empty.
    :param runtime: runtime that computed the gradients.
    """
    with AggregatorStore(simulation.folder.aggregator) as store:
        base = record(
            store,
            simulation.prepared,
            engine=engine,
            seed=simulation.seed,
            fleet=[device.name for device in simulation.fleet.devices],
            runtime=runtime,
            sums=SumFacts("simulation"),
        )
    fleet = simulation.fleet.devices
    by_name = {device.name: device for device in fleet}
    metrics = metrics_by_device(simulation)
    names = base.details.devices
    rounds = [row.round for row in base.rounds]
    counts, chance = simulation.fleet.label_counts, simulation.fleet.chance
    dataset, section = simulation.prepared.dataset, simulation.prepared.task.data
    given = dataset.device_names if dataset is not None and section.partition == "given" else ()
    details = base.details.but(
        device_names=[given[by_name[name].index] for name in names] if given else [],
        personal_share=_means_by_layer(metrics, rounds, "personal_share", len(base.model.layers)),
        clip_weights=_means_by_layer(metrics, rounds, "clip_weights", len(base.model.layers)),
        label_counts=[] if counts is None else [counts[by_name[name].index].tolist() for name in names],
        chance=None if chance is None else list(chance),
        own_heads=_personalized_heads(metrics, names, rounds[-1] if rounds else 0),
        common_test_images=len(simulation.fleet.common_test),
        local_test_images=[len(by_name[name].local_test) for name in names],
    )
    full = base.but(details=details, boards={device.name: device.board for device in fleet})
    return with_baseline(Result.of(with_own(full, metrics)), local_only_models)


def with_own(result: Result, metrics: Mapping[str, Metrics]) -> Result:
    """Adds what devices have measured of their personalized models.

    :param metrics: their lines, by device and round.
    """
    names, rounds = result.details.devices, [row.round for row in result.rounds]

    def grid(key: str) -> list[list[Any]]:
        return [[metrics[name].get(round, {}).get(key) for name in names] for round in rounds]

    common, local, lines = grid("accuracy_own_common"), grid("accuracy_own_local"), grid("metrics_own")
    named = dict.fromkeys(key for row in lines for line in row for key in line or ())
    own = {key: [[(line or {}).get(key) for line in row] for row in lines] for key in named}
    last = {key: [last_measured(table, itemgetter(at)) for at in range(len(names))] for key, table in own.items()}
    rows = [
        row.but(
            accuracy_own_common=mean_of(common[i]),
            accuracy_own_local=mean_of(local[i]),
            metrics_own={name: mean_of(table[i]) for name, table in own.items()},
        )
        for i, row in enumerate(result.rounds)
    ]
    details = result.details.but(accuracy_own_common=common, accuracy_own_local=local, metrics_own=last)
    return result.but(rounds=rows, details=details)


def with_baseline(result: Result, local_only_models: Sequence[DeviceLocalOnly]) -> Result:
    """Adds the scores of devices that train alone, given in any order; without them, returns the result unchanged."""
    if not local_only_models:
        return result
    baseline = {one.device: one for one in local_only_models}
    rows = [
        (one.accuracy_common, one.accuracy_local) if (one := baseline.get(name)) else (None, None)
        for name in result.details.devices
    ]
    common, local = ([_measured(value) for value in each] for each in zip(*rows, strict=True))
    details = {"local_only_common": common, "local_only_local": local}
    local_only = LocalOnly(
        accuracy_own_common=mean_of(common), accuracy_own_local=mean_of(local), way=local_only_models[0].way
    )
    return result.but(local_only=local_only, details=result.details.but(**details))


def _measured(accuracy: float | None) -> float | None:
    """Returns None for NaN: a device may have no images, or no test images of its own."""
    return None if accuracy is None or math.isnan(accuracy) else accuracy


def read_metrics(simulation: Simulation, device: str) -> Metrics:
    """Returns a device's own metrics by round; if a round has several lines, later values count."""
    return metrics_by_device(simulation)[device]


def metrics_by_device(simulation: Simulation) -> dict[str, Metrics]:
    """Returns the devices' own metrics, by device and round."""
    return read_all_metrics(simulation.folder.devices, [device.name for device in simulation.fleet.devices])


def _personalized_heads(metrics: dict[str, Metrics], names: Sequence[str], last: int) -> list[PersonalizedHead | None]:
    """Returns the head that each device chose; empty if the model has no choice of heads."""
    chosen = [metrics[name].get(last, {}).get("own_head") for name in names]
    return [each and PersonalizedHead.of(each) for each in chosen] if any(chosen) else []


def mean_of(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None and not math.isnan(value)]
    return fmean(measured) if measured else None


def _means_by_layer(
    metrics: dict[str, Metrics], rounds: Sequence[int], key: str, layers: int
) -> list[list[float | None]]:
    """Returns means over the devices with this metric, `[round][layer]`; empty if the method does not have it."""
    table = []
    for round in rounds:
        rows = [m[round][key] for m in metrics.values() if round in m and m[round].get(key)]
        rows = [row for row in rows if None not in row]  # a clip norm of inf has no parts
        table.append(np.mean(rows, axis=0).tolist() if rows else [None] * layers)
    return table if any(value is not None for row in table for value in row) else []
