"""Makes the report's sections: plots and tables of the result. Their words are in `templates/sections.jinja`."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hushfleet.aggregator.report import charts
from hushfleet.aggregator.report.charts import PERCENT, Trace, line, over, titled
from hushfleet.aggregator.report.page import (
    BLUE,
    SERIES,
    SOFT,
    Code,
    Facts,
    Heading,
    Picture,
    Pictures,
    Plot,
    Prose,
    Section,
    SectionPart,
    missing,
    present,
)
from hushfleet.aggregator.report.readable import LIFETIME, number, points, size
from hushfleet.aggregator.report.sweeps import cost_db, noise_table, seed_table
from hushfleet.aggregator.report.tables import PageCell, Table
from hushfleet.aggregator.report.verdict import LIMIT, Headline
from hushfleet.aggregator.report.words import Words
from hushfleet.aggregator.results.fleet_state import Outcome
from hushfleet.aggregator.results.gains import final_by_device
from hushfleet.aggregator.results.outcomes import OUTCOMES
from hushfleet.aggregator.results.result import Example, Result, RoundRow, SweepPoint
from hushfleet.wire.format.codecs import codec_of

MOST_TABLE_ROWS = 40
MOST_LISTED, EXTREMES = 1000, 20
"""Of more devices, the table lists those with the lowest and the highest values alone: so many of each measure."""
DASH = "\N{EN DASH}"
GAINS = ("common test", "own data")
Parts = Iterator[SectionPart]


class ShownRun:
    """A run that is shown.

    :param seen: PNG of what the server could see; None: it was not drawn.
    """

    def __init__(self, result: Result, headline: Headline, *, seen: bytes | None = None) -> None:
        self.result, self.headline, self.seen = result, headline, seen
        self.words = Words(result, headline, template="sections.jinja")
        self.told = self.words.told
        self.rounds = [row.round for row in result.rounds]
        self.title = result.details.measure[:1].upper() + result.details.measure[1:]

    def missing(self, name: str, *values: Any) -> SectionPart:
        return missing(self.told(name, *values))

    def heading(self, name: str, *values: Any) -> Heading:
        return Heading(*self.words.heading(name, *values))


@dataclass(frozen=True)
class ReportSection:
    """A section of the report; it is left out if it has no parts.

    :param groups: each yields its heading and its parts; nothing if the run has nothing of the kind.
    :param folded: for authors of methods, and for reference: only the title is visible.
    """

    anchor: str
    groups: tuple[Callable[[ShownRun], Parts], ...]
    folded: bool = False

    def of(self, shown: ShownRun) -> Section | None:
        groups = [found for make in self.groups if (found := present([*make(shown)]))]
        if not groups:
            return None
        (first, *parts), *others = groups
        assert isinstance(first, Heading)
        return Section(
            self.anchor, first.title, first.lead, [*parts, *(p for each in others for p in each)], self.folded
        )


def accuracy(shown: ShownRun) -> Parts:
    yield shown.heading("accuracy")
    lines = _accuracies(shown.rounds, shown.result.rounds, shown.headline)
    yield over(shown.title, lines, shown.told("accuracy_missing"), **PERCENT)


def _accuracies(xs: Sequence[float], rows: Sequence[RoundRow | SweepPoint], headline: Headline) -> list[Trace]:
    """Returns lines of the three accuracies of runs or rounds, and of the accuracy of training alone."""
    local_only = ((0, "common test", headline.common.local_only), (1, "own data", headline.local.local_only))
    own, other = headline.rows[1].model, headline.rows[0 if headline.own_heads else 2].model
    return [
        line(f"{own}, common test", xs, [row.accuracy_own_common for row in rows], 0),
        line(f"{own}, own data", xs, [row.accuracy_own_local for row in rows], 1),
        line(f"{other}, common test", xs, [row.accuracy_global for row in rows], 2),
        *(
            line(f"alone, {on}", xs, [value] * len(xs), n, dashed=True)
            for n, on, value in local_only
            if value is not None
        ),
    ]


def own_metrics(shown: ShownRun) -> Parts:
    """Shows the task's own metrics."""
    rows, names = shown.result.rounds, dict.fromkeys(name for row in shown.result.rounds for name in row.metrics)
    if names:
        yield shown.heading("metrics")
        values = {name: [row.metrics.get(name) for row in rows] for name in names}
        lines = [line(name, shown.rounds, ys, n % len(SERIES)) for n, (name, ys) in enumerate(values.items())]
        yield over("Global model, common test", lines, "")


