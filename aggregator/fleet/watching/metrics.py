"""Writes a fleet as metrics for Prometheus: those of `METRICS`, and no others (docs/watching.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hushfleet.aggregator.fleet.view import FleetView, RolloutView, RunView
from hushfleet.aggregator.fleet.watching.columns import COLUMNS, BoardColumn
from hushfleet.aggregator.storage.board import ACTIVITIES
from hushfleet.wire.format.fields import DeclineCode
from hushfleet.wire.format.messages import RefusedCode

CONTENT_TYPE = CONTENT_TYPE_LATEST
Sample = tuple[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Described:
    """A metric. A name that ends in `_total` is a counter, any other a gauge.

    :param samples: label values, and the value, None if it is not known.
    :param binary: Home Assistant's device class of a metric that is 0 or 1.
    :param codes: all codes, for a counter by code. Prometheus must see each of them at 0 first: it does not count a
        start at 1 as an increase, so an alert would miss the first refusal.
    """

    help: str
    samples: Callable[[FleetView], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    binary: str = ""
    codes: tuple[str, ...] = ()


def _fleet(help: str, value: Callable[[FleetView], float | None], binary: str = "") -> Described:
    return Described(help, lambda view: [((), value(view))], binary=binary)


def _next_opening(view: FleetView) -> float | None:
    opening = None if view.run is None else view.run.next_opening
    return None if opening is None or opening.at <= view.at else opening.at


def _run(help: str, value: Callable[[RunView], float | None]) -> Described:
    return Described(help, lambda view: [] if view.run is None else [((), value(view.run))])


def _codes(help: str, codes: object, counts: Callable[[RunView], Iterable[tuple[str, int]]]) -> Described:
    """:param codes: a `Literal` of all codes."""

    def samples(view: FleetView) -> list[Sample]:
        return [] if view.run is None else [((code,), count) for code, count in counts(view.run)]

    return Described(help, samples, ("code",), codes=get_args(codes))


def _rollout(help: str, value: Callable[[RolloutView], float]) -> Described:
    def samples(view: FleetView) -> list[Sample]:
        return [] if view.rollout is None else [((view.rollout.version,), value(view.rollout))]

    return Described(help, samples, ("version",))


def _of_boards(column: BoardColumn) -> Described:
    def samples(view: FleetView) -> list[Sample]:
        return [((board.device,), column.value(board)) for board in view.boards]

    return Described(column.help, samples, ("board",), column.binary)


def _states(view: FleetView) -> list[Sample]:
    counted = Counter(board.state for board in view.boards)
    return [((state,), counted[state]) for state in ACTIVITIES]


def _run_info(view: FleetView) -> list[Sample]:
    return [] if view.run is None else [((view.run.task, view.run.method, view.run.unit), 1)]


def _board_info(view: FleetView) -> list[Sample]:
    return [
        ((each.device, each.board, each.version, each.health.slot if each.health else "none", each.standing), 1)
        for each in view.boards
    ]


METRICS = {
    "hushfleet_boards": Described("boards by state in the run", _states, ("state",)),
    "hushfleet_boards_pending": _fleet("boards that wait for approval", lambda view: len(view.pending)),
    "hushfleet_boards_urgent": _fleet(
        "boards that need somebody", lambda view: sum(board.is_urgent for board in view.boards)
    ),
    "hushfleet_strangers": _fleet(
        "devices that announced themselves with a key that nobody has accepted", lambda view: len(view.refused_devices)
    ),
    "hushfleet_aggregator_up": _fleet(
        "1 where the aggregator runs; absent where that is not known",
        lambda view: None if view.aggregator == "unknown" else view.aggregator == "running",
        "running",
    ),
    "hushfleet_service_up": _fleet(
        "1 where the fleet service runs and has its broker", lambda view: view.service == "running", "running"
    ),
    "hushfleet_run_info": Described("always 1", _run_info, ("task", "method", "unit")),
    "hushfleet_rounds_planned": _run("rounds of the task", lambda run: run.rounds),
    "hushfleet_rounds_closed": _run("rounds that are done", lambda run: run.rounds_closed),
    "hushfleet_task_ended": _run("1 where the task has ended, maybe before its last round", lambda run: run.finished),
    "hushfleet_round_open_timestamp_seconds": _run(
        "when the open round was opened; absent between rounds", lambda run: run.opened
    ),
    "hushfleet_next_round_timestamp_seconds": _fleet(
        "when the next round opens, or a resting one goes on, by the task's schedule; absent while none waits",
        _next_opening,
    ),
    "hushfleet_paused": _fleet("1 while an operator has paused training", lambda view: view.paused is not None),
    "hushfleet_round_able": _run(
        "boards that can take part in the next round; absent unless it waits for more of them",
        lambda run: None if run.waiting is None else run.waiting.able,
    ),
    "hushfleet_round_needed": _run(
        "boards that the next round needs; absent unless it waits for them",
        lambda run: None if run.waiting is None else run.waiting.needed,
    ),
    "hushfleet_rounds_lost": _run(
        "closed rounds that made no model", lambda run: 0 if run.lost is None else run.lost.rounds
    ),
    "hushfleet_round_asked": _run("devices in the open round's cohort", lambda run: run.asked or None),
    "hushfleet_round_answered": _run(
        "of these, how many updates were accepted, declined or refused", lambda run: run.answered if run.asked else None
    ),
    "hushfleet_accuracy_ratio": _run(
        "of the global model on a public test set; absent where there is none", lambda run: run.accuracy
    ),
    "hushfleet_gain_ratio": _run(
        "gain of boards over training alone, by their noised answers; absent without an evaluation",
        lambda run: run.evaluation.gain.value if run.evaluation else None,
    ),
    "hushfleet_gain_error_ratio": _run(
        "the error of that gain: the truth is within it in 19 of 20 cases",
        lambda run: run.evaluation.gain.error if run.evaluation else None,
    ),
    "hushfleet_epsilon_server": _run(
        "the largest epsilon_server of a board in this task, as charged", lambda run: run.epsilon
    ),
    "hushfleet_epsilon_release": _run("against readers of the models alone", lambda run: run.epsilon_release),
    "hushfleet_uplink_bytes_total": _run("updates of accepted devices", lambda run: run.uplink_bytes),
    "hushfleet_downlink_bytes_total": _run("what they fetched of the global model", lambda run: run.downlink_bytes),
    "hushfleet_declines_total": _codes("declines of boards", DeclineCode, lambda run: run.declines),
    "hushfleet_refusals_total": _codes("refusals by the aggregator", RefusedCode, lambda run: run.refusals),
    "hushfleet_rollout_wanted": _rollout("boards that a roll-out is for", lambda rollout: rollout.wanted),
    "hushfleet_rollout_reached": _rollout(
        "of these, how many run the release for good", lambda rollout: rollout.reached
    ),
    "hushfleet_rollout_returned": _rollout(
        "of these, how many went back to the former release", lambda rollout: rollout.returned
    ),
    "hushfleet_board_info": Described("always 1", _board_info, ("board", "profile", "version", "slot", "standing")),
    **{f"hushfleet_board_{column.metric}": _of_boards(column) for column in COLUMNS if column.metric},
}


def metrics(view: FleetView) -> bytes:
    """Returns the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fleet(view))
    return generate_latest(registry)


class _Fleet(Collector):
    def __init__(self, view: FleetView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yields the known values; unknown ones are left out, never reported as zero."""
        for name, described in METRICS.items():
            family = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
                name, described.help, labels=described.labels
            )
            samples = dict(described.samples(self._view))
            if self._view.run is not None:
                samples = {(code,): 0 for code in described.codes} | samples
            for labels, value in samples.items():
                if value is not None:
                    family.add_metric(labels, value)
            yield family
