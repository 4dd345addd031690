"""Loads a task's public data set, normalised in the same way as on its devices; without PyTorch, for many processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hushfleet.aggregator.config.task import Task
from hushfleet.data.samples import DataSet


def load_public(task: Task, data_dir: Path | None) -> DataSet:
    """Returns the data set that the task names, one of `PUBLIC_DATA`."""
    from hushfleet.data.sets import load

    dataset = load(task.data.name, data_dir=data_dir)
    if not task.model.takes_pixels:
        return dataset
    mean, std = normalisation(task, dataset.input_shape[0])
    train, test = (replace(part, mean=mean, std=std) for part in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test)


def normalisation(task: Task, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation for data sets without their own: pixels in [0, 1], other values unchanged."""
    if task.data.mean:
        return task.data.mean, task.data.std
    return (0.0,) * channels, (1.0,) * channels
