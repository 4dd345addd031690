"""Models one device on the virtual clock: its attempt at a round as a list of times, and its work and costs so far.

The whole attempt is computed when it starts. An event that ends or disturbs it early (a newer plan, a power cut, a cut
network) divides the list: `boundary` returns when training would notice it. An attempt that ends before `commit_at`
costs no privacy; after it, it costs the privacy of a round.

Devices are not processes of a simulation library, because the outcome of a round must be known when it closes, also for
devices that still train then. The list shows whether such a device will commit; a process would first have to run on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.schedule import Schedule
from hushfleet.simulator.world.outcomes import FleetDevice, fleet_devices
from hushfleet.simulator.world.sizes import Download, Sizes
from hushfleet.simulator.world.times import WANTS_S, Costs

_ROUNDING_S = 1e-6  # tolerance for times that are sums


class Broadcasts:
    """The broadcasts of one blob: requests are collected for a moment, then each chunk is broadcast once for all.

    Aggregator and broker send without delay; the links are the bottleneck. A device that still waits for the rest of
    an earlier broadcast also receives the later ones, which load its link.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []

    def want(self, at: float) -> float:
        """Returns the start of the broadcast for a request that arrives at `at`: a new one, or one still collecting."""
        place = bisect_left(self._starts, at)
        if place < len(self._starts) and self._starts[place] - WANTS_S <= at:
            return self._starts[place]
        start = at + WANTS_S
        insort(self._starts, start)
        return start

    def passes(self, after: float, before: float) -> int:
        """Returns how many broadcasts start between these two times."""
        return max(0, bisect_left(self._starts, before) - bisect_right(self._starts, after))


@dataclass(slots=True)
class Attempt:
    """A device's work for one round; moments in virtual seconds.

    :param deadline_at: when it gives up training.
    :param download: how it receives the global model; None if the device already holds it.
    :param broadcasts: the broadcasts of the download.
    :param pass_at: when the broadcast of the model starts.
    :param model_at: when the whole model has arrived.
    :param train_at: when the model is stored and the first batch starts.
    :param last_at: when the last batch starts.
    :param trained_at: when the last batch ends.
    :param commit_at: when the update is in the device's store.
    :param sent_from: when sending starts; later than `commit_at` only if the network was lost.
    :param arrive_at: when the update's last byte is at the aggregator.
    :param wire_bytes: size of offer and chunks.
    :param cut_at: when the network was lost; None while there is a network.
    """

    round: int
    deadline_at: float
    download: Download | None
    broadcasts: Broadcasts | None
    pass_at: float
    model_at: float
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
        """Moves all times from the model's broadcast on by `by_s`."""
        for name in ("pass_at", "model_at", "train_at", "last_at", "trained_at", "commit_at", "sent_from", "arrive_at"):
            setattr(self, name, getattr(self, name) + by_s)


class Ending(NamedTuple):
    """The end of an attempt that was not accepted.

    :param computed_until: when computing ended; `sent_until`: when sending ended.
    :param free_at: when the device can start another attempt.
    """

    committed: bool
    computed_until: float
    sent_until: float
    free_at: float


