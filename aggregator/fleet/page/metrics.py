"""A fleet as metrics for Prometheus: those of `METRICS`, and no others (docs/watching.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hushfleet.aggregator.fleet.view import BoardView, FleetView
from hushfleet.aggregator.results.fleet_timeline import ACTIVITIES

CONTENT_TYPE = CONTENT_TYPE_LATEST

Sample = tuple[tuple[str, ...], float | None]


class Described(NamedTuple):
    """A metric: what it says, and its labels. Names that end in `_total` are counters, all others gauges."""

    help: str
    labels: tuple[str, ...] = ()


_BOARD = ("board",)
METRICS = {
    "hushfleet_boards": Described("boards by state in the run", ("state",)),
    "hushfleet_boards_pending": Described("boards that wait for approval"),
    "hushfleet_boards_urgent": Described("boards that need somebody"),
    "hushfleet_strangers": Described("devices that announced themselves with a key that nobody has accepted"),
    "hushfleet_aggregator_up": Described("1 where the aggregator runs; absent where that is not known"),
    "hushfleet_service_up": Described("1 where the fleet service runs and has its broker"),
    "hushfleet_run_info": Described("always 1", ("task", "method", "unit")),
    "hushfleet_rounds_planned": Described("rounds of the task"),
    "hushfleet_rounds_closed": Described("rounds that are done"),
    "hushfleet_round_open_timestamp_seconds": Described("when the open round was opened; absent between rounds"),
    "hushfleet_round_asked": Described("devices in the open round's cohort"),
    "hushfleet_round_answered": Described("of these, how many updates were accepted, declined or refused"),
    "hushfleet_accuracy_ratio": Described("of the global model on a public test set; absent where there is none"),
    "hushfleet_epsilon_server": Described("the largest epsilon_server of a board in this task, as charged"),
    "hushfleet_epsilon_release": Described("against readers of the models alone"),
    "hushfleet_uplink_bytes_total": Described("updates of accepted devices"),
    "hushfleet_downlink_bytes_total": Described("what they fetched of the global model"),
    "hushfleet_declines_total": Described("declines of boards", ("code",)),
    "hushfleet_refusals_total": Described("refusals by the aggregator", ("code",)),
    "hushfleet_rollout_wanted": Described("boards that a roll-out is for", ("version",)),
    "hushfleet_rollout_reached": Described("of these, how many run the release for good", ("version",)),
    "hushfleet_rollout_returned": Described("of these, how many went back to the former release", ("version",)),
    "hushfleet_board_info": Described("always 1", ("board", "profile", "version", "slot", "standing")),
    "hushfleet_board_up": Described("1 where the board is connected", _BOARD),
    "hushfleet_board_urgent": Described("1 where the board needs somebody", _BOARD),
    "hushfleet_board_seen_timestamp_seconds": Described("when something came from the board last", _BOARD),
    "hushfleet_board_uptime_seconds": Described("of its client", _BOARD),
    "hushfleet_board_disk_used_ratio": Described("in steps of a tenth", _BOARD),
    "hushfleet_board_memory_used_ratio": Described("in steps of a tenth", _BOARD),
    "hushfleet_board_temperature_celsius": Described("of its processor, in steps of five", _BOARD),
    "hushfleet_board_throttled": Described("1 where it is slowed down, for heat or weak power", _BOARD),
    "hushfleet_board_frozen": Described("1 where it hears of no newer release, or gets none, for a week", _BOARD),
    "hushfleet_board_certificate_expiry_timestamp_seconds": Described("when its certificate ends", _BOARD),
    "hushfleet_board_rounds_total": Described("rounds in which its update was accepted", _BOARD),
    "hushfleet_board_epsilon_server": Described("of this task, as the board said with its latest update", _BOARD),
    "hushfleet_board_spent_epsilon": Described("epsilon_server over all tasks, as charged", _BOARD),
    "hushfleet_board_limit_epsilon": Described("what its card allows", _BOARD),
    "hushfleet_board_sent_bytes_total": Described("of its accepted updates", _BOARD),
}


def metrics(view: FleetView) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fleet(view))
    return generate_latest(registry)


def samples(view: FleetView) -> dict[str, list[Sample]]:
    """By the name of the metric: the values of its labels, and its value; None where that is not known."""
    found = {**_of_fleet(view), **_of_run(view)}
    for board in view.boards:
        for name, sample in _of_board(board).items():
            found.setdefault(name, []).append(sample)
    return found


class _Fleet(Collector):
    def __init__(self, view: FleetView) -> None:
        self._samples = samples(view)

    def collect(self) -> Iterator[Metric]:
        """What is not known is left out, never zero."""
        for name, described in METRICS.items():
            counts = name.endswith("_total")
            family = (CounterMetricFamily if counts else GaugeMetricFamily)(
                name, described.help, labels=described.labels
            )
            for labels, value in self._samples.get(name, ()):
                if value is not None:
                    family.add_metric(labels, value)
            yield family


def _of_fleet(view: FleetView) -> dict[str, list[Sample]]:
    states = Counter(board.state for board in view.boards)
    found: dict[str, list[Sample]] = {
        "hushfleet_boards": [((state,), states[state]) for state in ACTIVITIES],
        "hushfleet_boards_pending": [((), len(view.pending))],
        "hushfleet_boards_urgent": [((), sum(board.is_urgent for board in view.boards))],
        "hushfleet_strangers": [((), len(view.strangers))],
        "hushfleet_aggregator_up": [((), None if view.aggregator == "unknown" else view.aggregator == "running")],
        "hushfleet_service_up": [((), view.service == "running")],
    }
    if (rollout := view.rollout) is not None:
        for name in ("wanted", "reached", "returned"):
            found[f"hushfleet_rollout_{name}"] = [((rollout.version,), getattr(rollout, name))]
    return found


def _of_run(view: FleetView) -> dict[str, list[Sample]]:
    run = view.run
    if run is None:
        return {}
    asked, answered = (run.asked, run.answered) if run.open_round is not None and run.asked else (None, None)
    return {
        "hushfleet_run_info": [((run.task, run.method, run.unit), 1)],
        "hushfleet_rounds_planned": [((), run.rounds)],
        "hushfleet_rounds_closed": [((), run.rounds_closed)],
        "hushfleet_round_open_timestamp_seconds": [((), run.opened)],
        "hushfleet_round_asked": [((), asked)],
        "hushfleet_round_answered": [((), answered)],
        "hushfleet_accuracy_ratio": [((), run.accuracy)],
        "hushfleet_epsilon_server": [((), run.epsilon)],
        "hushfleet_epsilon_release": [((), run.epsilon_release)],
        "hushfleet_uplink_bytes_total": [((), run.uplink_bytes)],
        "hushfleet_downlink_bytes_total": [((), run.downlink_bytes)],
        "hushfleet_declines_total": [((code,), count) for code, count in run.declines],
        "hushfleet_refusals_total": [((code,), count) for code, count in run.refusals],
    }


def _of_board(board: BoardView) -> dict[str, Sample]:
    values: dict[str, float | None] = {
        "up": board.is_there,
        "urgent": board.is_urgent,
        "seen_timestamp_seconds": board.seen,
        "uptime_seconds": board.uptime_s,
        "disk_used_ratio": _ratio(board.disk_percent),
        "memory_used_ratio": _ratio(board.memory_percent),
        "temperature_celsius": board.temperature_c,
        "throttled": board.throttled,
        "frozen": None if board.health_at is None else bool(board.freeze),
        "certificate_expiry_timestamp_seconds": board.certificate_end,
        "rounds_total": board.rounds,
        "epsilon_server": board.epsilon,
        "spent_epsilon": board.spent,
        "limit_epsilon": board.limit,
        "sent_bytes_total": board.sent_bytes,
    }
    found: dict[str, Sample] = {f"hushfleet_board_{name}": ((board.device,), value) for name, value in values.items()}
    found["hushfleet_board_info"] = ((board.device, board.board, board.version, board.slot, board.standing), 1)
    return found


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100
