"""What the checks let pass: every honest update, and nothing that does not amount to the task's mechanism.

Hostile updates over the wire are in `rounds/test_hostile_senders.py`; here are the bounds themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.codecs import codec_of, codecs
from hushfleet.wire.format.update import attach_public

MakeFleet = Callable[..., Any]


def opened(fleet: Any, name: str, data: bytes, *, held: PublicState | None = None) -> CheckedUpdate:
    """An update that has passed all checks."""
    known = held or fleet.prepared.method.init_state().public
    fleet.store.put_public_state(name, digest=known.digest(), state=known.to_bytes())
    update = CheckedUpdate(name, data)
    fleet.engine.checks.authenticate(update, public_key=fleet.devices.identities[name].public_key)
    fleet.engine.checks.check(update, fleet.engine.plan)
    return update


def refused(fleet: Any, name: str, data: bytes, *, held: PublicState | None = None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        opened(fleet, name, data, held=held)
    return caught.value


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    method=st.sampled_from(["dp-fedavg", "fedglp-adp", "fedavg"]),
    accounting=st.sampled_from(["as-published", "strict"]),
    multiplier=st.sampled_from([0.01, 0.3, 1.0, 4.0, 100.0]),
    codec=st.sampled_from([codec.name for codec in codecs()]),
    step=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
)
def test_every_honest_update_passes(
    make_fleet: MakeFleet, seed: int, method: str, accounting: str, multiplier: float, codec: str, step: float
) -> None:
    assume(not codec_of(codec).needs_noise or method != "fedavg")
    fleet = make_fleet(
        method=method,
        accounting=accounting,
        multiplier=0.0 if method == "fedavg" else multiplier,
        wire={"codec": codec, "step": step},
    )
    for turn in range(3):
        fleet.open()
        for index, name in enumerate(fleet.names):
            data = fleet.update(name, seed=seed + 10 * turn + index).data
            assert fleet.engine.accept(name, data).code == "accepted"
        fleet.engine.close()


def test_values_are_put_where_the_mask_says(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(wire={"codec": "float32"})
    fleet.open()
    mask = np.zeros(256, bool)
    mask[[0, 100, 204, 255]] = True
    state = fleet.devices.states["dev-0"]
    fleet.devices.states["dev-0"] = replace(state, public=PublicState(mask, 0))
    update = fleet.update("dev-0", advance=False)
    verified = opened(fleet, "dev-0", update.data, held=PublicState(mask, 0))
    assert verified.counts == (202, 50)
    assert np.array_equal(verified.shared, ~mask)
    assert np.array_equal(verified.values[~mask], update.values.astype(np.float32))
    assert not verified.values[mask].any()


def test_an_attached_state_is_used_only_where_its_digest_is_the_headers(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    for _ in range(2):
        fleet.run_round()
    fleet.open()
    states, identity = fleet.devices.states, fleet.devices.identities["dev-0"]
    before = states["dev-0"].public
    update = fleet.update("dev-0", advance=False)
    wrong = PublicState.initial(256)
    assert refused(fleet, "dev-0", update.data, held=wrong).code == "state-unknown"
    attached = attach_public(update.data, before.to_bytes(), identity=identity)
    assert opened(fleet, "dev-0", attached, held=wrong).before.digest() == before.digest()
    for section in (wrong.to_bytes(), b"\0", PublicState.initial(255).to_bytes(), before.to_bytes() + b"x"):
        forged = attach_public(update.data, section, identity=identity)
        assert refused(fleet, "dev-0", forged, held=wrong).code == "malformed"


def test_more_participations_than_rounds_are_not_possible(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open()
    for count in (1, 2**32 - 1):
        public = PublicState(np.zeros(256, bool), count)
        update = fleet.update("dev-0", advance=False)
        forged = fleet.devices.sign(
            "dev-0", update.header, update.values, update.counts,
            public_digest=public.digest(), public=public.to_bytes(),
        )  # fmt: skip
        assert refused(fleet, "dev-0", forged.data).code == "malformed"


def test_refusals_of_what_nobody_signed_are_not_final(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    checks, key = fleet.engine.checks, fleet.devices.identities["dev-0"].public_key
    broken = update.data[:-1] + bytes([update.data[-1] ^ 1])
    for data, public_key, code in (
        (update.data, None, "unknown-device"),
        (broken, key, "bad-signature"),
        (b"", key, "malformed"),
        (bytes(checks.max_bytes + 1), key, "malformed"),
    ):
        with pytest.raises(Refusal) as caught:
            checks.authenticate(CheckedUpdate("dev-0", data), public_key=public_key)
        assert (caught.value.code, caught.value.final) == (code, False)


def test_a_layer_may_be_as_loud_as_its_bound_and_noise_allow_and_no_louder(make_fleet: MakeFleet) -> None:
    """Bound 0.5 and noise 0.5 x 2 on 204 and 52 values. Of the second the square is at most
    52.25 + 2 sqrt(52.5 x) + 2 x with x = log(7 x 3 / 1e-9) = 23.8, so its norm is at most 13.06."""
    fleet = make_fleet(method="dp-fedavg", accounting="strict", wire={"codec": "float32"})
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    assert update.header.noise_stds == (1.0, 1.0)
    values = update.values.copy()
    x = math.log(21e9)
    limit = math.sqrt(52.25 + 2 * math.sqrt(52.5 * x) + 2 * x)
    assert limit == pytest.approx(13.055, abs=1e-3)
    for norm, passes in ((limit * 0.999, True), (limit * 1.002, False)):
        values[204:] = norm / math.sqrt(52)
        data = fleet.devices.sign("dev-0", update.header, values, update.counts).data
        if passes:
            assert opened(fleet, "dev-0", data).counts == (204, 52)
        else:
            refusal = refused(fleet, "dev-0", data)
            assert (refusal.code, refusal.final) == ("out-of-bounds", True)
            assert "layer out" in refusal.reason


def test_a_quiet_layer_is_found_among_loud_ones(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg", accounting="strict", wire={"codec": "float32"})
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    values = update.values.copy()
    values[:204] *= 0.4
    quiet = fleet.devices.sign("dev-0", update.header, values, update.counts)
    assert refused(fleet, "dev-0", quiet.data).code == "below-noise"
    values = update.values.copy()
    values[204:] *= 0.4  # 52 values are too few to be sure
    few = fleet.devices.sign("dev-0", update.header, values, update.counts)
    assert opened(fleet, "dev-0", few.data).counts == (204, 52)


@pytest.mark.parametrize("size", [2.0**20 * 1.01, 1e30])
def test_values_that_the_sums_cannot_hold_are_refused(make_fleet: MakeFleet, size: float) -> None:
    fleet = make_fleet(method="fedavg", multiplier=0.0, wire={"codec": "float32"})
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    values = update.values.copy()
    values[0] = size
    data = fleet.devices.sign("dev-0", update.header, values, update.counts).data
    assert refused(fleet, "dev-0", data).code == "out-of-bounds"


def test_coarser_steps_than_the_task_allows(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(wire={"step": 0.5})
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    steps = tuple(2 * step for step in update.header.steps)
    coarse = fleet.devices.sign("dev-0", update.header, update.values, update.counts, steps=steps)
    refusal = refused(fleet, "dev-0", coarse.data)
    assert (refusal.code, "step" in refusal.reason) == ("out-of-bounds", True)


def test_noise_where_the_task_has_none_and_another_codec(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="fedavg", multiplier=0.0)
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    sign = fleet.devices.sign
    noisy = sign("dev-0", update.header, update.values, update.counts, noise_stds=(0.1, 0.1))
    assert refused(fleet, "dev-0", noisy.data).code == "out-of-bounds"
    plain = sign("dev-0", update.header, update.values, update.counts, codec="float32", steps=())
    assert refused(fleet, "dev-0", plain.data).code == "malformed"


def test_signal_and_noise_of_an_update_by_hand(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg", accounting="strict", wire={"step": 0.5})
    fleet.open()
    update = fleet.update("dev-0")
    row = opened(fleet, "dev-0", update.data).row
    square = float(np.square(update.encoded.sent.astype(np.float64)).sum())
    assert row.noise_square == pytest.approx(256 * 1.0)
    assert row.noise_variance == pytest.approx(2 * 256)
    assert row.signal_square == pytest.approx(square - 256 - 256 * 0.5**2 / 12)


def test_signs_show_no_signal_and_may_not_be_larger_than_the_noise_makes_them(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg", accounting="strict", wire={"codec": "one-bit"})
    fleet.open()
    update = fleet.update("dev-0")
    row = opened(fleet, "dev-0", update.data).row
    assert row.signal_square == 0
    assert row.noise_square == pytest.approx(256 * 1.0)
    assert set(np.abs(update.encoded.sent).tolist()) == {float(np.float32(math.sqrt(math.pi / 2)))}
    louder = tuple(1.01 * size for size in update.header.steps)
    signed = fleet.devices.sign("dev-0", update.header, update.values, update.counts, steps=louder)
    refusal = refused(fleet, "dev-0", signed.data)
    assert (refusal.code, "magnitude" in refusal.reason) == ("out-of-bounds", True)
