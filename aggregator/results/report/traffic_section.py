"""The report's sections on bytes: what was sent, in which form, what that costs, and what other forms would."""

from __future__ import annotations

import math

from hushfleet.aggregator.results.report import charts
from hushfleet.aggregator.results.report.charts import Series
from hushfleet.aggregator.results.report.markup import Section, definitions, figure, gallery, missing, prose, table
from hushfleet.aggregator.results.report.measured import any_measured, rounds_of, whole_percent
from hushfleet.aggregator.results.report.verdict import Verdict, number, percent, signed, size
from hushfleet.aggregator.results.result import Result, WireInfo, WirePoint

ONE_BIT_DB = 10 * math.log10(math.pi / 2)


def traffic(result: Result) -> Section:
    detail, xs = result.details, rounds_of(result)
    sent = [row.uplink_bytes for row in result.rounds]
    if not xs or not any(sent):
        body = missing("No bytes were counted in this run.")
        return Section("bytes", "Bytes per round", "What the devices sent up.", body)
    references = [
        Series(name, values, color, dashed=True)
        for name, values, color in (
            ("Eq. (20) of the paper", detail.eq20_bytes, 2),
            ("float32, all parameters", detail.float32_bytes, 3),
        )
        if any_measured(values)
    ]
    chart = charts.bars(xs, sent, references, label="uplink bytes per round", name="sent", y_text=_size_tick)
    legend = [Series("sent, all participants", sent, 1), *references]
    down = sum(row.downlink_bytes for row in result.rounds)
    words = [f"The devices sent {size(sum(sent))} up in {len(xs)} rounds and received {size(down)}."]
    for name, values in (("Eq. (20)", detail.eq20_bytes), ("float32", detail.float32_bytes)):
        total = sum(value or 0 for value in values)
        words.append(_ratio(sum(sent), total, name) if total else f"What {name} takes was not recorded.")
    note = "Payload of updates with their headers, without MQTT and TCP framing."
    body = gallery(
        [figure("Sent up per round", chart, legend, note=note), prose(words) + definitions(_wire_facts(result, down))]
    )
    return Section("bytes", "Bytes per round", "Fewer bytes are shorter radio time and a smaller bill.", body)


def _wire_facts(result: Result, down: int) -> list[tuple[str, str]]:
    bits, models = result.bits_per_value, sum(value or 0 for value in result.details.float32_bytes)
    received = f"{size(down)}; as whole float32 models {size(models)}"
    return [
        ("codec", wire_words(result.wire) if result.wire else "not recorded"),
        ("sent up per parameter", "not recorded" if bits is None else f"{number(bits)} bits, header and signature in"),
        ("cost in signal to noise", cost_words(result.wire) if result.wire else "not recorded"),
        ("received", f"{received}, {_times(down, models)}" if models and down else size(down)),
    ]


def wire_words(wire: WireInfo) -> str:
    """The form of updates: `quantized, step 0.5 of the noise`."""
    of = "the noise" if wire.step_unit == "noise" else "a layer's root mean square"
    return _form(wire) + (f" of {of}" if wire.step is not None else "")


def _form(wire: WireInfo) -> str:
    return wire.codec if wire.step is None else f"{wire.codec}, step {number(wire.step)}"


def cost_words(wire: WireInfo) -> str:
    """What a form takes from the ratio of signal to noise."""
    if wire.codec == "one-bit":
        return f"{number(ONE_BIT_DB)} dB: signs have 1.57 times the variance of the noise"
    if wire.codec == "float16":
        return "none to speak of: values are rounded by at most 1/2,048 of themselves"
    if wire.step is None:
        return "none"
    added = wire.step**2 / 12
    if wire.step_unit == "noise":
        return f"{number(10 * math.log10(1 + added))} dB: {number(100 * added)}\N{NO-BREAK SPACE}% more variance"
    return f"there is no noise; the rounding is {number(-10 * math.log10(added))} dB below the update"


def wire_sweep(result: Result, verdict: Verdict) -> Section | None:
    """None where no other forms were tried: they are an option of simulations."""
    points = sorted(result.details.wire_sweep, key=lambda point: point.uplink_bytes)
    if not points:
        return None
    title = "Accuracy against bytes"
    lead = "The same run, with the same noise, in other forms on the wire. The run's own is marked."
    measured = [point for point in points if point.bits_per_value]
    xs = [point.bits_per_value for point in measured]
    series = [
        Series("own models, common test", [p.accuracy_own_common for p in measured], 1),
        Series("own models, own data", [p.accuracy_own_local for p in measured], 2),
        Series("global model, common test", [p.accuracy_global for p in measured], 3),
    ]
    if verdict.alone_common is not None:
        series.append(Series("alone, common test", [verdict.alone_common] * len(xs), 1, dashed=True))
    shown = [one for one in series if any_measured(one.values)]
    own = next((p.bits_per_value for p in measured if p.wire == result.wire), None)
    if xs and shown:
        chart = charts.lines(
            xs,
            shown,
            label="accuracy against bits a parameter",
            y_text=whole_percent,
            x_title="bits sent per parameter",
            x_log=True,
            floor=-1,
            ceiling=1.02,
            guide=own,
        )
        note = (
            "Logarithmic scale, bits of whole updates. Dotted: this run's form. The noise is the same at every point; "
            "with one seed, differences of a point or two may be chance."
        )
        picture = figure("Accuracy, %", chart, shown, note=note)
    else:
        picture = missing("No accuracy was measured in these runs.")
    head = ("on the wire", "bits per parameter", "sent up", "cost, dB", "common test", "own data", "global", "gain")
    body = gallery([picture]) + table(head, [_wire_line(point, own=point.wire == result.wire) for point in points])
    return Section("wire-sweep", title, lead, body)


def _wire_line(point: WirePoint, *, own: bool) -> tuple[str, ...]:
    gain = point.gain_over_local_only
    return (
        _form(point.wire) + (" (this run)" if own else ""),
        number(point.bits_per_value),
        size(point.uplink_bytes),
        _cost_db(point.wire),
        percent(point.accuracy_own_common),
        percent(point.accuracy_own_local),
        percent(point.accuracy_global),
        "not measured" if gain is None else signed(100 * gain),
    )


def _cost_db(wire: WireInfo) -> str:
    if wire.codec == "one-bit":
        return number(ONE_BIT_DB)
    if wire.step is None:
        return "0"
    return number(10 * math.log10(1 + wire.step**2 / 12)) if wire.step_unit == "noise" else "\N{EN DASH}"


def _ratio(sent: int, reference: float, name: str) -> str:
    return f"{name} counts {size(reference)}: what was sent is {_times(sent, reference)}."


def _times(count: int, reference: float) -> str:
    if count == reference:
        return "of the same size"
    if count < reference:
        return f"{reference / count:.3g} times smaller"
    return f"{count / reference:.3g} times larger"


def _size_tick(value: float) -> str:
    return "0" if value == 0 else size(value)
