"""An update's values, measured: the largest magnitude and the squares of each layer, or why it is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.aggregator.payloads.decoding import decode
from hushfleet.array_api import BLOCK
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import encode_update

COUNTS = (3, 2 * BLOCK + 3, 1)
SIZE = sum(COUNTS)


HEADER = UpdateHeader(
    task="t-1", round=1, device="dev", codec="float32", value_count=SIZE, steps=(), noise_stds=(1.0,) * 3,
    clip_norms=(1.0,) * 3, public_digest=bytes(16), rounds_charged=1, epsilon_server=1.0, multiplier_server=1.0,
    noise_split=1,
)  # fmt: skip


def blob(values: np.ndarray) -> bytes:
    """Whatever the values are: those that no encoder takes are put in afterwards."""
    plain = np.arange(SIZE, dtype=np.float32)
    data = encode_update(HEADER, plain, counts=COUNTS, identity=Identity.from_bytes(bytes(32))).data
    return data.replace(plain.tobytes(), values.astype(np.float32).tobytes())


def decoded(data: bytes) -> CheckedUpdate:
    update = CheckedUpdate("dev", data, counts=COUNTS)
    update.header, update.shared = HEADER, np.ones(SIZE, bool)
    decode(update)
    return update


def refused(data: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        decoded(data)
    return caught.value


@pytest.mark.parametrize("place", [0, 3, BLOCK, 2 * BLOCK + 5, SIZE - 1])
def test_the_largest_value_is_seen_wherever_it_is(place: int) -> None:
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    for odd in (99.0, -99.0):
        values[place] = odd
        assert max(decoded(blob(values)).peaks) == 99.0
    for odd in (math.nan, -math.nan, math.inf, -math.inf):
        values[place] = odd
        assert refused(blob(values)).code == "non-finite"
    values[place] = 2.0**20 + 1
    assert refused(blob(values)).code == "out-of-bounds"


def test_squares_and_peaks_are_those_of_the_layers() -> None:
    values = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    found = decoded(blob(values))
    assert np.array_equal(found.values, values)
    layers = np.split(values.astype(np.float64), np.cumsum(COUNTS)[:-1])
    assert found.peaks == tuple(float(np.abs(layer).max()) for layer in layers)
    assert found.squares == pytest.approx([math.fsum((layer**2).tolist()) for layer in layers], rel=1e-14)


def test_what_does_not_parse_is_the_devices_own_fault() -> None:
    refusal = refused(b"x" * SIGNATURE_BYTES)
    assert (refusal.code, refusal.final, refusal.is_fault) == ("malformed", True, True)
