"""The report's sections: each takes the result and returns a heading with charts, or says what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from hushfleet.aggregator.results.report import charts, grids
from hushfleet.aggregator.results.report.charts import Series
from hushfleet.aggregator.results.report.markup import Section, definitions, figure, gallery, missing, table
from hushfleet.aggregator.results.report.measured import any_measured, rounds_of, whole_percent
from hushfleet.aggregator.results.report.verdict import Verdict, final_by_device, number, paired_gains, signed, size
from hushfleet.aggregator.results.result import Result

MOST_DUMBBELLS = 24
MOST_TABLE_ROWS = 40


def accuracy(result: Result, verdict: Verdict) -> Section:
    rows, xs = result.rounds, rounds_of(result)
    own_common = Series("own models, common test", [r.accuracy_own_common for r in rows], 1)
    own_local = Series("own models, own data", [r.accuracy_own_local for r in rows], 2)
    whole = Series("global model, common test", [r.accuracy_global for r in rows], 3)
    alone = [
        Series(f"alone, {where}", [value] * len(rows), color, dashed=True)
        for where, value, color in (
            ("common test", verdict.alone_common, 1),
            ("own data", verdict.alone_local, 2),
        )
        if value is not None
    ]
    shown = [one for one in (own_common, own_local, whole, *alone) if any_measured(one.values)]
    parts = []
    if xs and any_measured([v for one in (own_common, own_local, whole) for v in one.values]):
        chart = charts.lines(xs, shown, label="accuracy per round", y_text=whole_percent, floor=-1, ceiling=1.02)
        parts.append(figure("Accuracy, %", chart, shown))
    else:
        parts.append(missing("No accuracy was measured: devices in the field do not send theirs."))
    loss = [Series("training loss, mean over devices", [r.loss for r in rows], 4)]
    if xs and any_measured(loss[0].values):
        parts.append(figure("Loss", charts.lines(xs, loss, label="loss per round", floor=0), loss))
    else:
        parts.append(missing("No training loss was recorded."))
    parts += _spread(result, xs)
    lead = "Solid lines are the federation, dashed lines what each device reaches when it trains alone."
    return Section("accuracy", "Accuracy and loss", lead, gallery(parts))


def _spread(result: Result, xs: Sequence[int]) -> list[str]:
    parts = []
    for grid, title, color in (
        (result.details.accuracy_own_common, "Each device's own model on the common test, %", 1),
        (result.details.accuracy_own_local, "Each device's own model on its own data, %", 2),
    ):
        if xs and any_measured([v for row in grid for v in row]):
            series = charts.per_device(grid, "device", color)
            chart = charts.lines(xs, series, label=title, y_text=whole_percent, floor=-1, ceiling=1.02)
            parts.append(figure(title, chart, charts.legend_of(series)))
    return parts


def devices_against_alone(result: Result, verdict: Verdict) -> Section:
    detail = result.details
    parts = []
    for grid, alone, tests in (
        (detail.accuracy_own_common, detail.local_only_common, "the common test"),
        (detail.accuracy_own_local, detail.local_only_local, "own data"),
    ):
        final = final_by_device(grid, len(detail.devices))
        pairs = [(a, f) for a, f in zip(alone, final, strict=False) if a is not None and f is not None]
        if not pairs:
            parts.append(missing(f"Accuracy on {tests} was not measured both federated and alone."))
        elif len(detail.devices) <= MOST_DUMBBELLS:
            chart = grids.dumbbells(detail.devices, alone, final, label=f"per device, {tests}", tests=tests)
            parts.append(figure(f"On {tests}", chart, note="Hollow: alone. Blue disc: better. Orange square: worse."))
        else:
            gains = [f - a for a, f in pairs]
            chart = grids.sorted_gains(gains, label=f"gains on {tests}")
            worst, best = 100 * min(gains), 100 * max(gains)
            note = f"From {signed(worst)} to {signed(best)} points, median {signed(100 * median(gains))}."
            parts.append(figure(f"Gain over training alone on {tests}, points", chart, note=note))
    gains = paired_gains(result)
    lead = "An average can hide devices that would be better off alone."
    if gains:
        worse = sum(gain < 0 for gain in gains)
        lead += f" Here {worse or 'none'} of {len(gains)} would be, on the common test set."
    return Section("devices-alone", "Each device against training alone", lead, gallery(parts))


def fleet(result: Result) -> Section:
    detail = result.details
    ids = detail.devices or [row.device for row in result.privacy]
    ledger = {row.device: row for row in result.privacy}
    head = (
        "device",
        "board",
        "accepted",
        "charged",
        "sent up",
        "epsilon_server",
        "epsilon_release",
        "refused",
        "declined",
    )
    lines = []
    for n, device in enumerate(ids):
        row = ledger.get(device)
        lines.append(
            (
                device,
                result.boards.get(device, "\N{EN DASH}"),
                str(detail.rounds_accepted[n]) if detail.rounds_accepted else "\N{EN DASH}",
                str(row.rounds_charged) if row else "\N{EN DASH}",
                size(detail.uplink_bytes[n]) if detail.uplink_bytes else "\N{EN DASH}",
                number(row.epsilon_server) if row else "\N{EN DASH}",
                number(row.epsilon_release) if row else "\N{EN DASH}",
                _codes(detail.refusals.get(device)) + _faults(detail.faults.get(device, 0)),
                _codes(detail.declines.get(device)),
            )
        )
    lead = "Accepted and charged differ where an update was made, and paid for, but did not arrive in time."
    body = table(head, lines, names=2) if lines else missing("The result names no devices.")
    if len(lines) > MOST_TABLE_ROWS:
        body = f"<details><summary>All {len(lines)} devices</summary>{body}</details>"
    strangers = {device: codes for device, codes in detail.refusals.items() if device not in set(ids)}
    if strangers:
        told = "; ".join(f"{device} ({_codes(codes)})" for device, codes in sorted(strangers.items()))
        body += f'<p class="note">Refused from others: {escape(told)}.</p>'
    return Section("fleet", "Devices", lead, body)


def run_facts(result: Result) -> Section:
    walls = [row.wall_s for row in result.rounds if row.wall_s is not None]
    facts = [
        ("task", result.task),
        ("method", result.method),
        ("data set", result.dataset),
        ("partition", result.partition),
        ("engine", result.engine),
        ("seed", "none" if result.seed is None else str(result.seed)),
        ("model", f"{result.model.name}, {result.model.parameters:,} parameters"),
        ("layers", ", ".join(f"{name} ({count:,})" for name, count in result.model.layers)),
        (
            "time per round",
            f"{median(walls):.3g} s in the median, {sum(walls):,.0f} s in all" if walls else "not measured",
        ),
        *sorted(result.versions.items()),
    ]
    lead = "Enough to run it again."
    return Section("run", "The run", lead, definitions(facts))


def _faults(rounds: int) -> str:
    """Of a device that is to blame for its refusals itself."""
    return f"; own fault in {rounds} rounds" if rounds else ""


def _codes(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(counts.items())) if counts else "0"
