"""Divides the data among the devices of a simulated fleet by the task's partition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.data.partition import Division, given_parts, held_mixes, label_counts, partition, split_local
from hushfleet.data.samples import DataSet, Samples
from hushfleet.errors import BadInput

_LIMIT_STREAM = 0x4C494D54
_PREFERENCE_STREAM = 0x50524546
_PREFERENCES = (0.2, 5.0)
_LOCAL_TEST_STREAM = 0x4C544553
_UNLABELLED_STREAM = 0x554E4C42


@dataclass(frozen=True, eq=False)
class Subset:
    """Some samples of a set, selected only when they are used, because ten thousand devices have ten thousand subsets.

    :param source: the set.
    :param choose: returns the indices int64 `[n]`, the same in each call.
    :param count: n, if choosing takes long.
    """

    source: Samples
    choose: Callable[[], np.ndarray]
    count: int | None = None

    @property
    def indices(self) -> np.ndarray:
        return self.choose()

    def __len__(self) -> int:
        return len(self.indices) if self.count is None else self.count

    @property
    def samples(self) -> Samples:
        return self.source.take(self.indices)


@dataclass(frozen=True, eq=False)
class SimulatedDevice:
    """One device of a simulation.

    :param index: its number, from which its seeds are derived.
    :param board: a profile of `firmware_profiles`.
    :param train: its training samples.
    :param local_test: test images with the label shares that its own samples are drawn with; in a `given` partition,
        with the shares that it has.
    :param epsilon_limit: its privacy budget against the server, at the task's delta.
    :param preference: factor on the standard noise that its owner wants.
    :param unlabelled: images without labels, for its personalized head.
    """

    index: int
    name: str
    board: str
    train: Subset
    local_test: Subset
    epsilon_limit: float = math.inf
    preference: float = 1.0
    unlabelled: Subset | None = None


@dataclass(frozen=True, eq=False)
class Fleet:
    """The devices of a simulation, and the test set that all of them share.

    :param label_counts: int `[devices, classes]` of all samples of each device, for the report; None if targets are not
        classes.
    :param chance: if targets are not classes, the score of the best constant answer on all samples, and its mean over
        the devices' own samples.
    """

    devices: tuple[SimulatedDevice, ...]
    common_test: Samples
    label_counts: np.ndarray | None = None
    chance: tuple[float, float] | None = None


def device_names(count: int) -> list[str]:
    """Returns names for the devices of a simulated fleet; all names have the same length."""
    digits = len(str(count - 1))
    return [f"device-{index:0{digits}d}" for index in range(count)]


def make_fleet(task: Task, dataset: DataSet, *, boards: tuple[str, ...] = ("generic-x86",)) -> Fleet:
    """Divides the data set by the task's partition; the same seed gives the same fleet.

    :param boards: profiles, assigned to the devices in turn.
    """
    section, seed = task.data, task.seed
    train, owners = dataset.train, dataset.owners
    others = np.arange(0)
    if section.limit is not None and section.limit < (whole := len(train.records[0])):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_LIMIT_STREAM,)))
        chosen = train.of_records(rng.choice(whole, section.limit, replace=False))
        others = np.setdiff1d(np.arange(len(train)), chosen)
        train, owners = train.take(chosen), None if owners is None else owners[chosen]
    # What is divided are records; here are their strata, whose shares stay the same: classes, if there are any.
    first, _ = train.records
    strata = train.labels[first] if train.targets.are_classes else np.zeros(len(first), np.int64)
    owners = None if owners is None else owners[first]
    if section.partition == "given":
        given = given_parts(owners, devices=section.devices, min_samples=section.min_samples)
        parts, mixes = Division(given, held_mixes(strata, given, int(strata.max()) + 1))
    else:
        parts, mixes = partition(
            strata,
            kind=section.partition,
            devices=section.devices,
            seed=seed,
            alpha=section.alpha,
            classes_per_device=section.classes_per_device,
            min_samples=section.min_samples,
        )
    held_out = section.share_tested(dataset.has_test)
    devices = []
    for index, (name, indices) in enumerate(zip(device_names(section.devices), parts, strict=True)):
        tested = None if dataset.test_owners is None else np.flatnonzero(dataset.test_owners == index)
        if tested is not None and len(tested) and section.partition == "given":
            own, local_test = indices, Subset(dataset.test, partial(np.asarray, tested))
        elif held_out > 0 and len(indices) > 1:
            own, others_of_it = split_local(indices, strata, test_fraction=held_out, seed=seed + index)
            local_test = Subset(train, partial(np.asarray, train.of_records(others_of_it)))
        elif not train.targets.are_classes:
            own, local_test = indices, Subset(dataset.test, partial(np.arange, len(dataset.test)), len(dataset.test))
        else:
            own, mix = indices, _testable(mixes[index], dataset, name, is_asked=section.test_fraction == 0)
            choose = partial(_like_own, mix, dataset.test, seed=seed, index=index)
            local_test = Subset(dataset.test, choose, int(_counts_like_own(mix, dataset.test).sum()))
        devices.append(
            SimulatedDevice(
                index=index,
                name=name,
                board=boards[index % len(boards)],
                train=Subset(train, partial(np.asarray, train.of_records(own))),
                local_test=local_test,
                epsilon_limit=task.privacy.budget,
                preference=_preference(task, index),
                unlabelled=_unlabelled(task, dataset.train, others, mixes[index], index),
            )
        )
    parts = [train.of_records(part) for part in parts]
    if train.targets.are_classes:
        return Fleet(tuple(devices), dataset.common_test, label_counts(train.labels, parts, dataset.classes))
    reached = [train.targets.constant_right(train.labels[part]) for part in parts if len(part)]
    chance = train.targets.constant_right(train.labels[np.concatenate(parts)]), fmean(reached)
    return Fleet(tuple(devices), dataset.common_test, chance=chance)


def _unlabelled(task: Task, train: Samples, others: np.ndarray, mix: np.ndarray, index: int) -> Subset | None:
    """Draws images that no device holds, by the device's mix of classes; two devices may get the same ones."""
    if not task.data.unlabelled:
        return None
    rng = np.random.default_rng(np.random.SeedSequence(task.seed, spawn_key=(_UNLABELLED_STREAM, index)))
    counts = rng.multinomial(task.data.unlabelled, mix)
    pools = [others[train.labels[others] == label] for label in range(len(mix))]
    if any(len(pool) < count for pool, count in zip(pools, counts, strict=True)):
        raise BadInput(
            f"data.unlabelled = {task.data.unlabelled}: data.limit leaves too few images of some class that no device "
            "holds; lower one of the two"
        )
    drawn = [rng.choice(pool, count, replace=False) for pool, count in zip(pools, counts, strict=True)]
    return Subset(train, partial(np.asarray, np.sort(np.concatenate(drawn))))


