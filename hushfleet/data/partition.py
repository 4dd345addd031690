"""Partitions a data set over devices, as in published work.

The partitions, and their sources:

- `iid`: shuffled and cut into equal parts (McMahan et al., "Communication-efficient learning of deep
  networks from decentralized data", AISTATS 2017).
- `dirichlet-class`: for every class, the shares of the devices are drawn from a symmetric Dirichlet of
  concentration `alpha`; a device that already holds its fair share `n / devices` gets nothing of the
  classes that follow. This is the split of Yurochkin et al. (ICML 2019) and NIID-Bench (Li et al., ICDE
  2022); FedDPA's public code uses the one of FedLab (`hetero_dir_partition`). Sizes differ.
- `dirichlet-device`: every device draws its own class mix from a symmetric Dirichlet and all devices hold
  equally many samples (the idea of Hsu et al., "Measuring the effects of non-identical data
  distribution", 2019; the concentration is per class, as in Acar et al., FedDyn, ICLR 2021: Hsu's own
  alpha is the sum over the classes).
- `pathological`: every device holds exactly `classes_per_device` classes (fewer only if a class has more
  holders than samples), and the samples of a class are divided evenly among its holders: the shards of
  McMahan et al. in the balanced form of FedRep (Collins et al., ICML 2021): a device never gets two shards
  of one class.

All are functions of the labels, the parameters and the seed, and use every sample exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hushfleet.errors import BadInput

KINDS = ("iid", "dirichlet-class", "dirichlet-device", "pathological")
MAX_DRAWS = 100
DEFAULT_MIN_SAMPLES = 10
"""NIID-Bench's floor; FedLab's is the number of classes, which is the same for ten classes."""

Indices = npt.NDArray[np.int64]


class Division(NamedTuple):
    """The samples that each device holds, and the distribution from which they are drawn.

    :param parts: one ascending int64 array of indices into the labels for each device; together a permutation of all.
    :param mixes: float64 `[devices, classes]`, the class shares with which a device's samples are drawn. A small part
        has other shares by chance. If each class is cut by shares (`dirichlet-class`, `pathological`), and if the data
        give the devices themselves, these are the shares of the samples that the device holds.
    """

    parts: list[Indices]
    mixes: npt.NDArray[np.float64]


def partition(
    labels: npt.NDArray[np.integer[Any]],
    *,
    kind: str,
    devices: int,
    seed: int,
    alpha: float | None = None,
    classes_per_device: int | None = None,
    min_samples: int = DEFAULT_MIN_SAMPLES,
) -> Division:
    """Distributes the samples over devices.

    :param labels: int `[n]`, the label of each sample.
    :param kind: one of `KINDS`.
    :param devices: the number of parts.
    :param seed: the same seed gives the same parts.
    :param alpha: concentration of the Dirichlet kinds; small is heterogeneous.
    :param classes_per_device: for `pathological`.
    :param min_samples: each device holds at least this many; random kinds are drawn again until they do.
    :raises BadInput: parameters that do not fit, or no acceptable draw in `MAX_DRAWS`.
    """
    labels = np.asarray(labels)
    _check(labels, kind, devices, alpha, classes_per_device, min_samples)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    classes, smallest = int(labels.max()) + 1, 0
    for _ in range(MAX_DRAWS):
        mixes = None
        if kind == "iid":
            mixes = np.tile(np.bincount(labels) / len(labels), (devices, 1))
            parts = np.array_split(rng.permutation(len(labels)), devices)
        elif kind == "pathological":
            parts = _pathological(labels, devices, int(classes_per_device or 0), rng)
        elif kind == "dirichlet-class":
            parts = _dirichlet_class(labels, devices, float(alpha or 0), rng)
        else:
            parts, mixes = _dirichlet_device(labels, devices, float(alpha or 0), rng)
        size = min(len(part) for part in parts)
        if size >= min_samples:
            parts = [np.sort(part).astype(np.int64) for part in parts]
            return Division(parts, held_mixes(labels, parts, classes) if mixes is None else mixes)
        smallest = max(smallest, size)
    raise BadInput(
        f"no {kind} split of {len(labels)} samples over {devices} devices gave each device {min_samples} "
        f"samples in {MAX_DRAWS} draws (the best draw's smallest device has {smallest}); "
        f"{_advice(kind)}, take fewer devices or lower data.min_samples"
    )


def given_parts(owners: Indices | None, *, devices: int, min_samples: int) -> list[Indices]:
    """Returns the samples of each device, according to the data itself.

    :param owners: int64 `[n]`, the device of each sample, from 0.
    :raises BadInput: the data name no devices, or another number of devices, or a device has too few samples.

    >>> print(*(part.tolist() for part in given_parts(np.array([0, 1, 0]), devices=2, min_samples=1)), sep=", ")
    [0, 2], [1]
    """
    if owners is None:
        raise BadInput(
            "data.partition = 'given': the data do not say which device has a sample; add it (train_device in "
            "an .npz, the column device in a CSV file), or take another partition, such as 'iid'"
        )
    counts = np.bincount(owners)
    if len(counts) != devices:
        raise BadInput(
            f"data.devices = {devices}: with data.partition = 'given' it must be {len(counts)}, as in the data"
        )
    if counts.min() < min_samples:
        few = np.flatnonzero(counts < min_samples)
        raise BadInput(
            f"data.min_samples = {min_samples}: {len(few)} devices have fewer, as number {few[0]} (from 0) with "
            f"{counts[few[0]]}; set data.min_samples = {counts.min()}, or leave their samples out"
        )
    return [np.flatnonzero(owners == device) for device in range(devices)]


def held_mixes(labels: npt.NDArray[np.integer[Any]], parts: Sequence[Indices], classes: int) -> npt.NDArray[np.float64]:
    """Returns the class shares of the samples that each device holds, float64 `[devices, classes]`.

    >>> held_mixes(np.array([0, 1, 1, 1]), [np.array([0, 1]), np.array([2, 3])], 2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    counts = label_counts(labels, parts, classes)
    shares: npt.NDArray[np.float64] = counts / counts.sum(1, keepdims=True)
    return shares


def split_local(
    indices: Indices, labels: npt.NDArray[np.integer[Any]], *, test_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Splits one device's samples into a training and a test part with the same class mix.

    :param indices: int64 `[m]`, the device's samples, `m >= 2`.
    :param labels: int `[n]`, the labels of the whole set that `indices` point into.
    :param test_fraction: between 0 and 1; at least one sample is tested and one trained on.
    :returns: (train, test), ascending.
    """
    indices = np.asarray(indices, dtype=np.int64)
    if not 0 < test_fraction < 1:
        raise BadInput(f"test_fraction is {test_fraction}; it must lie between 0 and 1, both excluded")
    if len(indices) < 2:
        raise BadInput(f"a device with {len(indices)} samples cannot be split into training and test parts")
    count = min(max(1, round(len(indices) * test_fraction)), len(indices) - 1)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    held_out = stratified_choice(np.asarray(labels)[indices], count, rng)
    is_test = np.zeros(len(indices), dtype=bool)
    is_test[held_out] = True
    return np.sort(indices[~is_test]), np.sort(indices[is_test])


def stratified_choice(labels: npt.NDArray[np.integer[Any]], count: int, rng: np.random.Generator) -> Indices:
    """Chooses `count` positions of `labels`, each class in proportion (largest remainders, ties at random).

    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> labels[stratified_choice(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    classes, sizes = np.unique(labels, return_counts=True)
    quotas = sizes * count / len(labels)
    takes = np.floor(quotas).astype(np.int64)
    remainders = quotas - takes
    by_remainder = np.lexsort((rng.random(len(classes)), -remainders))
    takes[by_remainder[: count - int(takes.sum())]] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == cls))[:take] for cls, take in zip(classes, takes, strict=True)]
    return np.sort(np.concatenate(chosen))


def label_counts(labels: npt.NDArray[np.integer[Any]], parts: Sequence[Indices], classes: int) -> npt.NDArray[np.int64]:
    """Counts the samples of each class on every device: int64 `[devices, classes]`.

    >>> label_counts(np.array([0, 1, 1, 0]), [np.array([0, 1]), np.array([2, 3])], 2).tolist()
    [[1, 1], [1, 1]]
    """
    labels = np.asarray(labels)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.int64)


