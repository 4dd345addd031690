"""How long a cell takes on this machine, on one core.

Finished cells of the same network and method on the same processor say it best. Where there are none, a short trial of
the network's gradient says how many samples a second are trained on; what a method does beside its gradients (codec,
noise, Fisher information) is then not in it, so the recipe says how many gradients a sample takes (`passes`).
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.simulator.engines.fast.runtimes import make_gradient, quickest
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import KeptCell

_TRIAL_S = 0.5
_TESTS_PER_GRADIENT = 3.0  # a test is a forward pass: about a third of a gradient
SIZES = {
    "digits": (1437, 360),
    "mnist": (60_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "emnist": (124_800, 20_800),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "svhn": (73_257, 26_032),
}
"""Training and test images of each set, known without loading it."""


def expected_work(task: Task, *, evaluate_last: int) -> tuple[float, float]:
    """Samples that are trained on, epochs counted, and images that models are tested on, in the whole run."""
    train, test = SIZES[task.data.name]
    devices, rounds = task.data.devices, task.round.rounds
    share, kept_back = min(train, task.data.limit or train) / devices, task.data.test_fraction
    own_test = share * kept_back if kept_back else test / devices
    share *= 1 - kept_back
    config = task.method.config()
    samples = config.local_epochs * share
    if config.local_steps:
        batch = task.privacy.sample_rate * share if task.privacy.sample_rate else config.batch_size
        samples = config.local_steps * min(batch, share)
    cohort = min(task.round.cohort_size or devices, devices)
    return rounds * cohort * samples, min(evaluate_last, rounds) * cohort * (test + own_test) + rounds * test


class Estimator:
    """Seconds of cells, on one core.

    :param finished: cells from which rates are taken.
    :param trial: samples a second by network and batch size, where there are none; default: `measured_rate`.
    """

    def __init__(self, finished: Iterable[KeptCell], *, trial: Callable[[str, int], float] | None = None) -> None:
        self._trial = trial or measured_rate
        here, rates = processor(), defaultdict[tuple[str, str, int], list[float]](list)
        for one in finished:
            if one.processor == here and one.seconds > 1:
                method = one.task["method"]
                kind = one.task["model"]["name"], method["name"], method.get("batch_size", 16)
                rates[kind].append((one.samples + one.tested / _TESTS_PER_GRADIENT) / one.seconds)
        self._rates = {kind: median(each) for kind, each in rates.items()}

    def seconds(self, cell: Cell) -> float | None:
        """None for a cell that cannot be run."""
        if cell.open or cell.data_set not in SIZES:
            return None
        task = cell.task()
        trained, tested = expected_work(task, evaluate_last=cell.evaluate_last)
        batch = task.method.config().batch_size
        known = self._rates.get((task.model.name, task.method.name, batch))
        passes = 1.0 if known else cell.row.passes
        return (trained * passes + tested / _TESTS_PER_GRADIENT) / (known or self._trial(task.model.name, batch))


@cache
def measured_rate(name: str, batch: int) -> float:
    """Samples a second of one core: half a second of gradients of random images."""
    model, runtime = get_model(name), quickest(name)
    gradient = make_gradient(runtime, name, model.classes, model.layout, export_graphs(model).gradient)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *model.input_shape)).astype(np.float32)
    y = rng.integers(0, model.classes, batch)
    masks = [np.ones((batch, *spec.shape), np.float32) for spec in model.dropout]
    params, out = model.init(0), np.empty(model.layout.size, np.float32)
    gradient(params, x, y, masks, out=out)  # loads, compiles, touches its memory
    # Time of the processor, not of the clock: whatever else the machine does now will not be there for ever.
    done, began = 0, time.process_time()
    while time.process_time() - began < _TRIAL_S:
        gradient(params, x, y, masks, out=out)
        done += batch
    return done / (time.process_time() - began)


@cache
def processor() -> str:
    """This machine's processor, by name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
