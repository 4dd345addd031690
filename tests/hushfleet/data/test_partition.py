"""Partitions: everything is dealt out once, by the rules that each kind promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.partition import KINDS, label_counts, partition, split_local, stratified_choice
from hushfleet.errors import BadInput

TEN_BY_SIXTY = np.repeat(np.arange(10), 60)


def deal(labels: np.ndarray, kind: str, devices: int, seed: int = 0, **options) -> list[np.ndarray]:
    options.setdefault("min_samples", 1)
    if kind.startswith("dirichlet"):
        options.setdefault("alpha", 0.5)
    if kind == "pathological":
        options.setdefault("classes_per_device", 2)
    return partition(labels, kind=kind, devices=devices, seed=seed, **options).parts


labelings = st.lists(st.integers(0, 4), min_size=40, max_size=200).map(np.array)


@settings(max_examples=60)
@given(labels=labelings, kind=st.sampled_from(KINDS), devices=st.integers(3, 8), seed=st.integers(0, 2**32))
def test_every_sample_is_dealt_out_exactly_once(labels: np.ndarray, kind: str, devices: int, seed: int) -> None:
    classes = len(np.unique(labels))
    parts = deal(labels, kind, devices, seed, alpha=1.0, classes_per_device=min(2, classes), min_samples=1)
    assert len(parts) == devices
    assert np.sort(np.concatenate(parts)).tolist() == list(range(len(labels)))
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) >= 1
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    first, again, other = (deal(TEN_BY_SIXTY, kind, 10, seed) for seed in (7, 7, 8))
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    assert [part.tolist() for part in first] != [part.tolist() for part in other]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_labels_does_not_matter_to_the_rules(kind: str) -> None:
    shuffled = np.random.default_rng(0).permutation(TEN_BY_SIXTY)
    counts = label_counts(shuffled, deal(shuffled, kind, 10), 10)
    assert counts.sum(axis=0).tolist() == [60] * 10


@pytest.mark.parametrize("kind", ["iid", "dirichlet-device"])
def test_equal_sizes_where_they_are_promised(kind: str) -> None:
    sizes = [len(part) for part in deal(np.resize(np.arange(7), 103), kind, 10)]
    assert sorted(sizes) == [10] * 7 + [11] * 3


@pytest.mark.parametrize("classes_per_device", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("devices", [10, 13, 100])
def test_pathological_gives_each_device_exactly_its_classes(classes_per_device: int, devices: int) -> None:
    labels = np.repeat(np.arange(10), 100)  # no class has more holders than samples
    parts = deal(labels, "pathological", devices, classes_per_device=classes_per_device)
    held = label_counts(labels, parts, 10) > 0
    assert held.sum(axis=1).tolist() == [classes_per_device] * devices
    holders = held.sum(axis=0)
    assert holders.max() - holders.min() <= 1


def test_pathological_cuts_a_class_evenly_among_its_holders() -> None:
    counts = label_counts(TEN_BY_SIXTY, deal(TEN_BY_SIXTY, "pathological", 20), 10)
    assert set(counts[counts > 0].tolist()) == {15}  # 20 devices x 2 classes / 10 = 4 holders of 60 samples


def test_pathological_pairs_are_drawn_not_fixed() -> None:
    held = label_counts(TEN_BY_SIXTY, deal(TEN_BY_SIXTY, "pathological", 100), 10) > 0
    assert len({tuple(row) for row in held.tolist()}) > 20


def concentration(kind: str, alpha: float) -> float:
    """The mean share of a device's largest class over 20 devices and 5 seeds."""
    labels = np.repeat(np.arange(10), 600)
    shares = []
    for seed in range(5):
        counts = label_counts(labels, deal(labels, kind, 20, seed, alpha=alpha), 10)
        shares.append((counts.max(axis=1) / counts.sum(axis=1)).mean())
    return float(np.mean(shares))


@pytest.mark.parametrize("kind", ["dirichlet-class", "dirichlet-device"])
def test_a_smaller_alpha_is_more_heterogeneous(kind: str) -> None:
    strong, medium, weak = (concentration(kind, alpha) for alpha in (0.1, 1.0, 100.0))
    assert strong > 0.45
    assert strong > medium + 0.1 > weak + 0.2
    assert weak < 0.17  # even shares would be 0.1


def test_dirichlet_class_gives_a_device_above_its_fair_share_nothing_more() -> None:
    """The balance rule of FedLab and NIID-Bench, recomputed class by class."""
    labels = np.repeat(np.arange(10), 60)
    stopped = 0
    for seed in range(20):
        counts = label_counts(labels, deal(labels, "dirichlet-class", 5, seed, alpha=0.2), 10)
        before = np.cumsum(counts, axis=1) - counts  # what each device held when the class was dealt
        full = before >= 600 / 5
        stopped += int(full.sum())
        assert (counts[full] == 0).all()
    assert stopped > 50


def test_a_tiny_alpha_still_deals_everything() -> None:
    for kind in ("dirichlet-class", "dirichlet-device"):
        parts = deal(TEN_BY_SIXTY, kind, 3, alpha=1e-8, min_samples=1)
        assert sum(len(part) for part in parts) == 600


