"""Wanted: more about a device than epsilon_release says, from a parameter of the global model that it alone shares.

With FedGLP-ADP parameters become personal device by device. A parameter that one device shares gets that device's noise
in the aggregate and nobody else's, however many take part. So the release must claim no more than one device's noise.
"""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import context_of

LAYOUT = ParamLayout(("a.weight", "b.weight"), ((4,), (4,)))
DEVICES, SIGMA, ROUNDS = 8, 2.0, 400
ALONE = 5  # the parameter that device 0 alone shares
TERMS = RoundTerms(noise_split=DEVICES)


def method(*, accounting: str = "strict", **settings: bool):
    spec = PrivacySpec("device", accounting, clip_norm=1.0, noise_multiplier=SIGMA, delta=0.01)
    return make_method("fedglp-adp", settings, spec, LAYOUT, rounds=4)


def noise_in_the_sum(fedglp) -> tuple[float, float]:
    """Measured standard deviation of the released sum at `ALONE`, and the clip norm of that layer."""
    seen, bound = [], 0.0
    for number in range(ROUNDS):
        total = ExactSum(LAYOUT.size)
        for device in range(DEVICES):
            mask = np.zeros(LAYOUT.size, bool)
            mask[ALONE] = device > 0
            state = DeviceState(PublicState(mask, 1), np.zeros(LAYOUT.size, np.float32), fedglp.init_state().private)
            zeros = np.zeros(LAYOUT.size, np.float32)
            noised = fedglp.privatize(context_of(fedglp, state, zeros, TERMS), zeros, SeededNoise(3, device, number))
            total.add(np.where(mask, np.float32(0), noised.values), ~mask)
            bound = float(noised.clip_norms[1])
        seen.append(float(total.sums[ALONE]))
    return float(np.std(seen)), bound


@pytest.mark.parametrize("settings", [{}, {"acndp": False}])
def test_the_release_claims_no_more_noise_than_there_is(settings: dict[str, bool]) -> None:
    fedglp = method(**settings)
    std, bound = noise_in_the_sum(fedglp)
    layers = len(LAYOUT.layers) if settings == {} else 1  # the layers' costs add up: a layer's own multiplier is larger
    claimed = fedglp.multiplier_release(TERMS, participants=DEVICES)
    assert claimed * np.sqrt(layers) == pytest.approx(std / bound, rel=0.15)
    assert claimed == fedglp.charge(TERMS).noise_multiplier == SIGMA


def test_as_published_the_noise_of_all_is_claimed() -> None:
    """What makes the test above able to fail: the sum of eight devices' noise, which that parameter does not have."""
    published = method(accounting="as-published")
    assert published.multiplier_release(TERMS, participants=DEVICES) == pytest.approx(SIGMA)
    assert published.charge(TERMS).noise_multiplier == pytest.approx(SIGMA / np.sqrt(DEVICES))
