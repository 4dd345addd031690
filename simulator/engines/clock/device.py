"""One device of a computed fleet: its part of a round as a row of moments, and what it has done and spent so far.

A part is laid out whole when it begins. Whatever ends or disturbs it before its end (a newer plan, a power cut, a cut
network) is a moment that splits the row: `boundary` says when training would notice, and before or after `commit_at`
is the difference between nothing and a round's privacy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from hushfleet.simulator.engines.clock.broadcast import Broadcasts
from hushfleet.simulator.engines.clock.device_time import DeviceTimes
from hushfleet.simulator.engines.clock.sizes import Download, Sizes

_HAIR_S = 1e-6  # a moment that was added up is this much after itself


@dataclass(slots=True)
class Part:
    """A device's part of one round; moments in virtual seconds.

    :param began_at: when the device turns to it; :param deadline_at: when it gives up training.
    :param download: what brings the global model; None where the device holds it already.
    :param broadcasts: of what is downloaded.
    :param train_at: when the model is stored and the first batch begins; :param last_at: the last batch begins.
    :param trained_at: the last batch ends; :param commit_at: the update is in the device's store.
    :param arrive_at: the update's last byte is at the aggregator.
    :param sent_from: when sending begins; later than `commit_at` only after a loss of the network.
    :param wire_bytes: of offer and chunks.
    :param cut_at: when the network was lost, while it is.
    """

    round: int
    began_at: float
    deadline_at: float
    download: Download | None
    broadcasts: Broadcasts | None
    train_at: float
    last_at: float
    trained_at: float
    commit_at: float
    sent_from: float
    arrive_at: float
    update_bytes: int
    wire_bytes: int
    cut_at: float | None = None

    def delay(self, by_s: float) -> None:
        """Everything from the model on comes later."""
        self.train_at += by_s
        self.last_at += by_s
        self.trained_at += by_s
        self.commit_at += by_s
        self.sent_from += by_s
        self.arrive_at += by_s


class Ending(NamedTuple):
    """How a part ends that was not accepted: until when it computed and sent, and when the device is free again."""

    committed: bool
    computed_until: float
    sent_until: float
    free_at: float


@dataclass(slots=True)
class Spent:
    """What a device has done so far, for the totals of a forecast.

    :param up_bytes, down_bytes: whole packets; :param charged: rounds by the size of their cohort, and `unused`
        those of them that went into no model.
    """

    up_bytes: float = 0.0
    down_bytes: float = 0.0
    compute_s: float = 0.0
    on_s: float = 0.0
    chosen: int = 0
    used: int = 0
    late: int = 0
    given_up: int = 0
    declined: int = 0
    lost: int = 0
    charged: Counter[int] = field(default_factory=Counter)
    unused: Counter[int] = field(default_factory=Counter)


class Device:
    """A device's state on the virtual clock.

    :param kind: number of its row in the fleet's mix; :param board: the profile's name.
    """

    __slots__ = (
        "announced_from", "board", "committed_round", "cut", "down_since", "free_at", "fresh", "has_task", "held",
        "in_sync", "kind", "link_number", "linked", "name", "number", "on", "on_since", "part", "participations",
        "spent", "task_at", "times",
    )  # fmt: skip

    def __init__(self, name: str, times: DeviceTimes, *, kind: int = 0, board: str = "generic-x86") -> None:
        self.name = name
        self.kind = kind
        self.board = board
        self.times = times
        self.on = False
        self.cut = False
        self.linked = False
        self.fresh = False  # its process has had no link yet
        self.announced_from: int | None = None  # what had been announced to all when its link came up
        self.on_since = 0.0
        self.down_since = 0.0
        self.has_task = False
        self.task_at = 0.0
        self.free_at = 0.0
        self.held = -1  # version of the global model in its store
        self.part: Part | None = None
        self.number = 0  # of the part: events of an earlier one are void
        self.link_number = 0  # of the connection, likewise
        self.committed_round = 0
        self.participations = 0
        self.in_sync = True
        self.spent = Spent()

    def lay_out(
        self,
        *,
        round: int,
        began_at: float,
        deadline_at: float,
        sizes: Sizes,
        download: Download | None,
        broadcasts: Broadcasts | None,
    ) -> Part:
        """The part from its beginning, if nothing disturbs it. The want must be the latest so far.

        :param download: what brings the round's global model; None where the device holds it.
        :param broadcasts: of what is downloaded.
        """
        times = self.times
        train_at = began_at
        if download is not None and broadcasts is not None:
            pass_at = broadcasts.want(began_at + times.latency_s)
            train_at = pass_at + times.latency_s + times.download_s(download) + times.download_store_s(download)
        last_at = train_at + max(times.steps - 1, 0) * times.step_s
        trained_at = train_at + times.train_s
        update = sizes.update(self.participations, with_public=not self.in_sync)
        commit_at = trained_at + times.release_s + update.stored * times.write_s_per_byte
        self.number += 1
        self.part = Part(
            round=round,
            began_at=began_at,
            deadline_at=deadline_at,
            download=download,
            broadcasts=broadcasts,
            train_at=train_at,
            last_at=last_at,
            trained_at=trained_at,
            commit_at=commit_at,
            sent_from=commit_at,
            arrive_at=commit_at + times.latency_s + update.wire * times.up_s_per_byte,
            update_bytes=update.blob,
            wire_bytes=update.wire,
        )
        return self.part

    def holds_model_at(self, part: Part) -> float:
        """When the global model has come in whole."""
        return part.began_at if part.download is None else part.train_at - self.times.download_store_s(part.download)

    def pass_at(self, part: Part) -> float:
        """When its first pass began; the device must have wanted one."""
        return self.holds_model_at(part) - self.times.download_s(part.download) - self.times.latency_s

    def resume(self, part: Part, at: float) -> None:
        """The link is up again since `at`: what was on its way goes on, what was not goes out as it becomes ready."""
        cut_at, part.cut_at = part.cut_at, None
        if cut_at is None:
            return
        times = self.times
        if part.broadcasts is not None and cut_at < self.holds_model_at(part):
            # asks for the chunks that it lacks; those that came are kept
            missing_from = max(cut_at, self.pass_at(part) + times.latency_s)
            goes_on_at = part.broadcasts.want(at + times.latency_s) + times.latency_s
            part.delay(goes_on_at - missing_from)
        elif cut_at < part.sent_from:
            self.send_again(part, at)
        else:
            # offers, is told what is missing, and sends that
            by_s = at + 2 * times.latency_s - cut_at
            part.sent_from += by_s
            part.arrive_at += by_s

    def send_again(self, part: Part, at: float) -> None:
        """The whole update is sent, from `at` on."""
        part.sent_from = max(at, part.commit_at)
        part.arrive_at = part.sent_from + self.times.latency_s + part.wire_bytes * self.times.up_s_per_byte

    def sent_bytes(self, part: Part, until: float) -> float:
        """How much of the update has left the device by then."""
        sending_s = part.arrive_at - self.times.latency_s - part.sent_from
        if until <= part.sent_from:
            return 0.0
        return part.wire_bytes * min(1.0, (until - part.sent_from) / sending_s) if sending_s > 0 else part.wire_bytes

    def received_bytes(self, part: Part, until: float) -> float:
        """How much of the global model has come by then, with the passes for others that came along."""
        if part.download is None or part.broadcasts is None:
            return 0.0
        whole_at, own_pass_at = self.holds_model_at(part), self.pass_at(part)
        began_at, fetch_s = own_pass_at + self.times.latency_s, self.times.download_s(part.download)
        more = part.broadcasts.passes(own_pass_at + _HAIR_S, min(whole_at, until))
        if until >= whole_at:
            return part.download.wire * (1.0 + more)
        return part.download.wire * ((until - began_at) / fetch_s + more) if until > began_at else 0.0

    def ending(self, part: Part, closed_at: float) -> Ending:
        """What becomes of a part whose round closes without it.

        Linked, the device hears of it and gives up before its next batch; without a network it goes on until its own
        deadline. Once the last batch has begun, it commits.
        """
        times = self.times
        if self.committed_round == part.round:  # and was switched off since
            return Ending(True, part.commit_at, part.sent_from, self.free_at)
        stops_at = closed_at + times.latency_s
        if not self.linked:
            no_model = part.cut_at is not None and part.cut_at < self.holds_model_at(part)
            stops_at = part.cut_at if no_model else part.deadline_at
        if part.last_at > part.deadline_at:
            stops_at = min(stops_at, part.deadline_at)
        if stops_at <= part.last_at:
            ends_at = times.boundary(part.train_at, stops_at) if stops_at > part.train_at else stops_at
            return Ending(False, ends_at, ends_at, ends_at)
        ends_at = max(stops_at, part.commit_at)
        return Ending(True, ends_at, stops_at if part.cut_at is None else part.cut_at, ends_at)

    def worked_s(self, part: Part, until: float) -> float:
        """Seconds of computing by then."""
        return max(0.0, min(until, part.trained_at + self.times.release_s) - part.train_at)
