"""Keeps the devices that the aggregator of a run without a fleet accepts: the register alone decides.

The operator adds devices, or they come while enrolment is open. In a fleet, `FleetMembers` takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Board
from hushfleet.errors import BadInput
from hushfleet.sqlite_file import Row

_SELECT = "SELECT id, public_key, pinned, blocked FROM devices"


class DeviceRegister(ActivityStore):
    """The register of a run folder."""

    def devices(self) -> list[Board]:
        """Returns all entries, by id."""
        return [_known(row) for row in self.rows(f"{_SELECT} ORDER BY id")]

    def device(self, device: str) -> Board | None:
        row = self.row(f"{_SELECT} WHERE id = ?", (device,))
        return None if row is None else _known(row)

    def add(self, devices: Iterable[Board]) -> None:
        """Adds devices that the operator accepts, or has blocked.

        A device that is known already stays unchanged, so that a list can be given again at each start; a key is added
        if none was known. Raises `BadInput`, and adds no device, if two devices would have the same key, or one device
        two keys.
        """
        with self.transaction():
            for new in devices:
                device, key = new.device, new.public_key
                row = self.device(device)
                held = None if row is None else row.public_key
                if held is not None and key is not None and key != held:
                    raise BadInput(
                        f"{device} is known with the key {held.hex()}, not with {key.hex()}. If its card was "
                        f"flashed anew: hushfleet fleet forget {self.path.parent} {device}"
                    )
                owner = self.row("SELECT id FROM devices WHERE public_key = ?", (key,))
                if key is not None and owner is not None and owner[0] != device:
                    raise BadInput(f"the key {key.hex()} belongs to {owner[0]}; {device} needs a key of its own")
                self.write(
                    "INSERT INTO devices (id, public_key, pinned, blocked) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) "
                    "DO UPDATE SET public_key = ifnull(?2, public_key), pinned = (?3 AND pinned)",
                    (device, key, new.standing == "pinned", new.reason if new.is_blocked else None),
                )
                self.write("DELETE FROM refused_births WHERE id = ?", (device,))

    def approve(self, device: str, public_key: bytes) -> None:
        """Accepts a device that has asked with this key. Raises `BadInput` for the key of another device."""
        self.add([Board(device, public_key=public_key)])

    def take_over(self, devices: Iterable[Board]) -> None:
        """Inserts whole rows unchanged; rows of devices that are known already stay."""
        with self.transaction():
            self.write_all(
                "INSERT INTO devices (id, public_key, pinned, blocked) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [
                    (row.device, row.public_key, row.standing == "pinned", row.reason if row.is_blocked else None)
                    for row in devices
                ],
            )

    def pin(self, keys: Mapping[str, bytes], *, may_add: bool) -> None:
        """Stores keys that were seen for the first time, in one transaction.

        :param may_add: whether to add devices that are not in the register.
        """
        with self.transaction():
            first_seen = "UPDATE devices SET public_key = ?2, pinned = 1 WHERE id = ?1 AND public_key IS NULL"
            self.write_all(first_seen, keys.items())
            if may_add:
                added = "INSERT INTO devices (id, public_key, pinned) VALUES (?, ?, 1) ON CONFLICT (id) DO NOTHING"
                self.write_all(added, keys.items())

    def forget(self, device: str) -> bool:
        """Removes the device and its key; returns False if it was not there."""
        return self.write("DELETE FROM devices WHERE id = ?", (device,)) > 0


def _known(row: Row) -> Board:
    device, key, pinned, blocked = row
    found = Board(device, public_key=key, standing="expected" if key is None else "pinned" if pinned else "known")
    return found if blocked is None else found.blocked(blocked)
