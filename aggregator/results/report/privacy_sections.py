"""The report's sections on privacy: what was spent, and what other noise would have cost."""

from __future__ import annotations

import math

from hushfleet.aggregator.results.report import charts
from hushfleet.aggregator.results.report.charts import Series
from hushfleet.aggregator.results.report.markup import Section, definitions, figure, gallery, missing, table
from hushfleet.aggregator.results.report.measured import any_measured, from_to, rounds_of, whole_percent
from hushfleet.aggregator.results.report.verdict import MEANINGLESS_EPSILON, Verdict, number, percent, signed
from hushfleet.aggregator.results.result import Result

NO_SIGNAL_IN_SIGNS = "with one bit a parameter, all updates have the same norm, which tells nothing of their signal"


def privacy(result: Result, verdict: Verdict) -> Section:
    detail, xs = result.details, rounds_of(result)
    parts = []
    flat = [v for grid in (detail.epsilon_server, detail.epsilon_release) for row in grid for v in row]
    if xs and any(v is not None and math.isfinite(v) and v > 0 for v in flat):
        series = [
            *charts.per_device(detail.epsilon_server, "epsilon_server", 2),
            *charts.per_device(detail.epsilon_release, "epsilon_release", 1),
        ]
        chart = charts.lines(xs, series, label="epsilon per round", y_log=charts.needs_log(flat), floor=0)
        note = "Logarithmic scale." if charts.needs_log(flat) else ""
        parts.append(figure("Epsilon spent, per device", chart, charts.legend_of(series), note=note))
    elif any(v == math.inf for v in flat):
        raw = ", ".join(verdict.raw_values)
        why = f"without noise leave the device: {raw}" if raw else "the updates carried no noise"
        parts.append(missing(f"Epsilon is infinite from the first round on: {why}."))
    else:
        parts.append(missing("Epsilon over rounds was not recorded; the table of devices has the final numbers."))
    ratio = [Series("signal-to-noise ratio", [row.snr_db for row in result.rounds], 4)]
    if xs and any(v is not None and math.isfinite(v) for v in ratio[0].values):
        note = "0 dB: noise as strong as a full-size update. Averaging n devices gains 10 log10(n) dB."
        parts.append(figure("Signal to noise, dB", charts.lines(xs, ratio, label="signal to noise"), ratio, note=note))
    elif any(v == math.inf for v in ratio[0].values):
        parts.append(missing("There is no noise in the updates, so no signal-to-noise ratio either."))
    elif result.wire and result.wire.codec == "one-bit":
        parts.append(missing(f"There is no signal-to-noise ratio: {NO_SIGNAL_IN_SIGNS}."))
    else:
        parts.append(missing("The signal-to-noise ratio was not recorded."))
    lead = "Two adversaries, two numbers. Neither stands for the other."
    return Section("privacy", "Privacy", lead, gallery([*parts, _privacy_facts(result, verdict)]))


def _privacy_facts(result: Result, verdict: Verdict) -> str:
    if not result.privacy:
        return missing("There is no privacy ledger in this result.")
    rows = result.privacy
    charged = sorted({row.rounds_charged for row in rows})
    facts = [
        *((f"{name}, worst device", words) for name, words in verdict.epsilons),
        *([("leaves without noise", ", ".join(verdict.raw_values))] if verdict.raw_values else []),
        ("delta", number(verdict.delta)),
        ("unit of privacy", ", ".join(sorted({row.unit for row in rows}))),
        ("adjacency", "; ".join(sorted({row.adjacency for row in rows}))),
        ("rounds charged per device", from_to(charged)),
        ("clip norm", number(result.clip_norm)),
        ("noise multiplier", number(result.noise_multiplier)),
        ("accounting", result.accounting),
        ("accountant", result.accountant),
    ]
    return definitions(facts)


def sweep(result: Result, verdict: Verdict) -> Section:
    points = sorted(result.details.privacy_sweep, key=lambda point: point.epsilon_server)
    drawn = [p for p in points if math.isfinite(p.epsilon_server) and p.epsilon_server > 0]
    lead = "The same run at other noise levels: what privacy costs here."
    if not points:
        body = missing("This run has no sweep over noise levels.")
        return Section("sweep", "Accuracy against privacy", lead, body)
    xs = [point.epsilon_server for point in drawn]
    series = [
        Series("own models, common test", [p.accuracy_own_common for p in drawn], 1),
        Series("own models, own data", [p.accuracy_own_local for p in drawn], 2),
        Series("global model, common test", [p.accuracy_global for p in drawn], 3),
    ]
    for where, value, color in (
        ("common test", verdict.alone_common, 1),
        ("own data", verdict.alone_local, 2),
    ):
        if value is not None:
            series.append(Series(f"alone, {where}", [value] * len(xs), color, dashed=True))
    shown = [one for one in series if any_measured(one.values)]
    head = (
        "noise multiplier",
        "epsilon_server",
        "epsilon_release",
        "common test",
        "own data",
        "global",
        "gain",
    )
    lines = [
        (
            number(p.noise_multiplier),
            number(p.epsilon_server),
            number(p.epsilon_release),
            percent(p.accuracy_own_common),
            percent(p.accuracy_own_local),
            percent(p.accuracy_global),
            "not measured" if p.gain_over_local_only is None else signed(100 * p.gain_over_local_only),
        )
        for p in points
    ]
    if drawn and shown:
        chart = charts.lines(
            xs,
            shown,
            label="accuracy against epsilon_server",
            y_text=whole_percent,
            x_title="epsilon_server",
            x_log=True,
            floor=-1,
            ceiling=1.02,
            guide=MEANINGLESS_EPSILON,
        )
        note = (
            f"Logarithmic scale. Right of {MEANINGLESS_EPSILON:g} (dotted) there is no meaningful protection "
            "against the server. A point without noise is in the table only."
        )
        picture = figure("Accuracy, %", chart, shown, note=note)
    else:
        picture = missing("No point of the sweep has a finite epsilon and a measured accuracy.")
    return Section("sweep", "Accuracy against privacy", lead, gallery([picture]) + table(head, lines))
