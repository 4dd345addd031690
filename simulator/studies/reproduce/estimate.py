"""How long a cell takes on this machine, on one core.

Finished cells of the same network and method on the same processor say it best. Where there are none, a short trial of
the network's gradient says how many samples a second are trained on; what a method does beside its gradients (codec,
noise, Fisher information) is then not in it, so the recipe says how many gradients a sample takes (`passes`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from functools import cache
from statistics import median

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.result import write_whole
from hushfleet.data.download import user_cache_dir
from hushfleet.errors import StoreError
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.simulator.engines.fast.runtimes import make_gradient
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import KeptCell
from hushfleet.simulator.studies.reproduce.run_cell import best_runtime, processor
from hushfleet.simulator.studies.reproduce.work import work_of

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
    """Samples trained on and images tested, as `work_of`, without loading the data."""
    train, test = SIZES[task.data.name]
    share = min(train, task.data.limit or train) / task.data.devices
    kept_back = task.data.test_fraction
    own = share * kept_back if kept_back else test / task.data.devices
    return work_of(task, train=share * (1 - kept_back), test=test, own=own, evaluate_last=evaluate_last)


class Estimator:
    """:param finished: cells from which rates are taken.
    :param trial: samples a second by network and batch size, where there are none.
    """

    def __init__(
        self, finished: Iterable[KeptCell], *, trial: Callable[[str, int], float] | None = None
    ) -> None:
        self._trial = trial or measured_rate
        here = processor()
        rates: dict[tuple[str, str, int], list[float]] = {}
        for one in finished:
            work = one.samples + one.tested / _TESTS_PER_GRADIENT
            if one.processor == here and one.seconds > 1:
                method = one.task["method"]
                rates.setdefault((one.task["model"]["name"], method["name"], method.get("batch_size", 16)), []).append(
                    work / one.seconds
                )
        self._rates = {key: median(each) for key, each in rates.items()}

    def seconds(self, cell: Cell) -> float | None:
        """On one core; None for a cell that cannot be run."""
        if cell.open or cell.plain["data"]["name"] not in SIZES:
            return None
        task = cell.task()
        trained, tested = expected_work(task, evaluate_last=cell.evaluate_last)
        batch = task.method.config().batch_size
        known = self._rates.get((task.model.name, task.method.name, batch))
        if known:
            return (trained + tested / _TESTS_PER_GRADIENT) / known
        rate = self._trial(task.model.name, batch)
        return (trained * cell.row.passes + tested / _TESTS_PER_GRADIENT) / rate


@cache
def measured_rate(model: str, batch: int) -> float:
    """Samples a second of one core: half a second of gradients of random images, kept in the user's cache folder."""
    path = user_cache_dir() / "reproduce-rates.json"
    runtime = best_runtime(model)
    key = f"{processor()}; {model}; {runtime}; {batch}"
    try:
        rates = json.loads(path.read_text())
    except (OSError, ValueError):
        rates = {}
    if key not in rates:
        rates[key] = _measure(model, batch, runtime)
        with contextlib.suppress(StoreError):  # it is measured again next time
            write_whole(path, json.dumps(rates, indent=1))
    return float(rates[key])


def _measure(name: str, batch: int, runtime: str) -> float:
    model = get_model(name)
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
