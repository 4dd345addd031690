"""Counts the bytes, seconds and charges of devices, and logs lines about them. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from hushfleet.simulator.engines.clock.device import Attempt, ClockDevice
from hushfleet.simulator.engines.clock.events import EventQueue, OpenRound
from hushfleet.simulator.world.sizes import Sizes
from hushfleet.wire.format.messages import Ask, Birth, Known, Want


class Accounts:
    """Keeps the accounts of one fleet; `version` is the version of the global model."""

    def __init__(self, queue: EventQueue, sizes: Sizes) -> None:
        self._queue, self._sizes = queue, sizes
        self._announced = 0  # bytes of plans that every linked device has received
        self.version = 0

    def announce(self, named: int) -> int:
        """Announces a plan that names this many devices to all linked devices; returns the plan's bytes."""
        plan_bytes = self._sizes.plan_wire_bytes(named)
        self._announced += plan_bytes
        return plan_bytes

    def count_link(self, device: ClockDevice, *, linked_at: float, named: int) -> None:
        """Counts a link that is up since `linked_at`; a new process loads the task, and a new device fetches it first.

        :param named: number of devices that the retained plan names.
        """
        sizes, spent = self._sizes, device.spent
        spent.up_bytes += sizes.packet[Birth] + sizes.packet[Ask]
        spent.down_bytes += sizes.plan_wire_bytes(named) + sizes.packet[Known]
        device.announced_from = self._announced
        if device.fresh:
            device.fresh = False
            device.free_at, device.task_at = linked_at, linked_at + device.times.load_s
            if not device.has_task:
                device.has_task = True
                device.task_at += device.times.fetch_s
                spent.up_bytes += len(sizes.task_blobs) * sizes.packet[Want]
                spent.down_bytes += sum(sizes.blob_wire_bytes(size, down=True) for size in sizes.task_blobs)

    def hears_nothing(self, device: ClockDevice) -> None:
        """Stops counting announced plans for a device whose link ends."""
        if device.announced_from is not None:
            device.spent.down_bytes += self._announced - device.announced_from
            device.announced_from = None

    def end_attempt(
        self, device: ClockDevice, attempt: Attempt, until: float, *, sent_until: float | None = None
    ) -> None:
        """Counts the part of an attempt that was carried out.

        :param until: end of computing and receiving. `sent_until`: end of sending; None if it is the same.
        """
        spent, sent_until = device.spent, until if sent_until is None else sent_until
        spent.compute_s += device.worked_s(attempt, until)
        spent.up_bytes += device.sent_bytes(attempt, sent_until)
        spent.down_bytes += device.received_bytes(attempt, until)
        if attempt.download is not None:
            spent.up_bytes += attempt.download.blobs * self._sizes.packet[Want]
        if until >= attempt.train_at:
            device.held = self.version
            spent.up_bytes += 2 * self._sizes.packet[Birth]  # training, and ready again
            latency_s = device.times.latency_s
            self.presence(device, "training", at=attempt.train_at + latency_s)
            self.presence(device, "ready", at=min(until, attempt.commit_at) + latency_s)
            if until >= attempt.commit_at and sent_until >= attempt.sent_from:
                self._queue.log("offer", at=attempt.sent_from + latency_s, round=attempt.round, device=device.name)
        device.attempt = None
        device.number += 1

    def charge(self, device: ClockDevice, current: OpenRound) -> None:
        """Charges a device that has committed its update of this round, once."""
        if device.committed_round != current.number:
            device.committed_round = current.number
            device.participations += 1
            device.in_sync = False
            device.spent.charged[current.size] += 1

    def fates(self, current: OpenRound, cohort: Iterable[ClockDevice], *, used: bool) -> dict[str, list[str]]:
        """Ends the attempts of a closing round and counts their outcomes; returns names by the field of `Spent`.

        :param used: whether there is a new global model.
        """
        fates: dict[str, list[str]] = {"used": [], "late": [], "declined": [], "lost": [], "given_up": []}
        for device in cohort:
            fate = self._fate(device, current)
            fates[fate].append(device.name)
            if fate != "used":  # used updates are counted when they are accepted
                setattr(device.spent, fate, getattr(device.spent, fate) + 1)
            if fate == "late" or (fate == "used" and not used):
                device.spent.unused[current.size] += 1
        return fates

    def _fate(self, device: ClockDevice, current: OpenRound) -> str:
        """Returns the outcome of a closing round for a device of its cohort, as the name of a count of `Spent`."""
        if device.name in current.arrivals:
            return "used"
        attempt = device.attempt
        if attempt is not None and self.commits_late(device, attempt, current):
            return "late"
        if device.name in current.declined:
            return "declined"
        return "lost" if attempt is None else "given_up"

    def commits_late(self, device: ClockDevice, attempt: Attempt, current: OpenRound) -> bool:
        """Ends an attempt whose round is over; returns True if its update was committed, or still will be."""
        ending = device.ending(attempt, self._queue.now)
        device.free_at = ending.free_at
        self.end_attempt(device, attempt, ending.computed_until, sent_until=ending.sent_until)
        if ending.committed:
            self.charge(device, current)
        return ending.committed

    def presence(self, device: ClockDevice, state: str, *, at: float | None = None) -> None:
        """Logs a change of presence; nothing else depends on it."""
        self._queue.log("presence", at=at, device=device.name, state=state, board=device.board)
