"""How long a cell takes on this machine: processor time of one core.

A short trial says how many samples a second the network's gradient takes; tests, noise and coding are counted beside
it by what they were measured to take. Finished cells of the same network, method and unit on the same processor then
say by how much such a sum is wrong (`Estimator`), by the trial before them: a machine of the same name may be twice as
quick on another day. Where there are none, the recipe says how many gradients a sample takes (`passes`).
"""

from __future__ import annotations

import copy
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.errors import BadInput
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.simulator.engines.fast.runtimes import make_gradient, quickest
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import KeptCell

_TRIAL_S = 0.5
# Measured with compiled kernels on one core: `cifar10-cnn` in batches of 16, `mnist-cnn` with 1,000 devices.
_TESTS_PER_GRADIENT = 2.5  # a test is a forward pass
_UPDATE_S = 60e-9  # clipping, noise, coding, storing, decoding and adding, for each parameter of an update
_NOISED_STEP_S = 8e-9  # the noise of a step of DP-SGD, for each parameter
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
CLASSES = 10


def expected_work(cell: Cell) -> tuple[float, float]:
    """Samples that are trained on, epochs counted, and images that models are tested on, in the whole run."""
    task, last = cell.task(), min(cell.evaluate_last, cell.rounds)
    (share, own_test), test = _own_images(task), SIZES[task.data.name][1]
    devices, rounds = task.data.devices, task.round.rounds
    config = task.method.config()
    samples = config.local_epochs * share
    if config.local_steps:
        batch = task.privacy.sample_rate * share if task.privacy.sample_rate else config.batch_size
        samples = config.local_steps * min(batch, share)
    if cell.row.alone:
        return rounds * devices * samples, devices * (test + own_test)
    cohort = _cohort(task)
    tested = last * cohort * (test + own_test) + rounds * test
    if cell.metric == "accuracy_next_local":  # all devices, each on the images of its own classes
        tested += last * devices * test * (task.data.classes_per_device or CLASSES) / CLASSES
    return rounds * cohort * samples, tested


def _own_images(task: Task) -> tuple[float, float]:
    """Of a device, for training and for tests."""
    train, test = SIZES[task.data.name]
    share, kept_back = min(train, task.data.limit or train) / task.data.devices, task.data.test_fraction
    return share * (1 - kept_back), share * kept_back or test / task.data.devices


def _cohort(task: Task) -> int:
    return min(task.round.cohort_size or task.data.devices, task.data.devices)


def _tests_of_own(task: Task) -> int:
    """How often in a round all of a device's training images are tested: for a teacher, and for a report."""
    parts = task.parts()
    parts = parts.by_record() if task.privacy.unit == "record" else parts
    return (parts.training.distillation is not None) + parts.evaluates


@dataclass(frozen=True)
class _Finished:
    """A finished cell's own seconds, and what its sum needs."""

    one: KeptCell
    task: Task


class Estimator:
    """Seconds of cells, on one core.

    :param finished: cells whose times correct the sums.
    :param trial: samples a second by network and batch size; default: `measured_rate`.
    """

    def __init__(self, finished: Iterable[KeptCell], *, trial: Callable[[str, int], float] | None = None) -> None:
        self._trial = trial or measured_rate
        self._finished = defaultdict[_Kind, list[_Finished]](list)
        for one in finished:
            if one.processor == processor() and one.seconds > 1:
                with suppress(BadInput):  # of another version
                    task = parse_task(copy.deepcopy(one.task), where=one.cell)
                    self._finished[_kind(task, alone=one.rounds == 0)].append(_Finished(one, task))

    def seconds(self, cell: Cell) -> float | None:
        """None for a cell that cannot be run."""
        if cell.open or cell.data_set not in SIZES:
            return None
        task = cell.task()
        work = expected_work(cell)
        known = self._finished.get(_kind(task, alone=cell.row.alone), [])
        if timed := _most_alike(cell.plain, [each for each in known if each.one.rate is not None]):
            return median(map(self._wrong, timed)) * self._sum(task, *work)
        if known:  # the least: what else the machine did at the time can only have added
            return min(map(self._wrong, known)) * self._sum(task, *work)
        return self._sum(task, *work, passes=cell.row.passes)

    def rate(self, task: Task) -> float:
        """Samples a second of the task's gradient, now."""
        return self._trial(task.model.name, task.method.config().batch_size)

    def _wrong(self, known: _Finished) -> float:
        one = known.one
        return one.seconds / self._sum(known.task, one.samples, one.tested, rate=one.rate)

    def _sum(
        self, task: Task, trained: float, tested: float, *, passes: float = 1.0, rate: float | None = None
    ) -> float:
        batch = task.method.config().batch_size
        size = get_model(task.model.name).layout.size
        updates = task.round.rounds * _cohort(task)
        tested += updates * _tests_of_own(task) * _own_images(task)[0]
        noised = trained / batch * _NOISED_STEP_S if task.privacy.unit == "record" else 0.0
        gradients = trained * passes + tested / _TESTS_PER_GRADIENT
        return gradients / (rate or self.rate(task)) + size * (updates * _UPDATE_S + noised)


_Kind = tuple[str, str, str, bool]


def _kind(task: Task, *, alone: bool) -> _Kind:
    return task.model.name, task.method.name, task.privacy.unit, alone


def _most_alike(plain: dict[str, Any], known: Sequence[_Finished]) -> list[_Finished]:
    """A setting may leave out what takes most of the time, such as PerFreezeClip's clipping of each sample."""
    own = plain["method"]

    def differing(each: _Finished) -> int:
        its = each.one.task["method"]
        return sum(own.get(key) != its.get(key) for key in own.keys() | its.keys())

    least = min(map(differing, known), default=0)
    return [each for each in known if differing(each) == least]


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
