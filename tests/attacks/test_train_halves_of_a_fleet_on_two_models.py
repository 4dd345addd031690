"""An aggregator gives each part of a fleet another model, and opens one sum over all of them.

Where all devices but one get a model whose gradients are known (all zeros, say), the sum less these is the one's. Held
by: masks whose keys follow from the model and from all else that a plan tells a device to train by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.errors import BadInput
from hushfleet.secure.masking import Masked
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.messages import RoundPlan
from support.secure_aggregation import SumFleet, plan_of
from support.secure_fleet import SecureFleet, with_secure_aggregation

OTHERWISE = {"global_digest": bytes(31) + b"\1", "rounds": 99, "noise_split": 2}
"""What a plan says to one half, and not to the other."""


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Masks as they were: bound to membership list, round, task, rate and limits alone."""

    def change() -> None:
        made = SecureRound.__init__

        def unbound(self: SecureRound, spec: Any, plan: RoundPlan, *rest: Any, **named: Any) -> None:
            made(self, spec, replace(plan, global_digest=bytes(32), rounds=100, noise_split=1), *rest, **named)

        monkeypatch.setattr(SecureRound, "__init__", unbound)

    return change


def opened(fleet: SumFleet, told: RoundPlan, otherwise: RoundPlan) -> list[int]:
    """The sum over two halves of the fleet, which mask, and answer, by what each was told."""
    rounds = [SecureRound(fleet.spec, plan, fleet.membership_list, size=fleet.size) for plan in (told, otherwise)]
    one, other = rounds
    halves = one.devices[::2], one.devices[1::2]
    sums = [fleet.sums(each, half) for each, half in zip(rounds, halves, strict=True)]
    both = Masked(*((a.astype(np.int64) + b) % fleet.prime for a, b in zip(*sums, strict=True)))
    answers = {
        name: answer
        for each, half in zip(rounds, halves, strict=True)
        for name, answer in fleet.answers(each, one.devices, [m for m in each.members if m in half]).items()
    }
    return other.opened(Masked(*(each.astype(np.uint32) for each in both)), answers)[0].tolist()


@pytest.mark.parametrize("field", OTHERWISE)
def test_one_sum_over_both_halves(field: str, as_it_was: Callable[[], None]) -> None:
    fleet = SumFleet(24)
    plan = plan_of(fleet.membership_list)
    otherwise = replace(plan, **{field: OTHERWISE[field]})
    assert opened(fleet, plan, plan) == fleet.plain(fleet.membership_list.devices).tolist()
    with pytest.raises(BadInput, match="contradict"):
        opened(fleet, plan, otherwise)
    as_it_was()
    assert opened(fleet, plan, otherwise) == fleet.plain(fleet.membership_list.devices).tolist()


@pytest.mark.parametrize("bound", [False, True])
def test_a_board_does_not_serve_two_models_of_one_round(
    make_bench: Any, package: Any, config: Any, as_it_was: Callable[[], None], bound: bool
) -> None:  # fmt: skip
    """It has trained by the first; for the second, it neither sends nor answers."""
    if not bound:
        as_it_was()
    owned = replace(config, limits=replace(config.limits, accounting="secure", min_devices=8))
    fleet = SecureFleet(make_bench(package=with_secure_aggregation(package).with_spec(rounds=5), config=owned))
    bench = fleet.bench
    first = fleet.open_round(1)
    bench.acked(1)
    bench.server.global_params = np.zeros_like(bench.server.global_params)
    second = fleet.open_round(1)
    assert first.global_digest != second.global_digest
    assert (fleet.of(first).context != fleet.of(second).context) == bound
    bench.steps(60)
    assert len(bench.server.updates) == 1
    assert [decline.reason for decline in bench.server.declines] == [
        "this device has committed its update of the round for another sum"
    ] * bound
