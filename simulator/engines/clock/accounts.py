"""What devices have computed, sent, received and spent, and the events that their parts of a round leave in the log."""

from __future__ import annotations

from hushfleet.simulator.engines.clock.agenda import Agenda
from hushfleet.simulator.engines.clock.device import Device, Part
from hushfleet.simulator.engines.clock.sizes import Sizes


class Accounts:
    """One for a whole fleet; what it counts is kept in the devices' `spent`."""

    def __init__(self, sizes: Sizes, agenda: Agenda) -> None:
        self._sizes = sizes
        self._agenda = agenda
        self._task_wire_bytes = sum(sizes.blob_wire_bytes(size, down=True) for size in sizes.task_blobs)
        self._announced = 0  # bytes of plans that every linked device has received

    def announced(self, named: int) -> int:
        """A plan that names so many devices goes to all that are linked. Its bytes."""
        plan_bytes = self._sizes.plan_wire_bytes(named)
        self._announced += plan_bytes
        return plan_bytes

    def linked(self, device: Device, named: int) -> int:
        """A device says that it is there, asks what is known of it, and is given the plan of the moment. Its bytes."""
        plan_bytes = self._sizes.plan_wire_bytes(named)
        device.spent.up_bytes += self._sizes.birth + self._sizes.ask
        device.spent.down_bytes += plan_bytes + self._sizes.known
        device.announced_from = self._announced
        return plan_bytes

    def unlinked(self, device: Device) -> None:
        """The device hears nothing from now on."""
        if device.announced_from is not None:
            device.spent.down_bytes += self._announced - device.announced_from
            device.announced_from = None

    def task_fetched(self, device: Device) -> None:
        device.spent.up_bytes += len(self._sizes.task_blobs) * self._sizes.want
        device.spent.down_bytes += self._task_wire_bytes

    def acknowledged(self, device: Device) -> None:
        device.spent.down_bytes += self._sizes.ack

    def sent_in_vain(self, device: Device, part: Part, until: float) -> None:
        """What has left the device by then will be sent once more."""
        device.spent.up_bytes += device.sent_bytes(part, until)

    def part_ended(self, device: Device, part: Part, *, computed_until: float, sent_until: float) -> None:
        """Counts a part that was laid out, as far as it went."""
        spent, sizes, until = device.spent, self._sizes, computed_until
        spent.compute_s += device.worked_s(part, until)
        spent.up_bytes += device.sent_bytes(part, sent_until)
        spent.down_bytes += device.received_bytes(part, until)
        if part.download is not None:
            spent.up_bytes += part.download.blobs * sizes.want
        if until < part.train_at:
            return
        spent.up_bytes += 2 * sizes.birth  # training, and ready again
        latency_s = device.times.latency_s
        ready_at = min(until, part.commit_at)
        for at, state in ((part.train_at, "training"), (ready_at, "ready")):
            self.note_presence(device, state, at=at + latency_s)
        if until >= part.commit_at and sent_until >= part.sent_from:
            self._agenda.note(part.sent_from + latency_s, "offer", round=part.round, device=device.name)

    def note_presence(self, device: Device, state: str, *, at: float | None = None) -> None:
        moment = self._agenda.now if at is None else at
        self._agenda.note(moment, "presence", device=device.name, state=state, board=device.board)

    def end(self, device: Device) -> None:
        """The run is over."""
        if device.on:
            device.spent.on_s += self._agenda.now - device.on_since
        self.unlinked(device)
