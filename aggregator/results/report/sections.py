"""Makes the report's sections: each takes the result and returns charts, tables and words, or says what is missing."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import plotly.graph_objects as go

from hushfleet.aggregator.results.fleet_state import Outcome
from hushfleet.aggregator.results.gains import final_by_device
from hushfleet.aggregator.results.outcomes import OUTCOMES
from hushfleet.aggregator.results.report import charts
from hushfleet.aggregator.results.report.charts import PERCENT, Values, line, over
from hushfleet.aggregator.results.report.page import (
    BLUE,
    SOFT,
    Code,
    Drawing,
    Facts,
    Plot,
    Prose,
    Section,
    SectionPart,
    Table,
    label,
    missing,
    template,
)
from hushfleet.aggregator.results.report.readable import LIFETIME, codec, from_to, number, points, repeating, size
from hushfleet.aggregator.results.report.sweeps import cost_db, noise_table, seed_table
from hushfleet.aggregator.results.report.verdict import (
    COMMON,
    SERVER_MEANINGS,
    Headline,
    seen_by_server,
    trust_of,
    whose,
)
from hushfleet.aggregator.results.result import Result, RoundRow, SweepPoint
from hushfleet.codecs.registry import codec_of
from hushfleet.losses import ACCURACY
from hushfleet.privacy.protection import LARGEST_EPSILON, NEGLIGIBLE_ABOVE
from hushfleet.privacy.terms import TRUST

MOST_DUMBBELLS = 24
MOST_TABLE_ROWS = 40
MOST_LAYER_LINES = 4
DASH = "\N{EN DASH}"


def rounds_of(result: Result) -> list[int]:
    """Returns the numbers of the rounds: the x axis of most charts."""
    return [row.round for row in result.rounds]


def accuracy(result: Result, headline: Headline) -> Section:
    detail, name = result.details, title_of(result)
    why = f"No {detail.measure} was measured: devices in the field do not send theirs."
    xs = rounds_of(result)
    chart = over(name, _accuracies(xs, result.rounds, headline), why, **PERCENT)
    lead = "Solid lines are the federation, dashed lines what each device reaches when it trains alone."
    if detail.score:
        counted = "the share of answers " if detail.measure == ACCURACY else ""
        lead = f"{name} is {counted}{detail.score}. {lead}"
    return Section("accuracy", name, lead, [chart])


def title_of(result: Result) -> str:
    """Returns the measure with a capital letter."""
    return result.details.measure[:1].upper() + result.details.measure[1:]


def course(result: Result) -> Section:
    xs, detail = rounds_of(result), result.details
    loss = line("training loss, mean over devices", xs, [row.loss for row in result.rounds], 3)
    parts = [over("Loss", [loss], "No training loss was recorded.", yaxis_rangemode="tozero")]
    for title, grid, color in (
        ("Own models on the common test", detail.accuracy_own_common, 0),
        ("Own models on their own data", detail.accuracy_own_local, 1),
    ):
        if sum(any(value is not None for value in row) for row in grid) > 1:  # one round is no course
            parts.append(over(title, charts.per_device(detail.devices, xs, grid, color), "", **PERCENT))
    return Section("course", "Loss, and each device over rounds", "How training went.", parts, folded=True)


def _accuracies(xs: Sequence[float], rows: Sequence[RoundRow | SweepPoint], headline: Headline) -> list[go.Scatter]:
    """Returns lines of the three accuracies of runs or rounds, and of the accuracy of training alone."""
    alone = ((0, "common test", headline.common.alone), (1, "own data", headline.local.alone))
    own, other = headline.rows[1].model, headline.other_model
    return [
        line(f"{own}, common test", xs, [row.accuracy_own_common for row in rows], 0),
        line(f"{own}, own data", xs, [row.accuracy_own_local for row in rows], 1),
        line(f"{other}, common test", xs, [row.accuracy_global for row in rows], 2),
        *(line(f"alone, {on}", xs, [value] * len(xs), n, dashed=True) for n, on, value in alone if value is not None),
    ]


def devices_against_alone(result: Result, headline: Headline) -> Section:
    detail, heads = result.details, bool(result.details.own_heads)
    parts: list[SectionPart] = []
    for tests, grid, alone in (
        ("the common test", detail.accuracy_own_common, detail.local_only_common),
        ("own data", detail.accuracy_own_local, detail.local_only_local),
    ):
        title = f"Own heads, {tests.removeprefix('the ')}" if heads else f"On {tests}"
        final = final_by_device(grid, len(detail.devices))
        rows = zip(detail.devices, final, alone, strict=False)
        gains = {device: f - a for device, f, a in rows if f is not None and a is not None}
        if not gains:
            parts.append(missing(f"{title_of(result)} on {tests} was not measured both federated and alone."))
        elif len(detail.devices) <= MOST_DUMBBELLS:
            parts.append(charts.dumbbells(title, detail.devices, alone, final, detail.measure))
        else:
            values = list(gains.values())
            note = f"From {points(min(values), '')} to {points(max(values))}, orange below zero."
            parts.append(charts.sorted_gains(f"{title}: gain", list(gains), values, note=note))
    lead = "An average can hide devices that would be better off alone."
    counted = [row for row in headline.rows if row.test == COMMON and row.found.gains]
    if counted:
        told = [
            f"{row.found.worse_off or 'none'} of {len(row.found.gains)} would be, on the common test set"
            + f" {whose(row)}" * heads
            for row in counted
        ]
        lead += f" Here {', and '.join(told)}."
    return Section("devices-alone", "Each device against training alone", lead, parts)


def traffic(result: Result) -> Section:
    detail, xs, title = result.details, rounds_of(result), "Bytes per round"
    sent, down = [row.uplink_bytes for row in result.rounds], sum(row.downlink_bytes for row in result.rounds)
    if not any(sent):
        return Section("bytes", title, "What the devices sent up.", [missing("No bytes were counted in this run.")])
    words = [f"The devices sent {size(sum(sent))} up in {len(xs)} rounds and received {size(down)}."]
    references = []
    of_its_paper = ("Eq. (20) of the paper", "Eq. (20)", detail.eq20_bytes, 1)
    for name, told, values, color in (
        *([of_its_paper] if result.method == "fedglp-adp" else []),
        ("float32, all parameters", "float32", detail.float32_bytes, 2),
    ):
        if total := sum(value or 0 for value in values):
            references.append(line(name, xs, values, color, dashed=True))
            words.append(f"{told} counts {size(total)}: what was sent is {_times(sum(sent), total)}.")
        else:
            words.append(f"What {told} takes was not recorded.")
    bars = go.Bar(x=xs, y=sent, name="sent, all participants", marker={"color": BLUE, "line_width": 0})
    figure = go.Figure([bars, *references], {"xaxis_title_text": "round", "hovermode": "x unified", "showlegend": True})
    figure.update_layout(yaxis={"tickformat": "~s", "ticksuffix": "B", "hoverformat": ".3s", "rangemode": "tozero"})
    figure.update_layout(xaxis_dtick=1 if len(xs) <= 12 else None)
    models, bits, wire = sum(value or 0 for value in detail.float32_bytes), result.bits_per_value, result.wire
    received = f"; as whole float32 models {size(models)}, {_times(down, models)}" if models and down else ""
    facts = [
        ("codec", codec(wire) if wire else "not recorded"),
        ("sent up per parameter", "not recorded" if bits is None else f"{number(bits)} bits, header and signature in"),
        ("cost in signal to noise, dB", cost_db(wire) if wire else "not recorded"),
        ("received", size(down) + received),
    ]
    what = "updates and of a committee's answers" if any(row.answer_bytes for row in result.rounds) else "updates"
    note = f"Payload of {what} with their headers, without MQTT and TCP framing."
    lead = "Fewer bytes are shorter radio time and a smaller bill."
    return Section("bytes", title, lead, [Plot(figure, "Sent up per round", note), Prose(words), Facts(facts)])


def _times(count: int, reference: float) -> str:
    if count == reference:
        return "of the same size"
    return f"{max(reference / count, count / reference):.3g} times {'smaller' if count < reference else 'larger'}"


def seeds(result: Result) -> Section | None:
    """Shows the repetitions with other seeds; returns None if there are none."""
    table = seed_table(result)
    lead = (
        "The same run with other seeds: other data on each device, another first model, other noise. * is the run "
        "itself, which the rest of this page shows. The mean gain has its standard error over seeds; the deviation is "
        "the standard deviation, in points."
    )
    return Section("seeds", "Other seeds", lead, [table]) if table.rows else None


def privacy_sweep(result: Result, headline: Headline) -> Section | None:
    """Shows the repetitions with other noise; returns None if there are none."""
    runs = sorted(result.details.privacy_sweep, key=lambda run: run.epsilon_server)
    title, lead = (
        f"{title_of(result)} against privacy",
        "The same run at other noise levels: what privacy costs here. * is the run itself.",
    )
    if not runs:
        return None
    drawn = [run for run in runs if 0 < run.epsilon_server < math.inf]
    xs = [run.epsilon_server for run in drawn]
    chart = over(
        title_of(result),
        _accuracies(xs, drawn, headline),
        f"No point of the sweep has a finite epsilon and a measured {result.details.measure}.",
        x="epsilon_server",
        note=f"Right of {NEGLIGIBLE_ABOVE:g} (dotted) protection against the server is negligible. A point without "
        "noise is in the table only.",
        **_log_x(xs, NEGLIGIBLE_ABOVE),
    )
    return Section("sweep", title, lead, [chart, noise_table(result)])


def _log_x(xs: Sequence[float], guide: float | None) -> dict[str, Any]:
    """Returns a logarithmic x axis for accuracies, with a dotted line at `guide` if it lies inside the drawn range."""
    inside = guide is not None and xs and min(xs) <= guide <= max(xs)
    look = {"dash": "dot", "color": SOFT, "width": 1.5}
    dotted = {"x0": guide, "x1": guide, "y0": 0, "y1": 1, "yref": "paper", "line": look}
    return {**charts.log_axis("xaxis", xs), "shapes": [dotted] if inside else [], **PERCENT}


def privacy(result: Result, headline: Headline) -> Section:
    lead = "Two adversaries, two numbers. Neither stands for the other."
    parts = [_spent(result, headline), _signal(result), _privacy_facts(result, headline)]
    return Section("privacy", "Privacy", lead, parts)


def _spent(result: Result, headline: Headline) -> SectionPart:
    detail, xs = result.details, rounds_of(result)
    spent = [value for row in (*detail.epsilon_server, *detail.epsilon_release) for value in row if value]
    finite = [value for value in spent if value < math.inf]
    if spent and not finite:
        raw = ", ".join(headline.raw_values)
        why = f"without noise leave the device: {raw}" if raw else "the updates carried no noise"
        return missing(f"Epsilon is infinite from the first round on: {why}.")
    if not finite:
        return missing("Epsilon over rounds was not recorded; the table of devices has the final numbers.")
    server = charts.per_device(detail.devices, xs, detail.epsilon_server, 1, "epsilon_server")
    # dotted, because the two may be the same
    release = charts.per_device(detail.devices, xs, detail.epsilon_release, 0, "epsilon_release", "dot")
    wide = max(finite) > 30 * min(finite)
    axis: dict[str, Any] = charts.log_axis("yaxis", finite) if wide else {"yaxis_rangemode": "tozero"}
    return over("Epsilon spent, per device", server + release, "", note="Logarithmic scale." if wide else "", **axis)


def _signal(result: Result) -> SectionPart:
    ratios = [row.snr_db for row in result.rounds]
    if result.wire and result.wire.step_unit == "rms":
        return missing("There is no noise in the updates, so no signal-to-noise ratio either.")
    why = "The updates showed no signal beyond their noise."
    if result.accounting == "secure":
        why = "There is no signal-to-noise ratio: of a secure sum nobody sees the updates."
    elif result.wire and not codec_of(result.wire.codec).keeps_norm:
        why = (
            f"There is no signal-to-noise ratio: with {result.wire.codec}, all updates have the same norm, which tells "
            "nothing of their signal."
        )
    note = "0 dB: noise as strong as what it hides. Averaging n devices gains 10 log10(n) dB."
    return over("Signal to noise, dB", [line("signal to noise", rounds_of(result), ratios, 3)], why, note=note)


def _privacy_facts(result: Result, headline: Headline) -> SectionPart:
    rows = result.privacy
    if not rows:
        return missing("There is no privacy ledger in this result.")
    return Facts(
        [
            *((f"{name}, worst device", words) for name, words in headline.epsilons),
            *([("leaves without noise", ", ".join(headline.raw_values))] if headline.raw_values else []),
            ("delta", number(headline.delta)),
            ("unit of privacy", ", ".join(sorted({row.unit for row in rows}))),
            ("adjacency", "; ".join(sorted({row.adjacency for row in rows}))),
            ("rounds charged per device", from_to([row.rounds_charged for row in rows])),
            ("clip norm", number(result.clip_norm)),
            ("noise multiplier", number(result.noise_multiplier)),
            ("trust", TRUST[result.accounting]),
            *([("secure sums", result.assumption)] if result.assumption else []),
            *([("the server", seen_by_server(result.sums))] if result.sums else []),
            ("accounting", result.accounting),
            *(
                [("values of sums that may have wrapped around", _wraps(result))]
                if result.trust == "secure-sum"
                else []
            ),
            ("accountant", result.accountant),
        ]
    )


def _wraps(result: Result) -> str:
    """Counts values that may have wrapped around, which costs accuracy and never privacy."""
    wrapped = [row for row in result.rounds if row.suspected_wraps]
    where = f", in {len(wrapped)} of {len(result.rounds)} rounds" if wrapped else ""
    return f"{sum(row.suspected_wraps for row in wrapped):,}{where}"


def layers(result: Result) -> Section:
    grids = (
        ("Personalised share of each layer", "personalised share", "shares all", result.details.personal_share),
        ("Share of the clip norm per layer", "clip weights", "clips as a whole", result.details.clip_weights),
    )
    parts = [
        _by_layer(result, grid, title, f"No {what} was recorded: the method {why}, or devices sent no metrics.")
        for title, what, why, grid in grids
    ]
    lead = "What stays on the devices, and how the clip norm is divided among layers; means over devices."
    return Section("layers", "Layers over rounds", lead, parts, folded=True)


def _by_layer(result: Result, grid: Sequence[Values], title: str, otherwise: str) -> SectionPart:
    xs, names = rounds_of(result), [name for name, _ in result.model.layers]
    columns = [[row[n] for row in grid] for n in range(len(names))] if grid else []
    if not any(value is not None for values in columns for value in values):
        return missing(otherwise)
    if len(names) <= MOST_LAYER_LINES:
        named = zip(names, columns, strict=True)
        series = [line(label(name), xs, values, n) for n, (name, values) in enumerate(named)]
        return over(title, series, otherwise, yaxis_rangemode="tozero", **PERCENT)
    note = "The stronger the colour, the larger."
    return charts.heat_map(title, names, [str(x) for x in xs], columns, form=".0%", x="round", note=note)


def labels(result: Result) -> Section | None:
    """Shows the labels of each device; returns None in the field, where devices do not report them."""
    detail = result.details
    counts = detail.label_counts
    if not counts:
        return None
    classes = detail.class_names or [str(n) for n in range(len(counts[0]))]
    images = [sum(row) for row in counts]
    held = f"{sum(images):,} images on {len(images)} devices, {from_to(images)} on a device"
    told = f"{held}, with those that are held out of training for its own test."
    note = f"The stronger the colour, the more images. {told}"
    chart = charts.heat_map("Images", detail.devices, classes, counts, form="d", x="class", note=note)
    lead = f"Who holds which images: partition {result.partition}."
    return Section("labels", "Labels over devices", lead, [chart], folded=True)


def rounds_over_time(result: Result) -> Section | None:
    """Shows how many devices answered each round in time; None if all did, or if the events were not recorded."""
    rows = [(row, Counter({name: getattr(row, name) or 0 for name in OUTCOMES})) for row in result.details.timeline]
    total = sum((counts for _, counts in rows), Counter[Outcome]())
    if not (missed := total.total() - total["accepted"]):
        return None
    bars = [
        go.Bar(
            x=[row.round for row, _ in rows],
            y=[counts[outcome] for _, counts in rows],
            name=outcome,
            marker={"color": f"var(--{outcome})", "line_width": 0},
            hovertext=[f"{number(row.closed_s - row.opened_s)} s, from {number(row.opened_s)} s on" for row, _ in rows],
            hovertemplate=f"round %{{x}}: %{{y}} {outcome}; it took %{{hovertext}}<extra></extra>",
        )
        for outcome in OUTCOMES
        if total[outcome]
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.1,
        "xaxis_title_text": "round",
        "yaxis_title_text": "devices",
        "height": 260,
    }
    worst, counts = max(rows, key=lambda each: each[1].total() - each[1]["accepted"])
    declined = total["declined"] and sorted(result.details.decline_reasons)
    why = f" (reasons in this run: {', '.join(declined)})" if declined else ""
    lead = (
        f"Of {total.total():,} updates that were asked for, {missed:,} did not arrive in time: {_missed(total)}{why}. "
        f"Most were missing in round {worst.round}: of {counts.total():,} that were asked, {_missed(counts)}."
    )
    return Section("timeline", "Rounds over time", lead, [Plot(go.Figure(bars, layout), "Devices in each round")])


def _missed(counts: Mapping[Outcome, int]) -> str:
    return ", ".join(f"{counts[each]:,} {each}" for each in OUTCOMES if each != "accepted" and counts[each])


def fleet(result: Result) -> Section:
    detail, ledger = result.details, {row.device: row for row in result.privacy}
    ids, known = detail.devices or list(ledger), any(row.lifetime for row in result.privacy)
    listed = set(ids)
    unknown = _spent_unknown(result)
    sent = "updates sent" if any(row.answer_bytes for row in result.rounds) else "sent up"
    head = (
        "device", "board", "accepted", "charged", sent, *([LIFETIME] if known else []), "epsilon_server",
        "epsilon_release", "refused", "declined",
    )  # fmt: skip
    lines = []
    for n, device in enumerate(ids):
        row, faults = ledger.get(device), detail.faults.get(device, 0)
        lines.append(
            (
                device,
                result.boards.get(device, DASH),
                str(detail.rounds_accepted[n]) if detail.rounds_accepted else DASH,
                str(row.rounds_charged if row else 0) if ledger and device not in unknown else DASH,
                size(detail.uplink_bytes[n]) if any(detail.uplink_bytes) else DASH,
                *([number(row.lifetime.epsilon_server if row and row.lifetime else None)] if known else []),
                number(row.epsilon_server if row else 0) if ledger and device not in unknown else DASH,
                number(row.epsilon_release if row else 0) if ledger else DASH,
                _codes(detail.refusals.get(device)) + (f"; own fault in {faults} rounds" if faults else ""),
                _codes(detail.declines.get(device)),
            )
        )
    folded = f"All {len(lines)} devices" if len(lines) > MOST_TABLE_ROWS else ""
    parts: list[SectionPart] = [
        Table(head, lines, names=2, folded=folded) if lines else missing("The result names no devices.")
    ]
    if ledger and unknown & listed:
        words = "What a device without an accepted update has paid for others is in its own ledger alone."
        parts.append(Prose([words], css="note"))
    if detail.decline_reasons:
        said = [f"{code}: {reason or DASH}" for code, reason in sorted(detail.decline_reasons.items())]
        parts.append(Prose(["Why devices declined, in the words of the last one:", *said], css="note"))
    others = sorted(detail.refusals.items())
    strangers = [f"{device} ({_codes(codes)})" for device, codes in others if device not in listed]
    if strangers:
        parts.append(Prose([f"Refused from others: {'; '.join(strangers)}."], css="note"))
    if result.engine == "field":
        words = "Images and what models say of them stay with their owners: a run in the field has none to show."
        parts.append(Prose([words], css="note"))
    lead = "Accepted and charged differ where an update was made, and paid for, but did not arrive in time."
    return Section("fleet", "Devices", lead, parts)


def _spent_unknown(result: Result) -> set[str]:
    """Returns the devices that may have paid for updates but never reported it: a device reports its total only with an
    accepted update."""
    return (result.details.refusals.keys() | result.details.in_vain.keys()) - {row.device for row in result.privacy}


def _codes(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(counts.items())) if counts else "0"


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
        *_run_times(result),
        *sorted(result.versions.items()),
    ]
    parts: list[SectionPart] = [Facts(facts)]
    again = result.rerun
    if again is not None:
        command = repeating(again.command) or "a call of hushfleet.simulate in Python; the task is below"
        facts[:0] = [("to run it again", command), ("commit", again.commit or "not from a repository")]
        facts += [(f"SHA-256 of the {name}", digest) for name, digest in again.digests.items()]
        facts += [("gradients by", again.runtime)] if again.runtime else []
        parts.append(Code("The task as a file", again.task))
    lead = "Enough to run it again." if again else "This file does not say how it was run."
    return Section("run", "The run", lead, parts, folded=True)


def _run_times(result: Result) -> list[tuple[str, str]]:
    """Returns the times of the rounds of a run in the field, in UTC."""
    times = [(row.opened_at, row.closed_at) for row in result.rounds if row.opened_at]
    return [("rounds", f"from {times[0][0]} to {times[-1][1]}; result.json has the times of each")] if times else []


def meaning(result: Result) -> Section:
    """Explains each number in plain sentences."""
    words = {name: f"{value:g}" for name, value in LARGEST_EPSILON.items()}
    words["epsilon_server"] = SERVER_MEANINGS[trust_of(result)]
    rows = [line.format(**words).split(": ", 1) for line in template("meanings.txt").splitlines()]
    facts = Facts([(name, text) for name, text in rows])
    return Section("meaning", "What the numbers mean", "In short.", [facts], folded=True)


def read_picture(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None and path.is_file() else None


def seen(png: bytes) -> Section:
    """Shows what the server could see: the picture of `hushfleet invert`."""
    lead = (
        "Training images, and what an attacker finds in updates that they cause, in the worst case: one step on one "
        "image of a known class. Red: recognised. A failed attack is no proof that none succeeds."
    )
    drawing = Drawing(base64.b64encode(png).decode(), "Training images, and what an attacker finds in updates")
    return Section("seen", "What the server could see", lead, [drawing])
