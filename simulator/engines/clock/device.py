"""One device on the virtual clock: its attempt at a round as a row of moments, and what it has done and spent so far.

An attempt is laid out whole when it begins. Whatever ends or disturbs it before its end (a newer plan, a power cut, a
cut network) is a moment that splits the row: `boundary` says when training would notice, and before or after
`commit_at` is the difference between nothing and a round's privacy.

Devices are not processes of a simulation library: what a round came to is known when it closes, also for the devices
that still train then. A row says whether such a device will commit; a process would have to be run on to know it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.simulator.boards import BoardKind, FleetMix
from hushfleet.simulator.engines.clock.device_time import WANTS_S, Costs, DeviceTimes, device_times
from hushfleet.simulator.engines.clock.sizes import Download, Sizes
from hushfleet.simulator.schedule import Schedule

_ROUNDING_S = 1e-6  # a moment that was added up is this much after itself


class Broadcasts:
    """The passes over one blob: wants are gathered for a moment, then each chunk is broadcast once for all.

    Aggregator and broker send at once what is due; links are the bottleneck. What is broadcast while a device waits
    for the rest of an earlier pass comes to it as well, and costs its link.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []

    def want(self, at: float) -> float:
        """When the pass starts that answers a want that arrives at `at`; a new one, or one that still gathers."""
        place = bisect_left(self._starts, at)
        if place < len(self._starts) and self._starts[place] - WANTS_S <= at:
            return self._starts[place]
        start = at + WANTS_S
        insort(self._starts, start)
        return start

    def passes(self, after: float, before: float) -> int:
        """How many passes start after one moment and before another."""
        return max(0, bisect_left(self._starts, before) - bisect_right(self._starts, after))


@dataclass(slots=True)
class Attempt:
    """A device's work for one round; moments in virtual seconds.

    :param deadline_at: when it gives up training.
    :param download: what brings the global model; None where the device holds it already.
    :param broadcasts: of what is downloaded.
    :param pass_at: when the broadcast begins that brings the model.
    :param model_at: when the model has come in whole.
    :param train_at: when the model is stored and the first batch begins.
    :param last_at: when the last batch begins.
    :param trained_at: when the last batch ends.
    :param commit_at: when the update is in the device's store.
    :param sent_from: when sending begins; later than `commit_at` only after a loss of the network.
    :param arrive_at: when the update's last byte is at the aggregator.
    :param wire_bytes: of offer and chunks.
    :param cut_at: when the network was lost, while it is.
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
        """Everything from the model on comes later."""
        for name in ("pass_at", "model_at", "train_at", "last_at", "trained_at", "commit_at", "sent_from", "arrive_at"):
            setattr(self, name, getattr(self, name) + by_s)


class Ending(NamedTuple):
    """The end of an attempt that was not accepted.

    :param computed_until: likewise `sent_until`.
    :param free_at: when the device can begin another one.
    """

    committed: bool
    computed_until: float
    sent_until: float
    free_at: float


@dataclass(slots=True)
class Spent:
    """Totals of one device so far, for a forecast.

    :param up_bytes: whole packets; likewise `down_bytes`.
    :param chosen: rounds, of which each is then `used`, `late`, `given_up`, `declined` or `lost`.
    :param charged: rounds by the size of their cohort; in a forecast 0: rounds in which it has answered a
        question.
    :param unused: those of them that went into no model.
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