def devices_against_local_only(shown: ShownRun) -> Parts:
    yield shown.heading("devices")
    detail, heads = shown.result.details, shown.headline.own_heads
    for tests, grid, local_only in (
        ("the common test", detail.accuracy_own_common, detail.local_only_common),
        ("own data", detail.accuracy_own_local, detail.local_only_local),
    ):
        title = f"Personalized heads, {tests.removeprefix('the ')}" if heads else f"On {tests}"
        final = final_by_device(grid, len(detail.devices))
        gains = [f - a for f, a in zip(final, local_only, strict=False) if f is not None and a is not None]
        if gains:
            note = shown.told("devices_note", min(gains), max(gains))
            yield charts.gains(title, detail.devices, local_only, final, note=note)
        else:
            yield shown.missing("devices_missing", tests)


def seeds(shown: ShownRun) -> Parts:
    """Shows the repetitions with other seeds."""
    if (table := seed_table(shown.result)).rows:
        yield shown.heading("seeds")
        yield table


def answers(shown: ShownRun) -> Parts:
    """Shows predicted images of the common test set, and confusion matrices; in the field, images stay at home."""
    detail = shown.result.details
    yield shown.heading("answers")
    if detail.examples:
        yield Pictures([_picture(each, detail.class_names) for each in detail.examples])
    for title, counts in (
        ("The global model", detail.confusion_global),
        (shown.told("answers_own"), detail.confusion_own),
    ):
        if counts:
            shares = [[count / sum(row) if sum(row) else None for count in row] for row in counts]
            right = {name: share for n, name in enumerate(detail.class_names) if (share := shares[n][n]) is not None}
            worst = min(right, key=lambda name: right[name], default=None)
            note = "" if worst is None else shown.told("answers_note", worst, right[worst])
            names = detail.class_names
            yield charts.heat_map(title, names, names, shares, form=".0%", x="taken for", note=note)


def _picture(each: Example, names: Sequence[str]) -> Picture:
    said = (("global", each.said_global), (f"{each.device}, own", each.said_own), ("alone", each.said_alone))
    lines = [
        PageCell(f"{who}: {names[what] if what < len(names) else what}", "right" if what == each.label else "wrong")
        for who, what in said
        if what is not None
    ]
    return Picture(each.png, names[each.label], lines)


def privacy(shown: ShownRun) -> Parts:
    yield shown.heading("privacy")
    yield _spent(shown)
    result = shown.result
    if result.wire and result.wire.step_unit == "rms":
        yield shown.missing("no_noise")
    else:
        why = shown.told("signal_missing", not result.wire or codec_of(result.wire.codec).keeps_norm)
        ratios = line("signal to noise", shown.rounds, [row.snr_db for row in result.rounds], 3)
        yield over("Signal to noise, dB", [ratios], why, note=shown.told("signal_note"))
    yield Facts(shown.words.facts("privacy_facts")) if result.privacy else shown.missing("no_ledger")


def _spent(shown: ShownRun) -> SectionPart:
    detail = shown.result.details
    spent = [value for row in (*detail.epsilon_server, *detail.epsilon_release) for value in row if value]
    finite = [value for value in spent if value < math.inf]
    if not finite or len(shown.rounds) == 1:  # one round is no course
        return shown.missing("spent_missing", bool(spent) and not finite)
    server = charts.per_device(detail.devices, shown.rounds, detail.epsilon_server, 1, "epsilon_server")
    # dotted, because the two may be the same
    release = charts.per_device(detail.devices, shown.rounds, detail.epsilon_release, 0, "epsilon_release", "dot")
    wide = max(finite) > 30 * min(finite)
    axis: dict[str, Any] = charts.log_axis(finite) if wide else {"rangemode": "tozero"}
    note = "Logarithmic scale." if wide else ""
    return over("Epsilon spent, per device", server + release, "", note=note, yaxis=axis)