@dataclass(slots=True, eq=False)
class ClockDevice(FleetDevice):
    """A device's state on the virtual clock.

    :param fresh: True if its process has had no link yet.
    :param announced_from: bytes that had been announced to all when its link came up.
    :param held: version of the global model in its store; -1 if none.
    :param number: number of the attempt; events of earlier ones are ignored. `link_number`: the same of the connection.
    :param in_sync: True if the aggregator has the device's public state.
    """

    on: bool = False
    cut: bool = False
    linked: bool = False
    fresh: bool = False
    announced_from: int | None = None
    on_since: float = 0.0
    down_since: float = 0.0
    has_task: bool = False
    task_at: float = 0.0
    free_at: float = 0.0
    held: int = -1
    attempt: Attempt | None = None
    number: int = 0
    link_number: int = 0
    committed_round: int = 0
    participations: int = 0
    in_sync: bool = True

    def lay_out(
        self,
        *,
        round: int,
        began_at: float,
        deadline_at: float,
        sizes: Sizes,
        download: Download | None,
        broadcasts: Broadcasts | None,
    ) -> Attempt:
        """Computes an attempt that nothing disturbs. Its request for the model must be the latest one so far.

        :param download: how the round's global model arrives; None if the device holds it.
        :param broadcasts: the broadcasts of the download.
        """
        times = self.times
        pass_at = model_at = train_at = began_at
        if download is not None and broadcasts is not None:
            pass_at = broadcasts.want(began_at + times.latency_s)
            model_at = pass_at + times.latency_s + times.download_s(download)
            train_at = model_at + times.download_store_s(download)
        last_at = train_at + max(times.steps - 1, 0) * times.step_s
        trained_at = train_at + times.train_s
        update = sizes.update(self.participations, with_public=not self.in_sync)
        commit_at = trained_at + times.release_s + update.stored * times.write_s_per_byte
        self.number += 1
        self.attempt = Attempt(
            round=round,
            deadline_at=deadline_at,
            download=download,
            broadcasts=broadcasts,
            pass_at=pass_at,
            model_at=model_at,
            train_at=train_at,
            last_at=last_at,
            trained_at=trained_at,
            commit_at=commit_at,
            sent_from=commit_at,
            arrive_at=commit_at + times.latency_s + update.wire * times.up_s_per_byte,
            update_bytes=update.blob,
            wire_bytes=update.wire,
        )
        return self.attempt

    def resume(self, attempt: Attempt, at: float) -> None:
        """Continues after the link is up again at `at`: open transfers continue, others start when they are ready."""
        cut_at, attempt.cut_at = attempt.cut_at, None
        if cut_at is None:
            return
        times = self.times
        if attempt.broadcasts is not None and cut_at < attempt.model_at:
            # asks for the missing chunks; those that arrived are kept
            missing_from = max(cut_at, attempt.pass_at + times.latency_s)
            goes_on_at = attempt.broadcasts.want(at + times.latency_s) + times.latency_s
            attempt.delay(goes_on_at - missing_from)
        elif cut_at < attempt.sent_from:
            self.send_again(attempt, at)
        else:
            # offers the update, receives the list of missing chunks, and sends those
            by_s = at + 2 * times.latency_s - cut_at
            attempt.sent_from += by_s
            attempt.arrive_at += by_s

    def send_again(self, attempt: Attempt, at: float) -> None:
        """Sends the whole update, starting at `at`."""
        attempt.sent_from = max(at, attempt.commit_at)
        attempt.arrive_at = attempt.sent_from + self.times.latency_s + attempt.wire_bytes * self.times.up_s_per_byte

    def send_in_vain(self, attempt: Attempt, until: float) -> None:
        """Counts the bytes that have left the device by `until` and must be sent again."""
        self.spent.up_bytes += self.sent_bytes(attempt, until)

    def sent_bytes(self, attempt: Attempt, until: float) -> float:
        """Returns how many bytes of the update have left the device by `until`."""
        sending_s = attempt.arrive_at - self.times.latency_s - attempt.sent_from
        if until <= attempt.sent_from:
            return 0.0
        share = min(1.0, (until - attempt.sent_from) / sending_s) if sending_s > 0 else 1.0
        return attempt.wire_bytes * share

    def received_bytes(self, attempt: Attempt, until: float) -> float:
        """Returns the bytes of the global model received by `until`, including broadcasts meant for other devices."""
        if attempt.download is None or attempt.broadcasts is None:
            return 0.0
        whole_at, own_pass_at = attempt.model_at, attempt.pass_at
        began_at, fetch_s = own_pass_at + self.times.latency_s, self.times.download_s(attempt.download)
        more = attempt.broadcasts.passes(own_pass_at + _ROUNDING_S, min(whole_at, until))
        if until >= whole_at:
            return attempt.download.wire * (1.0 + more)
        return attempt.download.wire * ((until - began_at) / fetch_s + more) if until > began_at else 0.0

    def ending(self, attempt: Attempt, closed_at: float) -> Ending:
        """Returns how an attempt ends whose round closes without it.

        A linked device hears of the close and gives up before its next batch; without a network it continues until its
        own deadline. After the last batch has started, it commits.
        """
        times = self.times
        if self.committed_round == attempt.round:  # and was switched off after that
            return Ending(True, attempt.commit_at, attempt.sent_from, self.free_at)
        stops_at, cut_at = closed_at + times.latency_s, attempt.cut_at
        if not self.linked:
            stops_at = cut_at if cut_at is not None and cut_at < attempt.model_at else attempt.deadline_at
        if attempt.last_at > attempt.deadline_at:
            stops_at = min(stops_at, attempt.deadline_at)
        if stops_at <= attempt.last_at:
            ends_at = times.boundary(attempt.train_at, stops_at) if stops_at > attempt.train_at else stops_at
            return Ending(False, ends_at, ends_at, ends_at)
        ends_at = max(stops_at, attempt.commit_at)
        return Ending(True, ends_at, stops_at if cut_at is None else cut_at, ends_at)

    def worked_s(self, attempt: Attempt, until: float) -> float:
        """Returns the seconds of computing by `until`."""
        return max(0.0, min(until, attempt.trained_at + self.times.release_s) - attempt.train_at)


def make_devices(
    prepared: PreparedTask,
    mix: FleetMix,
    *,
    names: Sequence[str],
    samples: Sequence[int],
    costs: Costs,
    sizes: Sizes,
    schedule: Schedule,
) -> list[ClockDevice]:
    """Returns new devices, as `fleet_devices` does."""
    made = fleet_devices(prepared, mix, names=names, samples=samples, costs=costs, sizes=sizes, schedule=schedule)
    return [ClockDevice(each.name, each.times, kind=each.kind, board=each.board) for each in made]
