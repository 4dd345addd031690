"""The membership list of a fleet: signed anew when it says something new, under a number that only rises."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.identity import Identity
from support.desk import FEDERATION, add_enrolled, make_folder


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    """Of two boards whose keys are known."""
    folder = make_folder(tmp_path / "plant", boards=0)
    add_enrolled(folder, "plant-1", "plant-2")
    return folder


def written(folder: FleetFolder) -> MembershipList:
    with FleetRegistry(folder.path) as registry:
        apply(folder, registry)
    return MembershipList.from_bytes(
        folder.membership_list.read_bytes(), operator=load_or_create(folder.operator_key).public_key
    )


def test_it_names_boards_fleet_and_what_sums_may_count_on(folder: FleetFolder) -> None:
    membership_list = written(folder)
    assert (membership_list.devices, membership_list.federation) == (("plant-1", "plant-2"), FEDERATION)
    assert (membership_list.honest_fraction, membership_list.min_devices) == (0.9, 10)
    assert membership_list.nonce != bytes(32)


def test_it_is_signed_anew_only_where_it_says_something_new(folder: FleetFolder) -> None:
    first = written(folder)
    assert written(folder) == first  # else each start of the service would draw other committees
    add_enrolled(folder, "plant-3")
    second = written(folder)
    assert second.number > first.number
    assert second.nonce != first.nonce
    file = folder.path / FILE_NAME
    file.write_text(file.read_text().replace("min_devices = 10", "min_devices = 3"))
    third = written(FleetFolder(folder.path))
    assert (third.min_devices, third.devices) == (3, second.devices)
    assert third.number > second.number


def test_a_grant_reads_no_register_that_is_open(folder: FleetFolder) -> None:
    """To open it reads the charges of a year: seconds with 10,000 boards, for each certificate."""
    with FleetRegistry(folder.path) as registry, ActivityStore(folder.aggregator) as activity:
        registry.block("plant-2", "stolen")
        with patch("hushfleet.aggregator.fleet.trust.access.ActivityStore", side_effect=AssertionError):
            apply(folder, registry, activity)
    assert written(folder).devices == ("plant-1",)


def test_a_number_does_not_fall_where_a_clock_goes_back_or_the_file_is_gone(folder: FleetFolder) -> None:
    operator = load_or_create(folder.operator_key)
    ahead = written(folder).content.signed(operator, at=4e9)
    folder.membership_list.write_bytes(ahead.to_bytes())
    add_enrolled(folder, "plant-3")
    assert written(folder).number == ahead.number + 1
    folder.membership_list.unlink()
    assert written(folder).number > 1_700_000_000  # of the clock


@pytest.mark.parametrize("data", [b"", b"no roster", None])
def test_what_the_operator_has_not_signed_is_replaced(folder: FleetFolder, data: bytes | None) -> None:
    membership_list = written(folder)
    stranger = membership_list.content.signed(Identity.generate(), after=membership_list.number)
    folder.membership_list.write_bytes(stranger.to_bytes() if data is None else data)
    assert written(folder).content == membership_list.content