def seen(shown: ShownRun) -> Parts:
    """Shows what the server could see: the picture of `hushfleet invert`."""
    if shown.seen is not None:
        yield shown.heading("seen")
        picture = Picture(base64.b64encode(shown.seen).decode(), shown.told("seen_picture"))
        yield Pictures([picture], css="drawing")


def privacy_sweep(shown: ShownRun) -> Parts:
    """Shows the repetitions with other noise, with a dotted line where protection becomes negligible."""
    runs = sorted(shown.result.details.privacy_sweep, key=lambda run: run.epsilon_server)
    if not runs:
        return
    yield shown.heading("sweep")
    drawn = [run for run in runs if 0 < run.epsilon_server < math.inf]
    xs = [run.epsilon_server for run in drawn]
    inside = xs and min(xs) <= LIMIT <= max(xs)
    look = {"dash": "dot", "color": SOFT, "width": 1.5}
    dotted = {"x0": LIMIT, "x1": LIMIT, "y0": 0, "y1": 1, "yref": "paper", "line": look}
    layout = {"xaxis": charts.log_axis(xs), "shapes": [dotted] if inside else [], **PERCENT}
    lines, note = _accuracies(xs, drawn, shown.headline), shown.told("sweep_note")
    yield over(shown.title, lines, shown.told("sweep_missing"), x="epsilon_server", note=note, **layout)
    yield noise_table(shown.result)


def traffic(shown: ShownRun) -> Parts:
    yield shown.heading("bytes")
    result, xs = shown.result, shown.rounds
    if not result.uplink_bytes:
        yield shown.missing("bytes_missing")
        return
    detail, bars = (
        result.details,
        _bars(xs, [row.uplink_bytes for row in result.rounds], "sent, all participants", BLUE),
    )
    references = [("float32", "float32, all parameters", detail.float32_bytes, 2)]
    if result.method == "fedglp-adp":
        references.insert(0, ("Eq. (20)", "Eq. (20) of the paper", detail.eq20_bytes, 1))
    totals = {short: sum(value or 0 for value in values) for short, _, values, _ in references}
    drawn = [line(name, xs, each, n, dashed=True) for short, name, each, n in references if totals[short]]
    layout = {
        "xaxis": {**titled("round"), **({"dtick": 1} if len(xs) <= 12 else {})},
        "yaxis": {"tickformat": "~s", "ticksuffix": "B", "hoverformat": ".3s", "rangemode": "tozero"},
        "hovermode": "x unified",
        "showlegend": True,
    }
    yield Plot([bars, *drawn], layout, "Sent up per round", shown.told("bytes_note"))
    yield Prose([words.strip() for words in shown.told("bytes_words", totals).split("|")])
    yield Facts(shown.words.facts("bytes_facts", cost_db(result.wire) if result.wire else "not recorded"))


def _bars(xs: Sequence[int], ys: Sequence[int], name: str, color: str, **more: Any) -> Trace:
    return {"type": "bar", "x": xs, "y": ys, "name": name, "marker": {"color": color, "line": {"width": 0}}, **more}


def rounds_over_time(shown: ShownRun) -> Parts:
    """Shows how many devices answered each round in time; nothing if all did, or if the events were not recorded."""
    rows = [
        (row, Counter({name: getattr(row, name) or 0 for name in OUTCOMES})) for row in shown.result.details.timeline
    ]
    total = sum((counts for _, counts in rows), Counter[Outcome]())
    if total.total() == total["accepted"]:
        return
    worst, counts = max(rows, key=lambda each: each[1].total() - each[1]["accepted"])
    yield shown.heading("timeline", total, worst.round, counts)
    took = [f"{number(row.closed_s - row.opened_s)} s, from {number(row.opened_s)} s on" for row, _ in rows]
    bars = [
        _bars(
            [row.round for row, _ in rows],
            [counts[outcome] for _, counts in rows],
            outcome,
            f"var(--{outcome})",
            hovertext=took,
            hovertemplate=f"round %{{x}}: %{{y}} {outcome}; it took %{{hovertext}}<extra></extra>",
        )
        for outcome in OUTCOMES
        if total[outcome]
    ]
    axes = {"xaxis": titled("round"), "yaxis": titled("devices")}
    yield Plot(bars, {"barmode": "stack", "bargap": 0.1, "height": 260, **axes}, "Devices in each round")


