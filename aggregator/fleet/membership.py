"""Who belongs to a fleet, or to a run without one, and what an operator changes of that; commands need not know which.

A fleet's registry decides, and the aggregator's register follows. In a run without a fleet the register decides alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.aggregator.devices.register import DeviceRegister, KnownDevice
from hushfleet.aggregator.fleet import roster
from hushfleet.aggregator.fleet.access import apply
from hushfleet.aggregator.fleet.board_ids import chosen_ids
from hushfleet.aggregator.fleet.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput
from hushfleet.wire.format.topics import check_name, check_new_name


@dataclass
class FleetMember:
    """A board that is known, or asks to be let in.

    :param key: the key that is accepted.
    :param blocked: why it is locked out, by an operator or by the aggregator; None for a board that is not.
    :param asking: the keys that have asked under its id and were not let in.
    """

    device: str
    state: str = "not let in"
    key: bytes | None = None
    blocked: str | None = None
    asking: list[bytes] = field(default_factory=list)


@dataclass
class Membership:
    """The boards of one folder, which is open.

    :param decides: the fleet's registry; None: there is no fleet.
    :param members: by id, as they were when it was opened.
    """

    path: Path
    register: DeviceRegister
    decides: tuple[FleetFolder, FleetRegistry] | None
    members: dict[str, FleetMember]

    def chosen(
        self, named: Sequence[str] | None, file: Path | None, fits: Callable[[FleetMember], object] = lambda _: True
    ) -> list[FleetMember]:
        """Returns the boards that a command names, as `chosen_ids` finds them. Raises `BadInput`."""
        ids = chosen_ids(self.members, named, file, folder=self.path, fits=fits)
        return [self.members[each] for each in ids]

    @property
    def store(self) -> FleetRegistry | DeviceRegister:
        """The store in which boards are approved, locked out and forgotten."""
        return self.register if self.decides is None else self.decides[1]

    def done(self) -> str:
        """Carries changes out. Returns a line on what still waits for the operator's signature, or ""."""
        changes = None if self.decides is None else apply(*self.decides, self.register)
        return f"\n{roster.describe_waiting(changes)}: {roster.export_command(str(self.path))}" if changes else ""


def is_fleet(path: Path) -> bool:
    """Returns whether this is a fleet's folder, and not that of a run without a fleet."""
    return (path / FILE_NAME).exists()


@contextlib.contextmanager
def membership(path: Path) -> Iterator[Membership]:
    """Opens the boards of a fleet's folder, or of the folder of a run without one. Raises `BadInput`."""
    with contextlib.ExitStack() as opened:
        if is_fleet(path):
            folder = FleetFolder(path)
            decides = folder, opened.enter_context(FleetRegistry(folder.path))
            register = opened.enter_context(DeviceRegister(folder.aggregator))
            yield Membership(path, register, decides, _of_fleet(decides[1], register))
        elif DeviceRegister.exists(path) or AggregatorStore.exists(path):
            _refuse_run_of_fleet(path)
            register = opened.enter_context(DeviceRegister(path))
            yield Membership(path, register, None, _of_run(register))
        else:
            raise BadInput(f"{path} is not a fleet's folder, which has a {FILE_NAME}, and not a run's folder")


def accept(run: Path, devices: Sequence[str], key: bytes | None) -> None:
    """Accepts devices of a run without a fleet, also those that were locked out. Raises `BadInput`.

    :param run: made if it does not exist, because devices may be accepted before the first start.
    :param key: of the only device; None: the first key that each shows.
    """
    _refuse_run_of_fleet(run)
    for device in devices:
        check_name(device, "the device id")
    with DeviceRegister(run) as register:
        for device in devices:
            if register.device(device) is None:
                check_new_name(device, "the device id")
        register.add([KnownDevice(device, key, pinned=key is None) for device in devices])
        for device in devices:
            register.unblock(device)


def _of_fleet(registry: FleetRegistry, register: DeviceRegister) -> dict[str, FleetMember]:
    others = {row.device: row.blocked for row in register.devices()}
    members = {}
    for row in registry.boards():
        blocked = (row.reason or "") if row.state == "blocked" else others.get(row.device)
        members[row.device] = FleetMember(row.device, row.state, row.public_key, blocked)
    for each in registry.refused_requests():
        members[each.device].asking.append(each.public_key)
    return members


def _of_run(register: DeviceRegister) -> dict[str, FleetMember]:
    members = {
        row.device: FleetMember(row.device, row.state, row.public_key, row.blocked) for row in register.devices()
    }
    for birth in register.refused_births():
        members.setdefault(birth.device, FleetMember(birth.device)).asking.append(birth.public_key)
    return members


def _refuse_run_of_fleet(path: Path) -> None:
    runs = path.resolve().parent
    if runs.name == "runs" and is_fleet(of := runs.parent):
        raise BadInput(f"{path} is a run of the fleet {of}, which has the boards: name the fleet's folder")
