"""Loads metrics that a user has written: functions of a model's logits `[n, C]` and of labels `[n]`, for test sets.

A metric returns a number, or several as a dict or a list. FOR SIMULATION, and for the aggregator's public test set:
what a metric finds on a board's own samples would be private, and no mechanism charges it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hushfleet.errors import BadInput
from hushfleet.paths import OFFERED, is_offered
from hushfleet.user_files import from_file

Metric = Callable[[np.ndarray, np.ndarray], Any]
Metrics = Mapping[str, Metric]
"""Metrics by name."""

_GIVEN: dict[str, Metric] = {}


def offer(metrics: Any) -> list[str]:
    """Registers the metrics of a Python program in this process, and returns names for `model.metrics`.

    :param metrics: functions by name, or a list of functions and of names of files, `path/to/file.py:NAME`.
    """
    by_name = (
        metrics.items() if isinstance(metrics, Mapping) else [(getattr(one, "__name__", one), one) for one in metrics]
    )
    names = []
    for name, metric in by_name:
        names.append(metric if isinstance(metric, str) else f"{OFFERED}{name}")
        if not isinstance(metric, str):
            _GIVEN[names[-1]] = metric
    return names


def load(names: Iterable[str], *, taken: Sequence[str] = ()) -> dict[str, Metric]:
    """Returns the metrics that `model.metrics` names. Raises `BadInput`.

    :param taken: names of a run's own numbers, which no metric replaces.
    """
    found = dict[str, Metric]()
    for name in names:
        if is_offered(name) and name not in _GIVEN:
            raise BadInput(
                f"model.metrics = {name!r} is a metric of a Python program; go on from there, with "
                "hushfleet.simulate(task, metrics=..., out=..., resume=True)"
            )
        metric: Any = _GIVEN[name] if is_offered(name) else from_file(name, key="model.metrics")
        if not callable(metric):
            raise BadInput(f"model.metrics = {name!r}: must be a function of logits and labels")
        called = name.rpartition(":")[2]
        if called in taken:
            raise BadInput(
                f"model.metrics = {name!r}: a run has its own number of this name; the names {', '.join(taken)} are "
                f"taken, so call it 'my_{called}', for example"
            )
        found[called] = metric
    return found


def measured(metrics: Metrics, logits: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    """Returns the metrics' numbers by name: several numbers of one have names such as `recall.0`. What is not finite
    becomes None.

    Raises `BadInput` for a metric that fails or returns no numbers.
    """
    numbers = dict[str, float | None]()
    for name, metric in metrics.items():
        try:
            value = metric(logits, labels)
            if hasattr(value, "tolist"):  # of NumPy or PyTorch
                value = value.tolist()
            parts = (
                value.items()
                if isinstance(value, Mapping)
                else enumerate(value)
                if isinstance(value, list | tuple)
                else None
            )
            named = {name: value} if parts is None else {f"{name}.{part}": each for part, each in parts}
            numbers |= {key: float(each) if math.isfinite(each) else None for key, each in named.items()}
        except Exception as error:  # from the user's own code
            raise BadInput(
                f"the metric {name!r} fails on {len(labels)} samples: {type(error).__name__}: {error}"
            ) from error
    return numbers