def fleet(shown: ShownRun) -> Parts:
    yield shown.heading("fleet")
    result, detail = shown.result, shown.result.details
    table = device_table(result)
    yield table if table.rows else shown.missing("no_devices")
    listed = {row[0] for row in table.rows}
    if result.privacy and _spent_unknown(result) & listed:
        yield Prose([shown.told("own_ledger")], css="note")
    if detail.decline_reasons:
        said = [f"{code}: {reason or DASH}" for code, reason in sorted(detail.decline_reasons.items())]
        yield Prose([shown.told("decline_reasons"), *said], css="note")
    others = sorted(detail.refusals.items())
    if strangers := [f"{device} ({_codes(codes)})" for device, codes in others if device not in listed]:
        yield Prose([shown.told("strangers", strangers)], css="note")
    if result.engine == "field":
        yield Prose([shown.told("own_images")], css="note")


def device_table(result: Result) -> Table:
    """Returns a row for each device; in a large fleet, for those with the lowest and the highest values, from the
    smallest gain on."""
    detail, ledger = result.details, {row.device: row for row in result.privacy}
    spent = {device: (row.rounds_charged, row.epsilon_server) for device, row in ledger.items()}
    unknown, have_lifetime = _spent_unknown(result), any(row.lifetime for row in result.privacy)
    sent = "updates sent" if any(row.answer_bytes for row in result.rounds) else "sent up"
    devices = list(detail.devices or ledger)
    listed, gains = list(range(len(devices))), dict[str, list[float]]()
    folded = f"All {len(devices)} devices" if len(devices) > MOST_TABLE_ROWS else ""
    if len(devices) > MOST_LISTED:
        measures = _measures(result, devices)
        gains = {f"gained, {name}": values for name, values in measures.items() if name in GAINS}
        listed = sorted(_extremes(measures.values()), key=next(iter(gains.values()), listed).__getitem__)
        about = f"the {EXTREMES} lowest and highest by {', '.join(measures)}. All are in result.json"
        folded = f"{len(listed)} of {len(devices):,} devices: {about}"

    def cells(n: int, device: str) -> dict[str, str]:
        row, faults = ledger.get(device), detail.faults.get(device, 0)
        charged, epsilon = spent.get(device, (0, 0.0))
        known = bool(ledger) and device not in unknown
        lifetime = row.lifetime.epsilon_server if row and row.lifetime else None
        return {
            "device": device,
            "board": result.boards.get(device, DASH),
            **{name: points(values[n], "") for name, values in gains.items()},
            **{name: number(values[n]) for name, values in detail.metrics_own.items()},
            "accepted": str(detail.rounds_accepted[n]) if detail.rounds_accepted else DASH,
            "charged": str(charged) if known else DASH,
            sent: size(detail.uplink_bytes[n]) if any(detail.uplink_bytes) else DASH,
            **({LIFETIME: number(lifetime)} if have_lifetime else {}),
            "epsilon_server": number(epsilon) if known else DASH,
            "epsilon_release": number(row.epsilon_release if row else 0) if ledger else DASH,
            "refused": _codes(detail.refusals.get(device)) + (f"; own fault in {faults} rounds" if faults else ""),
            "declined": _codes(detail.declines.get(device)),
        }

    rows = [cells(n, devices[n]) for n in listed]
    return Table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], names=2, folded=folded)