def _check(
    labels: npt.NDArray[Any],
    kind: str,
    devices: int,
    alpha: float | None,
    classes_per_device: int | None,
    min_samples: int,
) -> None:
    if kind not in KINDS:
        raise BadInput(f"unknown partition kind {kind!r}; the kinds are {', '.join(KINDS)}")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise BadInput(f"labels must be a vector of integers, got {labels.dtype} {list(labels.shape)}")
    if devices < 1:
        raise BadInput(f"devices is {devices}; at least one is needed")
    if min_samples < 1:
        raise BadInput(f"min_samples is {min_samples}; at least 1 is needed, or a device has nothing to learn")
    if devices * min_samples > len(labels):
        raise BadInput(
            f"data.devices = {devices} with data.min_samples = {min_samples} each need {devices * min_samples} "
            f"samples, and data.limit and the set leave {len(labels)}; take fewer devices, or lower data.min_samples"
        )
    if kind.startswith("dirichlet") and (alpha is None or not 0 < alpha < np.inf):
        raise BadInput(f"the {kind} split needs alpha, a number above 0; got {alpha}")
    if kind == "pathological":
        classes = len(np.unique(labels))
        if classes_per_device is None or not 1 <= classes_per_device <= classes:
            raise BadInput(
                f"the pathological split needs classes_per_device from 1 to {classes}, got {classes_per_device}"
            )
        if devices * classes_per_device < classes:
            raise BadInput(
                f"{devices} devices with {classes_per_device} classes each cannot hold all {classes} "
                f"classes; take at least {-(-classes // classes_per_device)} devices or more classes a device"
            )


