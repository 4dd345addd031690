"""Writes a run's figures by round, from its event log, for TensorBoard, MLflow and Weights & Biases.

It runs outside the aggregator's process, so a tracking server that hangs delays no round.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from hushfleet.aggregator.results.device_metrics import DeviceMetrics
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
Tracker = Literal["tensorboard", "mlflow", "wandb"]
_PROJECT = "hushfleet"


class TrackedFigures(NamedTuple):
    """The figures of one closed round. `at` is in unix seconds; `values` omits infinite and missing ones."""

    round: int
    at: float
    values: dict[str, float]


Write = Callable[[TrackedFigures], Any]


def figures_of(run: Path, *, follow: bool = False) -> Iterator[TrackedFigures]:
    """Yields the figures of closed rounds.

    :param run: the run folder of a simulation or an aggregator, with `events.jsonl`.
    :param follow: whether to wait for more until the run's last round has closed.

    Raises `BadInput`.
    """
    found = [path for path in (run / "aggregator" / "events.jsonl", run / "events.jsonl") if path.exists()]
    if not found:
        raise BadInput(f"{run} is not a run folder: it has neither aggregator/events.jsonl nor events.jsonl")
    log, state, metrics = EventTail(found[0]), RunState(), DeviceMetrics(run / "devices")
    while True:
        for event in log.read():
            state.apply(event)
            if event.get("event") == "update" and event.get("code") == "accepted":
                metrics.read(str(event.get("device")))
            elif event.get("event") == "round_close":
                yield _figures(event, state, [line for _, line in metrics.until(state.rounds_closed)])
        if not follow or state.finished or state.rounds_closed >= state.rounds > 0:
            return
        time.sleep(_LOOK_EVERY_S)


def _figures(event: Mapping[str, Any], state: RunState, own: list[dict[str, Any]]) -> TrackedFigures:
    """:param own: what simulated devices have measured about themselves; devices in the field measure nothing."""
    values = {name: event.get(key) for key, name in _OF_ROUND.items()}
    for key, name in _OF_DEVICES.items():
        measured = [line[key] for line in own if line["round"] == state.rounds_closed and line.get(key) is not None]
        values[name] = fmean(measured) if measured else None
    values |= {"privacy/epsilon_server": state.epsilon_server, "privacy/epsilon_release": state.epsilon_release}
    known = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    return TrackedFigures(state.rounds_closed, float(event["at"]), known)


@contextmanager
def tracker(to: Tracker, run: str, folder: Path) -> Iterator[tuple[Write, str]]:
    """A context manager that gives a function to write figures, and where to see them.

    MLflow writes to the server of MLFLOW_TRACKING_URI, the others into `folder`. Raises `BadInput` if the package is
    missing, or the server cannot be used.

    :param run: its name.
    """
    try:
        with {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[to](run, folder) as found:
            yield found
    except ModuleNotFoundError as error:
        raise BadInput(f"the package {error.name!r} is not installed: pip install 'hushfleet[{to}]'") from error


@contextmanager
def _tensorboard(run: str, folder: Path) -> Iterator[tuple[Write, str]]:
    from torch.utils.tensorboard import SummaryWriter

    def write(figures: TrackedFigures) -> None:
        for name, value in figures.values.items():
            writer.add_scalar(name, value, figures.round, walltime=figures.at)

    with SummaryWriter(str(folder)) as writer:
        yield write, f"see: tensorboard --logdir {shlex.quote(str(folder))}"


@contextmanager
def _mlflow(run: str, folder: Path) -> Iterator[tuple[Write, str]]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else its import reports the use to its authors
    import mlflow

    try:
        mlflow.set_experiment(_PROJECT)
        started = mlflow.start_run(run_name=run, log_system_metrics=False)
    except mlflow.exceptions.MlflowException as error:
        raise BadInput(f"MLflow cannot be used; set MLFLOW_TRACKING_URI to a server's address: {error}") from error
    with started:
        yield (
            lambda figures: mlflow.log_metrics(figures.values, figures.round, timestamp=int(1000 * figures.at)),
            f"experiment {_PROJECT}",
        )


@contextmanager
def _wandb(run: str, folder: Path) -> Iterator[tuple[Write, str]]:
    """Writes only the figures: no code, no commit, no information about the machine."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else its faults are reported to its authors
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    on: dict[str, Any] = dict.fromkeys(
        ("silent", "disable_code", "disable_git", "x_disable_machine_info", "x_disable_meta", "x_disable_stats"), True
    )
    mode: Any = None if "WANDB_MODE" in os.environ else "offline"
    try:
        settings = wandb.Settings(console="off", x_save_requirements=False, **on)
        started = wandb.init(project=_PROJECT, name=run, dir=folder, mode=mode, settings=settings)
    except (wandb.Error, ValueError) as error:
        raise BadInput(
            f"Weights & Biases cannot be used: {error}. Call `wandb login`, or leave WANDB_MODE out to write files"
        ) from error
    with started:
        yield (
            lambda figures: started.log({**figures.values, "_timestamp": figures.at}, step=figures.round),
            f"project {_PROJECT}; upload: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*",
        )
