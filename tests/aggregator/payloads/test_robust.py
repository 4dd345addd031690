"""Trimmed mean and median: what they are, for whom, and that nothing but the updates decides their bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads import robust
from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.payloads.model_step import Noise, aggregate_noise_stds, least_noise_stds
from hushfleet.aggregator.payloads.robust import robust_sums
from hushfleet.errors import BadInput
from hushfleet.methods.state import PublicState
from support.fleet import LAYOUT, prepared_task

MakeFleet = Callable[..., Any]
MEDIAN = RoundSection(aggregation="median")
TRIMMED = RoundSection(aggregation="trimmed-mean", trim=0.2)


def sent(values: np.ndarray, shared: np.ndarray) -> CheckedUpdate:
    update = CheckedUpdate("dev")
    update.values, update.shared = values, shared
    return update


def updates(devices: int, size: int, *, masked: bool) -> tuple[np.ndarray, list[CheckedUpdate]]:
    """Values with NaN where a device shares nothing, and the same as updates."""
    rng = np.random.default_rng(devices)
    values = rng.normal(size=(devices, size)).astype(np.float32)
    shared = rng.random((devices, size)) < 0.6 if masked else np.ones((devices, size), bool)
    found = [sent(np.where(mask, row, np.float32(0)), mask) for row, mask in zip(values, shared, strict=True)]
    return np.where(shared, values, np.nan), found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 5, 10, 33])
def test_the_median_is_that_of_a_parameters_senders(
    monkeypatch: pytest.MonkeyPatch, devices: int, masked: bool
) -> None:
    monkeypatch.setattr(robust, "BLOCK_BYTES", 4 * devices * 37)  # 100 entries in three passes
    values, found_updates = updates(devices, 100, masked=masked)
    passes = []
    sums, counts = robust_sums(MEDIAN, lambda: passes.append(1) or iter(found_updates), devices=devices, size=100)
    shared = np.isfinite(values).any(axis=0)
    found = sums[shared] / counts[shared]
    assert found == pytest.approx(np.nanmedian(values[:, shared].astype(np.float64), axis=0), abs=1e-9)
    assert not counts[~shared].any()
    assert len(passes) == 3


def test_the_trimmed_mean_leaves_out_a_share_of_the_senders_rounded_down() -> None:
    six = [sent(np.array([v], np.float32), np.array([True])) for v in (9.0, 1.0, 3.0, 2.0, -100.0, 1e6)]
    for devices, total, kept in ((6, 1 + 2 + 3 + 9, 4), (5, 1 + 2 + 3, 3), (4, 15, 4)):
        sums, counts = robust_sums(TRIMMED, lambda n=devices: iter(six[:n]), devices=devices, size=1)
        assert (float(sums[0]), int(counts[0])) == (float(total), kept)


@pytest.mark.parametrize("rules", [{"aggregation": "median"}, {"aggregation": "trimmed-mean", "trim": 0.2}])
def test_order_restart_and_blocks_change_no_bit(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """FedGLP-ADP has other senders for each parameter from its second round on."""
    digests = set()
    for turn in range(4):
        fleet = make_fleet(devices=7, method="fedglp-adp", wire={"codec": "quantized"}, **rules)
        if turn == 3:
            monkeypatch.setattr(robust, "BLOCK_BYTES", 4 * 7 * 50)
        for _ in range(3):
            fleet.open()
            names = fleet.names[::-1] if turn == 1 else fleet.names
            for index, name in enumerate(names):
                assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
                if turn == 2 and index == 4:
                    fleet.restart()
            fleet.engine.close()
        digests.add(fleet.engine.global_digest)
    assert len(digests) == 1


def test_a_median_by_hand_and_parameters_that_nobody_shares(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(devices=3, method="fedavg", multiplier=0.0, aggregation="median", wire={"codec": "float32"})
    before = fleet.engine.global_params.copy()
    fleet.open()
    mask = np.zeros(LAYOUT.size, bool)
    mask[:10] = True
    sent = []
    for name in fleet.names:
        state = fleet.devices.states[name]
        fleet.devices.states[name] = replace(state, public=PublicState(mask, 0))
        fleet.store.put_public_state(name, digest=PublicState(mask, 0).digest(), state=PublicState(mask, 0).to_bytes())
        update = fleet.update(name)
        assert fleet.engine.accept(name, update.data).code == "accepted"
        sent.append(update.encoded.sent)
    fleet.engine.close()
    moved = fleet.engine.global_params - before
    assert not moved[:10].any()
    assert moved[10:] == pytest.approx(np.median(sent, axis=0), abs=1e-6)


def test_no_more_is_promised_for_the_release_than_a_devices_own_noise_gives(make_fleet: MakeFleet) -> None:
    for aggregation, release in (("mean", 2.0), ("median", 2.0 / math.sqrt(3))):
        fleet = make_fleet(method="dp-fedavg", aggregation=aggregation)
        assert fleet.run_round().multiplier_release == pytest.approx(release)


def test_the_difference_is_coded_no_coarser_than_the_least_noise_that_an_aggregate_has() -> None:
    equal = [Noise(1.0, (2.0, 0.5))] * 4
    assert least_noise_stds(equal, layers=2) == pytest.approx(aggregate_noise_stds(equal, layers=2))
    loud = [*equal, Noise(1.0, (1e6, 1e6))]
    assert least_noise_stds(loud, layers=2) == pytest.approx([1.0, 0.25])
    assert least_noise_stds([Noise(1.0, (0.0,))], layers=1) == [0.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "dp-fedsim", "aggregation": "median"}, "method.msa = false"),
        ({"aggregation": "trimmed-mean"}, "trim and aggregation"),
        ({"aggregation": "median", "trim": 0.1}, "trim and aggregation"),
        ({"aggregation": "trimmed-mean", "trim": 0.5}, r"in \(0, 0.5\)"),
    ],
)
def test_what_cannot_work_is_refused_with_the_task(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        prepared_task(**changes)


def test_what_works_beside_it_is_not() -> None:
    prepared_task(method="dp-fedsim", settings={"msa": False}, aggregation="median")
    prepared_task(aggregation="trimmed-mean", trim=0.1)