@dataclass(slots=True, eq=False)
class ClockDevice:
    """A device's state on the virtual clock.

    :param kind: number of its row in the fleet's mix.
    :param board: the profile's name.
    :param fresh: its process has had no link yet.
    :param announced_from: what had been announced to all when its link came up.
    :param held: version of the global model in its store; -1: none.
    :param number: of the attempt: events of an earlier one are void. Likewise `link_number`, of the connection.
    :param in_sync: the aggregator has the device's public state.
    """

    name: str
    times: DeviceTimes
    kind: int = 0
    board: str = "generic-x86"
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
    spent: Spent = field(default_factory=Spent)

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
        """The attempt from its beginning, if nothing disturbs it. The want must be the latest so far.

        :param download: what brings the round's global model; None where the device holds it.
        :param broadcasts: of what is downloaded.
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
        """The link is up again since `at`: what was on its way goes on, what was not goes out as it becomes ready."""
        cut_at, attempt.cut_at = attempt.cut_at, None
        if cut_at is None:
            return
        times = self.times
        if attempt.broadcasts is not None and cut_at < attempt.model_at:
            # asks for the chunks that it lacks; those that came are kept
            missing_from = max(cut_at, attempt.pass_at + times.latency_s)
            goes_on_at = attempt.broadcasts.want(at + times.latency_s) + times.latency_s
            attempt.delay(goes_on_at - missing_from)
        elif cut_at < attempt.sent_from:
            self.send_again(attempt, at)
        else:
            # offers, is told what is missing, and sends that
            by_s = at + 2 * times.latency_s - cut_at
            attempt.sent_from += by_s
            attempt.arrive_at += by_s

    def send_again(self, attempt: Attempt, at: float) -> None:
        """The whole update is sent, from `at` on."""
        attempt.sent_from = max(at, attempt.commit_at)
        attempt.arrive_at = attempt.sent_from + self.times.latency_s + attempt.wire_bytes * self.times.up_s_per_byte

    def send_in_vain(self, attempt: Attempt, until: float) -> None:
        """Counts the bytes that have left the device by then and must be sent again."""
        self.spent.up_bytes += self.sent_bytes(attempt, until)

    def sent_bytes(self, attempt: Attempt, until: float) -> float:
        """How much of the update has left the device by then."""
        sending_s = attempt.arrive_at - self.times.latency_s - attempt.sent_from
        if until <= attempt.sent_from:
            return 0.0
        share = min(1.0, (until - attempt.sent_from) / sending_s) if sending_s > 0 else 1.0
        return attempt.wire_bytes * share

    def received_bytes(self, attempt: Attempt, until: float) -> float:
        """How much of the global model has come by then, with the passes for others that came along."""
        if attempt.download is None or attempt.broadcasts is None:
            return 0.0
        whole_at, own_pass_at = attempt.model_at, attempt.pass_at
        began_at, fetch_s = own_pass_at + self.times.latency_s, self.times.download_s(attempt.download)
        more = attempt.broadcasts.passes(own_pass_at + _ROUNDING_S, min(whole_at, until))
        if until >= whole_at:
            return attempt.download.wire * (1.0 + more)
        return attempt.download.wire * ((until - began_at) / fetch_s + more) if until > began_at else 0.0

    def ending(self, attempt: Attempt, closed_at: float) -> Ending:
        """Ends an attempt whose round closes without it.

        Linked, the device hears of it and gives up before its next batch; without a network it goes on until its own
        deadline. Once the last batch has begun, it commits.
        """
        times = self.times
        if self.committed_round == attempt.round:  # and was switched off since
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
        """Seconds of computing by then."""
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
    """New devices, in the order of their names.

    :param samples: training samples of each device; where there are fewer numbers than devices, again and again.
    """
    config, privacy = prepared.method.config, prepared.spec.privacy

    @cache
    def times(kind: BoardKind, count: int, write_mb_s: float | None, memory_mib: int | None) -> DeviceTimes:
        return device_times(
            kind,
            samples=count,
            batch_size=config.batch_size,
            epochs=config.local_epochs,
            local_steps=config.local_steps,
            sampled=(privacy.batches, privacy.sample_rate) if privacy.unit == "record" else None,
            costs=costs,
            sizes=sizes,
            task_memory_mib=prepared.spec.memory_mib,
            write_mb_s=write_mb_s,
            memory_mib=memory_mib,
        )

    return [
        ClockDevice(
            name,
            times(
                mix[index],
                samples[index % len(samples)],
                schedule.write_mb_s.get(name),
                schedule.memory_mib.get(name),
            ),
            kind=mix.dealt[index],
            board=mix[index].profile,
        )
        for index, name in enumerate(names)
    ]
