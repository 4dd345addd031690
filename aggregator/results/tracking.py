"""Reads a run's figures by round from its event log, during the run or afterwards, for TensorBoard, MLflow and
Weights & Biases.

It runs outside the aggregator's process, so a tracking server that hangs delays no round.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from hushfleet.aggregator.results.events import EventTail
from hushfleet.aggregator.results.fleet_state import RunState
from hushfleet.errors import BadInput

_LOOK_EVERY_S = 1.0
_OF_ROUND = {
    "accuracy_global": "accuracy/global",
    "loss": "loss",
    "participants": "round/devices",
    "wall_s": "round/seconds",
    "uplink_bytes": "bytes/up",
    "downlink_bytes": "bytes/down",
    "snr_db": "privacy/snr_db",
}
_OF_DEVICES = {"accuracy_own_common": "accuracy/own_common_test", "accuracy_own_local": "accuracy/own_data"}


class TrackedFigures(NamedTuple):
    """The figures of one closed round. `at` is in unix seconds; `values` omits infinite and missing ones."""

    round: int
    at: float
    values: dict[str, float]


class Sink(Protocol):
    """A destination of figures."""

    def write(self, figures: TrackedFigures) -> None: ...

    def close(self) -> None: ...


def figures_of(run: Path, *, follow: bool = False) -> Iterator[TrackedFigures]:
    """Yields the figures of closed rounds.

    :param run: the run folder of a simulation or an aggregator, with `events.jsonl`.
    :param follow: whether to wait for more until the run's last round has closed.

    Raises `BadInput`.
    """
    found = [path for path in (run / "aggregator" / "events.jsonl", run / "events.jsonl") if path.exists()]
    if not found:
        raise BadInput(f"{run} is not a run folder: it has neither aggregator/events.jsonl nor events.jsonl")
    log, state, metrics = EventTail(found[0]), RunState(), _OwnMetrics(run / "devices")
    while True:
        for event in log.read():
            state.apply(event)
            if event.get("event") == "update" and event.get("code") == "accepted":
                metrics.answered(str(event.get("device")))
            elif event.get("event") == "round_close":
                yield _figures(event, state, metrics.means(state.rounds_closed))
        if not follow or state.finished or state.rounds_closed >= state.rounds > 0:
            return
        time.sleep(_LOOK_EVERY_S)


def _figures(event: Mapping[str, Any], state: RunState, own: Mapping[str, float]) -> TrackedFigures:
    values = {name: event.get(key) for key, name in _OF_ROUND.items()}
    values |= {**own, "privacy/epsilon_server": state.epsilon_server, "privacy/epsilon_release": state.epsilon_release}
    known = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    return TrackedFigures(state.rounds_closed, float(event["at"]), known)


class _OwnMetrics:
    """The measurements that simulated devices make of themselves; devices in the field make none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, EventTail] = {}
        self._answered: set[str] = set()
        self._lines: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)

    def answered(self, device: str) -> None:
        self._answered.add(device)

    def means(self, round: int) -> dict[str, float]:
        """Returns the means over devices that answered since the last call. A device may be rounds ahead of the log."""
        for device in sorted(self._answered):
            tail = self._tails.setdefault(device, EventTail(self._folder / device / "metrics.jsonl"))
            for line in tail.read():
                self._lines[line.get("round", 0)].append(line)
        self._answered.clear()
        lines = self._lines.pop(round, [])
        found = {name: [line[key] for line in lines if line.get(key) is not None] for key, name in _OF_DEVICES.items()}
        return {name: fmean(values) for name, values in found.items() if values}


class TensorBoard:
    """Event files in a folder.

    Raises `BadInput` if the package is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise _missing("tensorboard", error) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, figures: TrackedFigures) -> None:
        for name, value in figures.values.items():
            self._writer.add_scalar(name, value, figures.round, walltime=figures.at)

    def close(self) -> None:
        self._writer.close()


class Mlflow:
    """A run on the tracking server that MLFLOW_TRACKING_URI names.

    :param experiment: created if there is none with this name.

    Raises `BadInput` if the package is missing, or the server cannot be used.
    """

    def __init__(self, experiment: str, run: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else its import reports the use to its authors
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
        except ModuleNotFoundError as error:
            raise _missing("mlflow", error) from error
        self._metric = Metric
        try:
            self._client = MlflowClient()
            known = self._client.get_experiment_by_name(experiment)
            place = self._client.create_experiment(experiment) if known is None else known.experiment_id
            self._run = self._client.create_run(place, run_name=run).info.run_id
        except MlflowException as error:
            raise BadInput(f"MLflow cannot be used; set MLFLOW_TRACKING_URI to a server's address: {error}") from error

    def write(self, figures: TrackedFigures) -> None:
        at_ms = int(1000 * figures.at)
        rows = [self._metric(name, value, at_ms, figures.round) for name, value in figures.values.items()]
        self._client.log_batch(self._run, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """A run of Weights & Biases: files in a folder, or sent immediately if WANDB_MODE is `online`.

    Only the figures are written: no code, no commit, no information about the machine.

    Raises `BadInput` if the package is missing, or the server cannot be used.
    """

    def __init__(self, project: str, run: str, folder: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else its faults are reported to its authors
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _missing("wandb", error) from error
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=run,
                dir=folder,
                mode=None if "WANDB_MODE" in os.environ else "offline",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    x_disable_machine_info=True,
                    x_disable_meta=True,
                    x_save_requirements=False,
                    x_disable_stats=True,
                ),
            )
        except (wandb.Error, ValueError) as error:
            raise BadInput(
                f"Weights & Biases cannot be used: {error}. Call `wandb login`, or leave WANDB_MODE out to write files"
            ) from error

    def write(self, figures: TrackedFigures) -> None:
        self._run.log({**figures.values, "_timestamp": figures.at}, step=figures.round)

    def close(self) -> None:
        self._run.finish()


def _missing(extra: str, error: ModuleNotFoundError) -> BadInput:
    return BadInput(f"the package {error.name!r} is not installed: pip install 'hushfleet[{extra}]'")
