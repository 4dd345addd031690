"""Wanted, by one device with a good key: the global model where it wants it.

The norm of an honest update is that of its noise, so what an update may be follows from the noise; before, it followed
from the largest norm that noise could have with room to spare, and a device that adds none had all of it for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.fleet import CLIP_NORM, LAYOUT

MakeFleet = Callable[..., Any]
LIAR = "dev-0"
NOISED = {"method": "dp-fedavg", "accounting": "strict", "wire": {"codec": "float32"}}
STD = 2.0 * CLIP_NORM


def told(fleet: Any, values: np.ndarray, **changes: Any) -> Any:
    """What the aggregator says of these values with the header of an honest update."""
    update = fleet.update(LIAR, advance=False)
    data = fleet.devices.sign(LIAR, update.header, values.astype(np.float32), update.counts, **changes).data
    return fleet.engine.accept(LIAR, data)


def test_with_a_signal_that_fills_the_room_of_the_noise(make_fleet: MakeFleet) -> None:
    """In each layer just inside what was allowed: the bound, and noise of sqrt(k) + 8 deviations."""
    fleet = make_fleet(**NOISED)
    fleet.open()
    values = np.empty(LAYOUT.size)
    for span in LAYOUT.layers:
        values[span.start : span.stop] = 0.99 * (CLIP_NORM + STD * (math.sqrt(span.size) + 8)) / math.sqrt(span.size)
    verdict = told(fleet, values)
    assert (verdict.code, "its bound and noise allow" in verdict.reason) == ("out-of-bounds", True)


def test_with_all_of_the_norm_on_one_parameter(make_fleet: MakeFleet) -> None:
    """The bias of the class that it wants to see everywhere, say: 11 deviations, where noise has 7 and a half."""
    fleet = make_fleet(**NOISED)
    fleet.open()
    values = np.random.default_rng(1).normal(0, 0.6 * STD, LAYOUT.size)
    values[0] = STD * math.sqrt(204) * 0.8
    verdict = told(fleet, values)
    assert (verdict.code, "a value of layer" in verdict.reason) == ("out-of-bounds", True)


def test_with_every_layer_at_the_bound_of_all(make_fleet: MakeFleet) -> None:
    """Without noise the whole update is clipped to C; the header repeats C for each layer."""
    fleet = make_fleet(method="dp-fedavg", multiplier=0.0, wire={"codec": "float32"})
    fleet.open()
    values = np.empty(LAYOUT.size)
    for span in LAYOUT.layers:
        values[span.start : span.stop] = CLIP_NORM / math.sqrt(span.size)
    assert told(fleet, values).code == "out-of-bounds"


def test_with_a_quantisation_step_that_it_names_itself(make_fleet: MakeFleet) -> None:
    """An update without noise names its steps; half a step may be added to each value, whatever the step is."""
    fleet = make_fleet(method="dp-fedavg", multiplier=0.0)
    fleet.open()
    assert told(fleet, np.full(LAYOUT.size, 1000.0), steps=(1e4, 1e4)).code == "out-of-bounds"


@pytest.mark.parametrize("rules", [{"aggregation": "median"}, {"aggregation": "trimmed-mean", "trim": 0.1}])
def test_with_values_that_nothing_bounds(make_fleet: MakeFleet, rules: dict[str, Any]) -> None:
    """FedAvg clips nothing. The mean follows the liar; the others do not leave what honest devices sent."""
    moved = {}
    for name, aggregation in (("mean", {}), ("robust", rules)):
        fleet = make_fleet(method="fedavg", multiplier=0.0, devices=11, wire={"codec": "float32"}, **aggregation)
        before = fleet.engine.global_params.astype(np.float64)
        fleet.open()
        honest = []
        for device in fleet.names[1:]:
            update = fleet.update(device)
            assert fleet.engine.accept(device, update.data).code == "accepted"
            honest.append(update.encoded.sent)
        assert told(fleet, np.full(LAYOUT.size, 1e4)).code == "accepted"
        fleet.engine.close()
        moved[name] = fleet.engine.global_params - before
    assert moved["mean"].min() > 900
    assert (moved["robust"] <= np.max(honest, axis=0) + 1e-6).all()
    assert (moved["robust"] >= np.min(honest, axis=0) - 1e-6).all()


@pytest.mark.parametrize("clipping", ["quantile", "ppo"])
def test_with_a_report_that_leads_the_clip_norm(make_fleet: MakeFleet, clipping: str) -> None:
    """ACDP-pFSD: the clip norm follows the devices' reports, and the noise follows the clip norm."""
    fleet = make_fleet(method="acdp-pfsd", settings={"clipping": clipping}, devices=10, wire={"codec": "float32"})
    for _ in range(2):
        fleet.run_round()
    fleet.open()
    update = fleet.update(LIAR, advance=False)
    report = tuple(-1e9 for _ in update.header.report)
    data = fleet.devices.sign(LIAR, update.header, update.values, update.counts, report=report).data
    verdict = fleet.engine.accept(LIAR, data)
    assert (verdict.code, "a report" in verdict.reason) == ("out-of-bounds", True)


def test_with_the_norm_of_its_noise_it_is_not_found(make_fleet: MakeFleet) -> None:
    """NOT prevented, and said so in docs/privacy.md: a signal of one deviation in each value looks like noise.

    What holds is the bound: in the mean of n devices it moves the model by about std sqrt(d) / n.
    """
    fleet = make_fleet(devices=10, **NOISED)
    fleet.open()
    direction = np.sign(np.random.default_rng(2).normal(size=LAYOUT.size))
    assert told(fleet, STD * direction).code == "accepted"
    fleet.now += 1
    assert told(make_opened(make_fleet), 1.5 * STD * direction).code == "out-of-bounds"


def make_opened(make_fleet: MakeFleet) -> Any:
    fleet = make_fleet(devices=10, **NOISED)
    fleet.open()
    return fleet
