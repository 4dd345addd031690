"""Strangers enrol, and the round's noise is divided among them and the honest devices.

198 births took 0.2 s, and with a cohort of 200 each of the two honest devices added a tenth of the noise that it would
have added alone. The strangers need not even answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import StoreError
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Ack, Ask, Known, NotEnrolled
from support.field import Field
from support.members import SignedMembers, member

MakeField = Callable[..., Field]
STRANGERS = {f"stranger-{index}": Identity.from_bytes(index.to_bytes(32, "big")) for index in range(1000, 1198)}


def come(field: Field, strangers: dict[str, Identity]) -> None:
    for name, identity in strangers.items():
        link = field.links[name] = field.hub.link(name)
        field.inbox[name] = []
        link.subscribe(field.topics.down(name))
        link.open()
        field.send(name, field.birth(name, identity=identity), "state", identity)
    field.run(steps=3 * len(strangers))


@pytest.fixture
def field(make_field: MakeField) -> Field:
    """Two honest devices that the operator knows; a round opens when both are there."""
    return make_field(devices=2, min_devices=2)


def test_where_enrolment_is_open_they_are_the_cohort(make_field: MakeField) -> None:
    """The attack: it is what open enrolment means."""
    field = make_field(devices=2, min_devices=200, closed=False)
    come(field, STRANGERS)
    field.join_all()
    assert set(field.plan.cohort) == {*STRANGERS, *field.fleet.names}


def test_strangers_are_not_present_and_are_told_so(field: Field) -> None:
    come(field, STRANGERS)
    assert field.coordinator.present == {}
    assert field.plan.phase == "closed"
    field.join_all()
    assert set(field.plan.cohort) == set(field.fleet.names)
    assert field.plan.noise_split == 2
    for name, identity in STRANGERS.items():
        (answer,) = field.answers(name)
        assert isinstance(answer, NotEnrolled)
        assert (answer.device, answer.public_key) == (name, identity.public_key)
        assert f"hushfleet fleet add RUN {name} --key {identity.public_key.hex()}" in answer.reason
    assert len(field.fleet.store.devices()) == 2
    assert field.refusals() == {"unknown": {"unknown-device": 198}}


def test_the_key_is_what_counts_not_the_id(field: Field) -> None:
    thief = Identity.generate()
    field.join("dev-0", identity=thief, session=9)
    (answer,) = field.answers("dev-0")
    assert isinstance(answer, NotEnrolled)
    assert "another key" in answer.reason
    field.join("dev-1", identity=field.fleet.devices.identities["dev-0"])
    assert field.coordinator.present == {}
    field.join_all()
    assert set(field.plan.cohort) == {"dev-0", "dev-1"}


def test_one_key_is_one_device_also_where_enrolment_is_open(make_field: MakeField) -> None:
    field = make_field(devices=2, min_devices=9, closed=False)
    twice = Identity.generate()
    come(field, {"one": twice, "two": twice})
    assert set(field.coordinator.present) == {"one"}
    (answer,) = field.answers("two")
    assert isinstance(answer, NotEnrolled)
    field.crash()
    assert field.coordinator.enrolment.key("one") == twice.public_key, "it is pinned for good"


class Nobody:
    """A key that nobody owns: the neutral point of the curve. Anybody signs with it, by R = s B, here for s = 0."""

    public_key = (1).to_bytes(32, "little")

    def sign(self, data: bytes) -> bytes:
        return (1).to_bytes(32, "little") + bytes(32)


def test_a_key_without_an_owner_is_no_key(make_field: MakeField) -> None:
    """It gives no shared secret, so each round of secure aggregation that draws its device would fail."""
    field = make_field(devices=2, min_devices=9, closed=False)
    Ed25519PublicKey.from_public_bytes(Nobody.public_key).verify(Nobody().sign(b""), b"anything")
    come(field, {"nobody": Nobody()})  # type: ignore[dict-item]
    assert field.coordinator.present == {}
    assert field.refusals() == {"unknown": {"unknown-device": 1}}


def test_the_operator_accepts_a_device_while_the_run_goes_on(field: Field) -> None:
    """The device does nothing for it: the broker has its birth."""
    name, identity = "stranger-1", Identity.generate()
    come(field, {name: identity})
    field.run(6.0)
    with DeviceRegister(field.fleet.folder) as register:
        (birth,) = register.refused_births()
        assert (birth.device, birth.public_key, birth.count) == (name, identity.public_key, 1)
        register.add([Board(name, public_key=birth.public_key)])
    field.run(1.2)
    assert field.coordinator.present == {name: "ready"}
    field.run(6.0)
    with DeviceRegister(field.fleet.folder) as register:
        assert register.refused_births() == []
        row = register.device(name)
    assert row is not None
    assert row.standing == "known"


def test_a_device_that_was_accepted_a_moment_ago_is_not_refused(field: Field) -> None:
    """The register is read again once a second, and a board that has enrolled announces itself at once."""
    name, identity = "newcomer", Identity.generate()
    field.register.add([Board(name, public_key=identity.public_key)])
    come(field, {name: identity})
    assert field.coordinator.present == {name: "ready"}
    assert (field.answers(name), field.refusals()) == ([], {})
    blocked, another = Identity.generate(), Identity.generate()
    field.register.add(
        [Board("blocked", public_key=blocked.public_key), Board("renewed", public_key=blocked.public_key[::-1])]
    )
    field.register.block("blocked", "stolen")
    come(field, {"blocked": blocked, "renewed": another})
    assert "has blocked blocked: stolen" in field.answers("blocked")[0].reason
    assert "another key" in field.answers("renewed")[0].reason
    field.run(1.2)
    assert field.coordinator.present == {name: "ready"}
    assert field.coordinator.enrolment.blocked == 1


def test_what_a_refused_device_is_told_fits_where_it_is(make_fleet: Callable[..., Any], tmp_path: Path) -> None:
    members = SignedMembers(tmp_path / "fleet")
    with members.open() as register:
        enrolment = Enrolment(make_fleet().store, register)
        assert enrolment._reason("board-1", bytes(32)).endswith("see: hushfleet fleet status DIR")
        members.write([member("board-1", Identity.generate().public_key)])
        enrolment._load()
        assert enrolment._reason("board-1").endswith("hushfleet fleet renew DIR board-1 --new-card")


def test_a_device_by_certificate_is_pinned_at_first_sight(field: Field) -> None:
    field.register.add([Board("by-name", standing="pinned")])
    field.crash()
    first, second = Identity.generate(), Identity.generate()
    field.join("by-name", identity=first)
    assert field.coordinator.present == {"by-name": "ready"}
    field.crash()
    field.join("by-name", identity=second, session=5)
    assert field.coordinator.enrolment.key("by-name") == first.public_key
    assert any(isinstance(answer, NotEnrolled) for answer in field.answers("by-name"))


@pytest.mark.parametrize("how", ["operator", "policy"])
def test_a_device_that_is_blocked_in_a_round_is_out_at_once(field: Field, how: str) -> None:
    field.join_all()
    data = field.fleet.update("dev-0").data
    if how == "policy":
        field.coordinator.enrolment.block("dev-0", "it lies")
    else:
        with DeviceRegister(field.fleet.folder) as register:
            register.block("dev-0", "it lies")
    field.run(1.2)
    assert set(field.coordinator.present) == {"dev-1"}
    (answer,) = field.answers("dev-0")
    assert isinstance(answer, NotEnrolled)
    assert "it lies" in answer.reason
    assert field.deliver("dev-0", data) is None, "its messages are ignored"
    assert field.fleet.engine.accept("dev-0", data).code == "unknown-device"
    assert isinstance(field.deliver("dev-1", field.fleet.update("dev-1").data), Ack)
    assert field.fleet.engine.closed_rounds == 1, "nobody waits for it"
    field.join("dev-0", session=2)
    field.crash()
    assert set(field.coordinator.present) == {"dev-1"}, "it stays blocked"


def test_all_that_are_blocked_are_out_although_the_link_is_lost_meanwhile(field: Field) -> None:
    field.join_all()
    with DeviceRegister(field.fleet.folder) as register:
        for name in field.fleet.names:
            register.block(name, "it lies")
    field.hub.cut("aggregator")
    field.coordinator.step(0.0)
    field.fleet.now += 1.1
    field.coordinator._up = True  # the loss is noticed only when something is sent
    field.coordinator.step(0.0)
    assert field.coordinator.present == {}


def test_a_register_that_cannot_be_read_for_a_while_changes_nothing(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.join_all()
    with DeviceRegister(field.fleet.folder) as register:
        register.block("dev-0", "it lies")

    def locked() -> list[Board]:
        raise StoreError("the register is locked")

    monkeypatch.setattr(field.register, "devices", locked)
    field.run(1.2)
    assert set(field.coordinator.present) == {"dev-0", "dev-1"}
    monkeypatch.undo()
    field.run(1.2)
    assert set(field.coordinator.present) == {"dev-1"}


def test_a_blocked_device_is_not_waited_for_after_a_restart(field: Field) -> None:
    field.join_all()
    field.register.block("dev-0", "it lies")
    field.crash()
    assert field.plan.phase == "open"
    assert isinstance(field.deliver("dev-1", field.fleet.update("dev-1").data), Ack)
    assert field.fleet.engine.closed_rounds == 1


def test_an_update_that_comes_when_its_device_is_blocked_is_refused(field: Field) -> None:
    field.join_all()
    data = field.fleet.update("dev-0").data
    field.coordinator.enrolment.block("dev-0", "it lies")
    field.run()
    assert field.fleet.engine.accept("dev-0", data).code == "unknown-device"
    assert field.fleet.engine.accepted == 0


def test_a_card_that_was_flashed_anew_is_a_new_device(field: Field) -> None:
    field.join_all()
    assert isinstance(field.deliver("dev-0", field.fleet.update("dev-0").data), Ack)
    flashed = Identity.generate()
    with DeviceRegister(field.fleet.folder) as register:
        register.forget("dev-0")
        register.add([Board("dev-0", public_key=flashed.public_key)])
    field.run(1.2)
    field.join("dev-0", identity=flashed)
    assert "dev-0" not in field.coordinator.present, "a resumed round reads its update with the former key"
    assert "after the round" in field.answers("dev-0")[-1].reason
    field.send("dev-0", Ask(1, bytes(16)), identity=flashed)
    assert field.answers("dev-0") == [], "it would be told of the former board's update"
    field.crash()
    assert field.fleet.engine.accepted == 1
    assert isinstance(field.deliver("dev-1", field.fleet.update("dev-1").data), Ack)
    field.run(1.2)
    assert "dev-0" in field.coordinator.present, "it need not come again"
    row = field.fleet.store.device("dev-0")
    assert (row.public_key, row.last_session, row.public_digest) == (flashed.public_key, 1, None)
    field.send("dev-0", Ask(1, bytes(16)), identity=flashed)
    known = field.answers("dev-0")[-1]
    assert isinstance(known, Known)
    assert (known.yours, known.last_round) == (True, 0), "else it would take itself for a restored copy"


def test_a_card_that_came_before_its_key_was_read_need_not_come_again(field: Field) -> None:
    field.join("dev-1")
    flashed = Identity.generate()
    with DeviceRegister(field.fleet.folder) as register:
        register.forget("dev-0")
        register.add([Board("dev-0", public_key=flashed.public_key)])
    field.join("dev-0", identity=flashed)
    assert "another key" in field.answers("dev-0")[-1].reason
    field.run(1.2)
    assert set(field.coordinator.present) == {"dev-0", "dev-1"}


def test_a_run_from_before_there_were_registers_goes_on(make_fleet: Callable[..., Any]) -> None:
    fleet = make_fleet(devices=2)
    fleet.store.add_device("dev-0", public_key=fleet.devices.identities["dev-0"].public_key, session=4)
    with DeviceRegister(fleet.folder, durable=False) as register:
        enrolment = Enrolment(fleet.store, register)
        assert {row.device: row.standing for row in register.devices()} == {"dev-0": "pinned", "dev-1": "pinned"}
        assert enrolment.count == 2
        register.forget("dev-1")
        assert Enrolment(fleet.store, register).count == 1, "what is forgotten later stays forgotten"


def test_two_devices_with_one_key_are_not_added(tmp_path: Path) -> None:
    key = Identity.generate().public_key
    with DeviceRegister(tmp_path) as register:
        register.add([Board("one", public_key=key)])
        with pytest.raises(Exception, match="a key of its own"):
            register.add([Board("three"), Board("two", public_key=key)])
        with pytest.raises(Exception, match="fleet forget"):
            register.add([Board("one", public_key=bytes(32))])
        register.add([Board("one", standing="pinned"), Board("one", public_key=key)])
        assert [(row.device, row.standing) for row in register.devices()] == [("one", "known")]