def _measures(result: Result, devices: Sequence[str]) -> dict[str, list[float]]:
    """Returns the measures by which devices differ, a value for each device; 0 where it was not measured."""
    detail, ledger = result.details, {row.device: row.epsilon_server for row in result.privacy}
    measures: dict[str, list[float]] = {}
    grids = (detail.accuracy_own_common, detail.local_only_common), (detail.accuracy_own_local, detail.local_only_local)
    for name, (grid, alone) in zip(GAINS, grids, strict=True):
        final = final_by_device(grid, len(devices))
        measures[name] = [(f or 0.0) - (a or 0.0) for f, a in zip(final, alone, strict=False)]
    measures["epsilon_server"] = [ledger.get(device, 0.0) for device in devices]
    measures |= {"accepted": [*map(float, detail.rounds_accepted)], "bytes": [*map(float, detail.uplink_bytes)]}
    for name, counts in (("refused", detail.refusals), ("declined", detail.declines)):
        measures[name] = [float(sum(counts.get(device, {}).values())) for device in devices]
    return {name: values for name, values in measures.items() if len(values) == len(devices) and len({*values}) > 1}


def _extremes(measures: Iterable[Sequence[float]]) -> set[int]:
    """Returns the places of the lowest and the highest values of each measure, other than its median."""
    found = set[int]()
    for values in measures:
        ordered, middle = sorted(range(len(values)), key=values.__getitem__), median(values)
        found |= {n for n in (*ordered[:EXTREMES], *ordered[-EXTREMES:]) if values[n] != middle}
    return found


def _spent_unknown(result: Result) -> set[str]:
    """Returns the devices that may have paid for updates but never reported it: a device reports its total only with an
    accepted update."""
    return (result.details.refusals.keys() | result.details.in_vain.keys()) - {row.device for row in result.privacy}


def _codes(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(counts.items())) if counts else "0"


def course(shown: ShownRun) -> Parts:
    yield shown.heading("course")
    xs, detail = shown.rounds, shown.result.details
    loss = line("training loss, mean over devices", xs, [row.loss for row in shown.result.rounds], 3)
    yield over("Loss", [loss], shown.told("course_missing"), yaxis={"rangemode": "tozero"})
    for title, grid, color in (
        ("Personalized models on the common test", detail.accuracy_own_common, 0),
        ("Personalized models on their own data", detail.accuracy_own_local, 1),
    ):
        if sum(any(value is not None for value in row) for row in grid) > 1:  # one round is no course
            yield over(title, charts.per_device(detail.devices, xs, grid, color), "", **PERCENT)


def labels(shown: ShownRun) -> Parts:
    """Shows the labels of each device; nothing in the field, where devices do not report them."""
    detail = shown.result.details
    if counts := detail.label_counts:
        yield shown.heading("labels")
        classes = detail.class_names or [str(n) for n in range(len(counts[0]))]
        note = shown.told("labels_note", [sum(row) for row in counts])
        yield charts.heat_map("Samples", detail.devices, classes, counts, form="d", x="class", note=note)


def run_facts(shown: ShownRun) -> Parts:
    yield shown.heading("run")
    walls = [row.wall_s for row in shown.result.rounds if row.wall_s is not None]
    yield Facts(shown.words.facts("run_facts", (median(walls), sum(walls)) if walls else None))
    if shown.result.rerun is not None:
        yield Code(shown.told("task_file"), shown.result.rerun.task)


def meaning(shown: ShownRun) -> Parts:
    """Explains each number in plain sentences."""
    yield shown.heading("meaning")
    yield Facts(shown.words.facts("meaning_facts"))


SECTIONS = (
    ReportSection("accuracy", (accuracy, own_metrics, devices_against_local_only, seeds)),
    ReportSection("answers", (answers,)),
    ReportSection("privacy", (privacy, seen, privacy_sweep)),
    ReportSection("bytes", (traffic,)),
    ReportSection("fleet", (fleet, rounds_over_time)),
    ReportSection("training", (course, labels), folded=True),
    ReportSection("run", (run_facts,), folded=True),
    ReportSection("meaning", (meaning,), folded=True),
)


def read_picture(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None and path.is_file() else None
