"""The aggregator sends a model with which training diverges where a device has bright images, and looks who declines.

A decline is charged nothing, so this could be asked in every round, of anything that a model can be made to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.wire.format.spec import PrivacySpec
from support.edge import Bench, Package

PLAIN = PrivacySpec("device", "strict", 1.0, 2.0, 1e-5)
PRIVACY = {
    "device": PLAIN,
    "record": PrivacySpec("record", "strict", 1.0, 1.1, 1e-5, sample_rate=0.5, batches=3),
}
BRIGHT, GREY = 255, 76  # the task takes 0.3 of 255 away, so that grey is next to nothing


def seen_of(
    pixel: int,
    privacy: PrivacySpec,
    make: Callable[..., Bench],
    package: Package,
    config: DeviceConfig,
) -> Bench:
    images = np.full((16, 1, 8, 8), pixel, np.uint8)
    np.savez(Path(config.data.path), images=images, labels=np.arange(16) % 10)
    bench = make(package.with_spec(privacy=privacy, task="bright"), config)
    first = next(iter(package.spec.model.layout.slices.values()))
    bench.server.global_params = package.initial.copy()
    bench.server.global_params[first] = 3e38
    bench.until(lambda: bool(bench.server.births))
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.declines or bench.server.updates))
    return bench


@pytest.mark.parametrize("unit", PRIVACY)
@pytest.mark.parametrize("pixel", [BRIGHT, GREY])
def test_a_device_sends_and_is_charged_whatever_its_images_are(
    unit: str,
    pixel: int,
    make_bench: Callable[..., Bench],
    package: Package,
    config: DeviceConfig,
) -> None:
    bench = seen_of(pixel, PRIVACY[unit], make_bench, package, config)
    assert not bench.server.declines
    assert bench.store.ledger.rounds_charged() == 1
    own = bench.store.load_state("bright").own
    assert np.isfinite(own).all()


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        ("dp-fedavg", replace(PLAIN, noise_multiplier=0.0)),
        ("fedglp-adp", replace(PLAIN, accounting="as-published")),  # which sends raw values
    ],
)
def test_without_noise_nothing_is_promised_and_the_device_declines(
    make_bench: Callable[..., Bench],
    package: Package,
    config: DeviceConfig,
    method: str,
    privacy: PrivacySpec,
) -> None:
    limits = replace(config.limits, epsilon_server=np.inf, accounting="as-published")
    bench = seen_of(BRIGHT, privacy, make_bench, package.with_spec(method=method), replace(config, limits=limits))
    assert [decline.code for decline in bench.server.declines] == ["no-privacy"]
