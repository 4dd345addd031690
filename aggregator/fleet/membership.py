"""Who belongs to a fleet, or to a run without one, and the operator's changes of that; commands need not know which."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Member:
    """A board that is known, or asks to be let in.

    :param state: in a fleet's registry or a run's register.
    :param key: the key that is accepted.
    :param blocked: why it is locked out, by an operator or by the aggregator; None for a board that is not.
    :param asking: the keys that have asked under its id and were not let in.
    """

    device: str
    state: str
    key: bytes | None = None
    blocked: str | None = None
    asking: tuple[bytes, ...] = ()

    def keys_beginning_with(self, digits: str | None) -> list[bytes]:
        """Returns the keys that ask and begin with these hex digits."""
        return [key for key in self.asking if key.hex().startswith((digits or "").lower())]


class Membership(ABC):
    """The boards of one folder. Each change is one transaction, and `done` carries all of them out.

    :param path: the folder that was opened.
    :param members: by id, as they were when it was opened.
    """

    path: Path
    members: dict[str, Member]

    def chosen(
        self,
        named: Sequence[str] | None,
        file: Path | None,
        *,
        fits: Callable[[Member], object] = lambda _: True,
        strangers: bool = False,
    ) -> list[Member]:
        """Returns the boards that a command names, as `chosen_ids` finds them. Raises `BadInput`."""
        ids = chosen_ids(self.members, named, file, folder=self.path, fits=fits, strangers=strangers)
        return [self.members.get(each, Member(each, "unknown")) for each in ids]

    def done(self) -> str:
        """Carries the changes out. Returns a line on what still waits for the operator's signature, or ""."""
        return ""

    @property
    @abstractmethod
    def rekey_command(self) -> str:
        """The command by which a board whose card was written anew loses its former key."""

    @abstractmethod
    def approve(self, device: str, key: bytes) -> None: ...

    @abstractmethod
    def block(self, device: str, reason: str) -> None: ...

    @abstractmethod
    def unblock(self, device: str) -> None: ...

    @abstractmethod
    def forget(self, device: str) -> None: ...


class FleetMembership(Membership):
    """The boards of a fleet: its registry decides, and the aggregator's register follows."""

    def __init__(self, folder: FleetFolder, registry: FleetRegistry, register: DeviceRegister) -> None:
        self.path, self.folder, self._registry, self.register = folder.path, folder, registry, register
        asking: dict[str, list[bytes]] = {}
        for each in registry.refused_requests():
            asking.setdefault(each.device, []).append(each.public_key)
        others = {row.device: row.blocked for row in register.devices()}
        self.members = {
            row.device: Member(
                row.device,
                row.state,
                row.public_key,
                (row.reason or "") if row.state == "blocked" else others.get(row.device),
                tuple(asking.get(row.device, ())),
            )
            for row in registry.boards()
        }

    def done(self) -> str:
        changes = apply(self.folder, self._registry, self.register)
        return f"\n{roster.describe_waiting(changes)}: {roster.export_command(str(self.path))}" if changes else ""

    @property
    def rekey_command(self) -> str:
        return f"hushfleet fleet renew {self.path} --new-card"

    def approve(self, device: str, key: bytes) -> None:
        self._registry.approve(device, key)

    def block(self, device: str, reason: str) -> None:
        self._registry.block(device, reason)

    def unblock(self, device: str) -> None:
        self.register.unblock(device)
        self._registry.unblock(device)

    def forget(self, device: str) -> None:
        self._registry.forget(device)

    def expect_new_card(self, device: str) -> None:
        """Accepts the board's next card in place of the present one; a lock-out ends with the card."""
        self._registry.expect_new_card(device)
        self.register.forget(device)  # `apply` keeps a row without a key that the aggregator has blocked


class RunMembership(Membership):
    """The devices of a run without a fleet: the aggregator's register alone decides."""

    def __init__(self, run: Path, register: DeviceRegister) -> None:
        self.path, self.register = run, register
        asking: dict[str, list[bytes]] = {}
        for birth in register.refused_births():
            asking.setdefault(birth.device, []).append(birth.public_key)
        self.members = {device: Member(device, "not let in", asking=tuple(keys)) for device, keys in asking.items()}
        for row in register.devices():
            keys = tuple(asking.get(row.device, ()))
            self.members[row.device] = Member(row.device, row.state, row.public_key, row.blocked, keys)

    @property
    def rekey_command(self) -> str:
        return f"hushfleet fleet forget {self.path}"

    def approve(self, device: str, key: bytes) -> None:
        self.register.add([KnownDevice(device, key)])

    def block(self, device: str, reason: str) -> None:
        self.register.block(device, reason)

    def unblock(self, device: str) -> None:
        self.register.unblock(device)

    def forget(self, device: str) -> None:
        self.register.forget(device)


def is_fleet(path: Path) -> bool:
    """Returns whether this is a fleet's folder, and not that of a run without a fleet."""
    return (path / FILE_NAME).exists()


@contextlib.contextmanager
def membership(path: Path) -> Iterator[FleetMembership | RunMembership]:
    """Opens the boards of a fleet's folder, or of the folder of a run without one. Raises `BadInput`."""
    if is_fleet(path):
        folder = FleetFolder(path)
        with FleetRegistry(folder.path) as registry, DeviceRegister(folder.aggregator) as register:
            yield FleetMembership(folder, registry, register)
    elif DeviceRegister.exists(path) or AggregatorStore.exists(path):
        _refuse_run_of_fleet(path)
        with DeviceRegister(path) as register:
            yield RunMembership(path, register)
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


def _refuse_run_of_fleet(path: Path) -> None:
    of = path.resolve().parent.parent
    if is_fleet(of):
        raise BadInput(f"{path} is a run of the fleet {of}, which has the boards: name the fleet's folder")