def test_min_samples_is_kept_by_drawing_again() -> None:
    for seed in range(20):
        parts = deal(TEN_BY_SIXTY, "dirichlet-class", 10, seed, alpha=0.3, min_samples=15)
        assert min(len(part) for part in parts) >= 15


def test_gives_up_after_a_hundred_draws_with_advice() -> None:
    with pytest.raises(BadInput, match=r"100 draws.*raise alpha, take fewer devices or lower data\.min_samples"):
        deal(TEN_BY_SIXTY, "dirichlet-class", 20, alpha=0.01, min_samples=25)


@pytest.mark.parametrize(
    ("kind", "devices", "options", "reason"),
    [
        ("by-colour", 2, {}, "the kinds are iid"),
        ("iid", 0, {}, "at least one"),
        ("iid", 5, {"min_samples": 0}, "min_samples is 0"),
        ("iid", 601, {}, "data.devices = 601"),
        ("iid", 61, {"min_samples": 10}, "need 610 samples, and data.limit and the set leave 600"),
        ("dirichlet-class", 5, {"alpha": None}, "needs alpha"),
        ("dirichlet-device", 5, {"alpha": 0.0}, "needs alpha"),
        ("dirichlet-class", 5, {"alpha": float("nan")}, "needs alpha"),
        ("pathological", 5, {"classes_per_device": None}, "from 1 to 10"),
        ("pathological", 5, {"classes_per_device": 11}, "from 1 to 10"),
        ("pathological", 4, {"classes_per_device": 2}, "at least 5 devices"),
    ],
)
def test_refuses_parameters_that_do_not_fit(kind: str, devices: int, options: dict, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        deal(TEN_BY_SIXTY, kind, devices, **options)


def test_refuses_labels_that_are_no_labels() -> None:
    with pytest.raises(BadInput, match="vector of integers"):
        deal(np.zeros((4, 2), dtype=int), "iid", 2)
    with pytest.raises(BadInput, match="vector of integers"):
        deal(np.zeros(4), "iid", 2)


@settings(max_examples=80)
@given(labels=labelings, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32), data=st.data())
def test_split_local_covers_the_device_and_keeps_its_mix(
    labels: np.ndarray, fraction: float, seed: int, data: st.DataObject
) -> None:
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, len(labels) - 1), min_size=2))))
    train, test = split_local(indices, labels, test_fraction=fraction, seed=seed)
    assert np.sort(np.concatenate([train, test])).tolist() == indices.tolist()
    assert len(train) >= 1
    assert len(test) == min(max(1, round(len(indices) * fraction)), len(indices) - 1)
    (whole,), (held_out,) = label_counts(labels, [indices], 5), label_counts(labels, [test], 5)
    assert (np.abs(held_out - whole * len(test) / len(indices)) < 1).all()


def test_split_local_by_hand() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    train, test = split_local(np.arange(8), labels, test_fraction=0.25, seed=3)
    assert labels[test].tolist() == [0, 1]
    assert labels[train].tolist() == [0, 0, 0, 1, 1, 1]
    again = split_local(np.arange(8), labels, test_fraction=0.25, seed=3)
    assert again[1].tolist() == test.tolist()


def test_split_local_refuses_one_sample_and_odd_fractions() -> None:
    labels = np.arange(4)
    with pytest.raises(BadInput, match="1 samples cannot be split"):
        split_local(np.array([2]), labels, test_fraction=0.5, seed=0)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(BadInput, match="between 0 and 1"):
            split_local(np.arange(4), labels, test_fraction=fraction, seed=0)


def test_stratified_choice_breaks_ties_at_random() -> None:
    labels = np.repeat(np.arange(4), 3)
    chosen = {tuple(labels[stratified_choice(labels, 2, np.random.default_rng(seed))].tolist()) for seed in range(60)}
    assert len(chosen) == 6  # every pair of classes turns up


def test_label_counts_by_hand() -> None:
    counts = label_counts(np.array([0, 1, 1, 3]), [np.array([0, 1, 2]), np.array([3]), np.array([], int)], 4)
    assert counts.tolist() == [[1, 2, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_devices_are_drawn_by(kind: str) -> None:
    """On average over devices it is what they hold; of kinds that cut classes it is exactly that."""
    labels = np.repeat([0, 1, 3], [3000, 2000, 1000])
    options = {"alpha": 3.0} if kind.startswith("dirichlet") else {}
    parts, mixes = partition(labels, kind=kind, devices=40, seed=3, classes_per_device=2, min_samples=1, **options)
    held = label_counts(labels, parts, 4) / np.array([[len(part)] for part in parts])
    np.testing.assert_allclose(mixes.sum(1), 1)
    if kind in ("dirichlet-class", "pathological"):
        np.testing.assert_array_equal(mixes, held)
    else:
        assert 0 < np.abs(mixes - held).mean() < 0.03
        again = [partition(labels, kind=kind, devices=40, seed=seed, min_samples=1, **options) for seed in range(4)]
        assert (np.ptp([each.mixes[0, 0] for each in again]) > 0.05) == (kind != "iid")
    assert not mixes[:, 2].any()