def _preference(task: Task, index: int) -> float:
    """Draws R_i / L of APDP-FL: normal with mean 1, clipped to 0.2 to 5."""
    spread = task.privacy.preference_std
    if spread == 0:
        return 1.0
    rng = np.random.default_rng(np.random.SeedSequence(task.seed, spawn_key=(_PREFERENCE_STREAM, index)))
    return float(np.clip(rng.normal(1.0, spread), *_PREFERENCES))


def _testable(mix: np.ndarray, dataset: DataSet, device: str, *, is_asked: bool) -> np.ndarray:
    """Returns the device's shares of the classes that the common test set has. Raises `BadInput` if it has none.

    :param is_asked: whether the task asks for test parts of these very shares: then all classes are needed.
    """
    available = np.bincount(dataset.test.labels, minlength=len(mix))[: len(mix)]
    tested: np.ndarray = np.where(available > 0, mix, 0)
    if not tested.any() or (is_asked and not available[mix > 0].all()):
        lacking = [dataset.class_names[label] for label in np.flatnonzero((mix > 0) & (available == 0))]
        raise BadInput(
            f"the common test set has no image of {', '.join(lacking)}, so data.test_fraction = 0 cannot draw a test "
            f"part like the own data of {device}; set data.test_fraction = 0.2, or add test images"
        )
    return tested / tested.sum()


def _like_own(shares: np.ndarray, test: Samples, *, seed: int, index: int) -> np.ndarray:
    """Draws common test images in the shares of the device's samples, as many as the scarcest class allows.

    :param shares: float64 `[classes]`, from `Division.mixes`, because the label counts of a few images are too noisy.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_LOCAL_TEST_STREAM, index)))
    chosen = [
        rng.choice(np.flatnonzero(test.labels == label), count, replace=False)
        for label, count in enumerate(_counts_like_own(shares, test).tolist())
    ]
    return np.sort(np.concatenate(chosen))


def _counts_like_own(shares: np.ndarray, test: Samples) -> np.ndarray:
    """Returns the number of test images of each class in these shares, int `[classes]`."""
    available = np.bincount(test.labels, minlength=len(shares))[: len(shares)]
    total = min(available[shares > 0] / shares[shares > 0])
    return np.rint(total * shares).astype(np.int64)


def save_samples(samples: Samples, path: Path) -> None:
    """Writes the `.npz` that a simulated device reads: `images` `[n, C, H, W]`, `labels`, and the `clips` of sound."""
    clips: dict[str, Any] = {} if samples.clips is None else {"clips": samples.clips}
    np.savez(path, images=samples.images, labels=samples.labels, **clips)


def save_device(device: SimulatedDevice, fleet: Fleet, *, train: Path, local_test: Path, unlabelled: Path) -> None:
    """Writes a device's files; a test part drawn from the common test set is stored as one bit per image."""
    save_samples(device.train.samples, train)
    if device.unlabelled is not None:
        samples = device.unlabelled.samples
        save_samples(replace(samples, labels=np.zeros_like(samples.labels)), unlabelled)
    if device.local_test.source is fleet.common_test:
        chosen = np.zeros(len(fleet.common_test), bool)
        chosen[device.local_test.indices] = True
        np.savez(local_test, of_common=np.packbits(chosen))
    else:
        save_samples(device.local_test.samples, local_test)