def _advice(kind: str) -> str:
    return "raise alpha" if kind.startswith("dirichlet") else "raise classes_per_device"


def _dirichlet_class(labels: npt.NDArray[Any], devices: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    fair_share = len(labels) / devices
    parts: list[list[Indices]] = [[] for _ in range(devices)]
    held = np.zeros(devices, dtype=np.int64)
    for cls in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == cls))
        shares = rng.dirichlet(np.full(devices, alpha)) * (held < fair_share)
        if not shares.sum() > 0:  # a tiny alpha underflows: one device with room gets the whole class
            shares = np.zeros(devices)
            shares[rng.choice(np.flatnonzero(held < fair_share))] = 1.0
        # Rounded, not truncated: if the shares sum to just below one, the last device must not get an extra sample.
        cuts = np.rint(np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
        for device, piece in enumerate(np.split(members, cuts)):
            parts[device].append(piece)
            held[device] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _dirichlet_device(
    labels: npt.NDArray[Any], devices: int, alpha: float, rng: np.random.Generator
) -> tuple[list[Indices], npt.NDArray[np.float64]]:
    """Returns the parts, and the mixes with which they are drawn."""
    classes = np.unique(labels)
    supplies = [list(rng.permutation(np.flatnonzero(labels == cls))) for cls in classes]
    mixes = rng.dirichlet(np.full(len(classes), alpha), size=devices)
    needs = np.array([len(part) for part in np.array_split(labels, devices)])
    expected = _expected_mixes(mixes, needs, np.array([len(supply) for supply in supplies]))
    parts: list[list[int]] = [[] for _ in range(devices)]
    # All devices ask at once, and a class with too many requests is shared at random among the devices that
    # ask; if one device came after another, the last ones would get only the rest. Each pass
    # fills every device or exhausts a class, so there are at most as many passes as classes, plus one.
    while needs.any():
        left = np.array([len(supply) for supply in supplies])
        asked = np.zeros((devices, len(classes)), dtype=np.int64)
        for device in np.flatnonzero(needs):
            mix = np.where(left > 0, mixes[device], 0.0)
            mix = mix / mix.sum() if mix.sum() > 1e-12 else left / left.sum()
            asked[device] = rng.multinomial(needs[device], mix)
        for cls, supply in enumerate(supplies):
            granted = asked[:, cls]
            if granted.sum() > len(supply):
                granted = rng.multivariate_hypergeometric(granted, len(supply))
            for device in np.flatnonzero(granted):
                take = int(granted[device])
                parts[device].extend(supply[-take:])
                del supply[-take:]
                needs[device] -= take
    of_all = np.zeros((devices, int(classes[-1]) + 1))
    of_all[:, classes] = expected
    return [np.array(part, dtype=np.int64) for part in parts], of_all


def _expected_mixes(
    mixes: npt.NDArray[np.float64], sizes: npt.NDArray[np.integer[Any]], supplies: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Returns the expected shares that devices hold, over all draws with these mixes: a class with too many requests is
    reduced for all that ask, and other classes fill the gap. It does the passes of `_dirichlet_device` in fractions."""
    needs, left, held = sizes[:, None].astype(np.float64), supplies.astype(np.float64), np.zeros_like(mixes)
    for _ in range(len(left) + 1):
        mix = mixes * (left > 1e-9)
        mix = np.where(mix.sum(1, keepdims=True) > 1e-12, mix, left)
        asked = needs * mix / mix.sum(1, keepdims=True)
        granted = asked * np.minimum(1.0, left / np.maximum(asked.sum(0), 1e-300))
        held, left = held + granted, np.maximum(left - granted.sum(0), 0)
        needs = needs - granted.sum(1, keepdims=True)
        if needs.max() < 1e-9:
            break
    shares: npt.NDArray[np.float64] = held / held.sum(1, keepdims=True)
    return shares


def _pathological(
    labels: npt.NDArray[Any], devices: int, classes_per_device: int, rng: np.random.Generator
) -> list[Indices]:
    classes = np.unique(labels)
    holders: list[list[int]] = [[] for _ in classes]
    # A device takes the classes with the fewest holders so far, ties at random, so that every class has
    # equally many holders (plus or minus one) and no device gets a class twice.
    for device in range(devices):
        held_by = np.array([len(devices_of) for devices_of in holders])
        for cls in np.lexsort((rng.random(len(classes)), held_by))[:classes_per_device]:
            holders[cls].append(device)
    parts: list[list[Indices]] = [[] for _ in range(devices)]
    for cls, devices_of in zip(classes, holders, strict=True):
        members = rng.permutation(np.flatnonzero(labels == cls))
        for device, piece in zip(rng.permutation(devices_of), np.array_split(members, len(devices_of)), strict=True):
            parts[device].append(piece)
    return [np.concatenate(pieces) for pieces in parts]
