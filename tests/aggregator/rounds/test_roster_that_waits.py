"""A membership list that is signed elsewhere: before the first one, and while a device that is locked out is still in
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.list_file import membership_list_file
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.secure.membership_list import MembershipList, MembershipListContent
from hushfleet.wire.format.identity import Identity
from support.field import Field
from support.secure import SecureFleet

OPERATOR = Identity.generate()
OUT = "dev-9"


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """Ten devices that are known, of which six are enough for a sum; no membership list is signed yet."""
    fleet = SecureFleet(tmp_path / "run", devices=10, min_devices=6)
    with DeviceRegister(fleet.folder, durable=False) as register:
        register.add(Board(name, public_key=fleet.identities[name].public_key) for name in fleet.names)
    made = Field(fleet, tmp_path / "run", membership_list=membership_list_file(tmp_path / "roster"))
    yield made
    made.coordinator.close()
    fleet.store.close()


def sign(field: Field) -> None:
    keys = {name: field.fleet.identities[name].public_key for name in field.fleet.names}
    assert field.membership_list is not None
    field.membership_list.path.write_bytes(
        MembershipListContent.of(keys, honest_fraction=1.0, min_devices=6).signed(OPERATOR).to_bytes()
    )


def test_no_round_begins_before_the_operator_has_signed(field: Field, caplog: pytest.LogCaptureFixture) -> None:
    """A list of the aggregator's own would be declined by every board, with the round spent."""
    field.join_all()
    field.run(10.0)
    assert field.fleet.engine.plan is None
    assert "no membership list is signed yet" in caplog.text
    sign(field)
    field.run(10.0)
    assert field.fleet.engine.plan is not None
    assert field.fleet.engine.plan.secure is not None


@pytest.mark.parametrize("restarted", [False, True])
def test_nobody_waits_for_a_device_that_is_out_and_still_in_the_membership_list(field: Field, restarted: bool) -> None:
    """Nor after a start of the aggregator between two rounds, when nobody tells it that the device went."""
    field.join_all()
    with DeviceRegister(field.fleet.folder, durable=False) as operator:
        operator.block(OUT, "stolen")
    field.run(2.0)
    if restarted:
        field.crash()
    sign(field)
    field.run(10.0)
    engine = field.fleet.engine
    assert OUT in engine.cohort
    assert not engine.responses.expects(OUT)
    for name in sorted(set(engine.cohort) - {OUT}):
        field.deliver(name, field.fleet.update(name))
    field.run(1.0)
    assert engine.plan is not None
    assert engine.plan.phase == "unmask", "all others have answered, so the sum is settled without a deadline"
    for member in field.fleet.round.members:
        if member != OUT:
            field.deliver(member, field.fleet.answer(member))
    field.run(2.0)
    assert engine.closed_rounds == 1
    (closed,) = field.events_of("round_close")
    assert closed["participants"] == 9


def test_a_file_that_may_be_read_now_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that root has written; nothing but its permissions changes then."""
    file, signed = tmp_path / "roster", MembershipList.of({"a": OPERATOR.public_key})
    file.write_bytes(signed.to_bytes())
    membership_list = membership_list_file(file)
    with monkeypatch.context() as forbidden:
        forbidden.setattr(Path, "read_bytes", Mock(side_effect=PermissionError("forbidden")))
        assert membership_list.current() is None
        assert membership_list.current() is None
        assert Path.read_bytes.call_count == 1, "one warning is enough"  # type: ignore[attr-defined]
    written = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == written:  # the clock of a file system may be coarse
        file.chmod(0o640)
    assert membership_list.current() == signed
