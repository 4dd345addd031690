"""Wanted: an honest device out of the run, by making the aggregator refuse updates in its name.

After three rounds with a refused update that the device itself signed, the coordinator blocks it. So nothing may count
that somebody else can send, and nothing may count twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Ack, NotEnrolled, Refused

MakeFleet = Callable[..., Any]
VICTIM, LIAR = "dev-0", "dev-1"


def bad(fleet: Any, name: str, *, seed: int | None = None) -> bytes:
    """An update that its device signed, without the noise that it declares."""
    update = fleet.update(name, advance=False, seed=seed)
    return fleet.devices.sign(name, update.header, update.values * 0.1, update.counts).data


def test_by_bytes_that_the_victim_did_not_sign(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg")
    for _ in range(3):
        fleet.open()
        honest = fleet.update(VICTIM).data
        foreign = fleet.devices.identities[VICTIM]
        fleet.devices.identities[VICTIM] = Identity.generate()
        forged = bad(fleet, VICTIM)
        fleet.devices.identities[VICTIM] = foreign
        for data in (forged, b"", honest[:-1] + bytes([honest[-1] ^ 1]), bad(fleet, LIAR), honest[:100]):
            verdict = fleet.engine.accept(VICTIM, data)
            assert (verdict.acknowledged, verdict.faults) == (False, 0)
        assert fleet.engine.accept(VICTIM, honest).code == "accepted"
        fleet.engine.close()


def test_by_what_the_victim_signed_in_other_rounds(make_fleet: MakeFleet) -> None:
    """Kept from the broker and sent again: late, a duplicate, or not asked for; never its fault."""
    fleet = make_fleet(method="dp-fedavg")
    kept = []
    for _ in range(2):
        fleet.open([VICTIM, LIAR])
        for data in kept:
            assert fleet.engine.accept(VICTIM, data).faults == 0
        kept.append(fleet.update(VICTIM).data)
        assert fleet.engine.accept(VICTIM, kept[-1]).code == "accepted"
        assert fleet.engine.accept(VICTIM, kept[-1]).faults == 0
        fleet.engine.close()
    fleet.open([LIAR])
    verdict = fleet.engine.accept(VICTIM, fleet.update(VICTIM).data)
    assert (verdict.code, verdict.faults) == ("not-in-cohort", 0)


def test_by_repeating_what_the_victim_once_did_wrong(make_fleet: MakeFleet) -> None:
    """One bad update, offered fifty times, and another one in the same round: one fault, also after a restart."""
    fleet = make_fleet(method="dp-fedavg")
    fleet.open()
    data = bad(fleet, VICTIM)
    assert fleet.engine.accept(VICTIM, data).faults == 1
    assert {fleet.engine.accept(VICTIM, data).faults for _ in range(50)} == {0}
    assert fleet.engine.accept(VICTIM, bad(fleet, VICTIM, seed=9)).faults == 0
    fleet.restart()
    assert fleet.engine.accept(VICTIM, data).faults == 0


def test_who_lies_again_and_again_is_counted_over_restarts(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg", min_updates=1)
    for number in (1, 2, 3):
        fleet.open()
        verdict = fleet.engine.accept(LIAR, bad(fleet, LIAR))
        assert (verdict.code, verdict.faults) == ("below-noise", number)
        assert fleet.engine.accept(VICTIM, fleet.update(VICTIM).data).code == "accepted"
        fleet.engine.close()
        fleet.restart()


def lie(field: Any) -> Any:
    """What the liar is told of a bad update, after everybody else has sent a good one."""
    fleet = field.fleet
    for name in fleet.names:
        if name != LIAR:
            field.deliver(name, fleet.update(name).data)
    return field.deliver(LIAR, bad(fleet, LIAR))


def test_the_liar_itself_is_out_after_three_rounds_and_stays_out(make_field: Callable[..., Any]) -> None:
    """Over the wire: blocked in the register, told why, out of the next cohort, also after a restart; and let in again.

    The rounds go on without it, although the task asks for the whole fleet.
    """
    field = make_field(method="dp-fedavg", devices=4)
    field.join_all()
    assert isinstance(lie(field), Refused)
    assert isinstance(lie(field), Refused)
    assert LIAR in field.plan.cohort
    last = lie(field)
    assert isinstance(last, NotEnrolled)
    assert "refused in 3 rounds" in last.reason
    assert field.register.device(LIAR).standing == "blocked"
    assert [event["device"] for event in field.events_of("quarantine")] == [LIAR]


def test_the_rest_of_the_fleet_goes_on_without_it(make_field: Callable[..., Any]) -> None:
    field = make_field(method="dp-fedavg", devices=4, rounds=6)
    field.join_all()
    for _ in range(3):
        lie(field)
    assert sorted(field.plan.cohort) == [VICTIM, "dev-2", "dev-3"]
    field.crash()
    field.join_all()
    for name in (VICTIM, "dev-2", "dev-3"):
        field.deliver(name, field.fleet.update(name).data)
    assert (field.plan.round, sorted(field.plan.cohort)) == (5, [VICTIM, "dev-2", "dev-3"])
    with DeviceRegister(field.fleet.folder, durable=False) as operator:  # as `hushfleet fleet add` does
        operator.unblock(LIAR)
    field.run(2.0)
    field.join(LIAR, session=2)
    for name in (VICTIM, "dev-2", "dev-3"):
        field.deliver(name, field.fleet.update(name).data)
    assert LIAR in field.plan.cohort


def test_what_anybody_may_publish_blocks_nobody(make_field: Callable[..., Any]) -> None:
    """Hundreds of chunks in the victim's name, of no update and of its own with another signature."""
    field = make_field(method="dp-fedavg")
    field.join_all()
    honest = field.fleet.update(VICTIM).data
    for number in range(100):
        field.push(VICTIM, bytes([number]) * 2000)
        field.push(VICTIM, honest[:-1] + bytes([number]))
    field.run(2.0)
    assert isinstance(field.deliver(VICTIM, honest), Ack)
    assert not field.register.device(VICTIM).is_blocked
    assert field.fleet.store.faults() == {}
