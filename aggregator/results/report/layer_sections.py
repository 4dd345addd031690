"""The report's sections on layers over rounds and on labels over devices."""

from __future__ import annotations

from hushfleet.aggregator.results.report import charts, grids
from hushfleet.aggregator.results.report.charts import Series
from hushfleet.aggregator.results.report.markup import Section, figure, gallery, missing
from hushfleet.aggregator.results.report.measured import any_measured, from_to, rounds_of, whole_percent
from hushfleet.aggregator.results.result import Result

MOST_BUBBLE_ROWS = 40
MOST_LAYER_LINES = 4


def personalization(result: Result) -> Section:
    detail = result.details
    parts = [
        _by_layer(
            result,
            detail.personal_share,
            "Personalised share of each layer, %",
            "No personalised share was recorded: the method shares all, or devices sent no metrics.",
        ),
        _by_layer(
            result,
            detail.clip_weights,
            "Share of the clip norm per layer, %",
            "No clip weights were recorded: the method clips as a whole, or devices sent no metrics.",
        ),
    ]
    lead = "What stays on the devices, and how the clip norm is divided among layers; means over devices."
    return Section("layers", "Layers over rounds", lead, gallery(parts))


def _by_layer(result: Result, grid: list[list[float | None]], title: str, otherwise: str) -> str:
    xs, names = rounds_of(result), [name for name, _ in result.model.layers]
    if not xs or not any_measured([value for row in grid for value in row]):
        return missing(otherwise)
    columns = [[row[n] for row in grid] for n in range(len(names))]
    if len(names) <= MOST_LAYER_LINES:
        series = [Series(name, columns[n], n + 1) for n, name in enumerate(names)]
        chart = charts.lines(xs, series, label=title, y_text=whole_percent, floor=0)
        return figure(title, chart, series)
    chart = grids.heat_map(names, [str(x) for x in xs], columns, label=title, text=whole_percent, column_title="round")
    return figure(title, chart, note="The stronger the colour, the larger.")


def labels(result: Result) -> Section:
    detail = result.details
    lead = f"Who holds which images: partition {result.partition}."
    if not detail.label_counts:
        body = missing("Not known: devices in the field do not tell which labels they hold.")
        return Section("labels", "Labels over devices", lead, body)
    classes = detail.class_names or [str(n) for n in range(len(detail.label_counts[0]))]
    images = [sum(row) for row in detail.label_counts]
    words = f"{sum(images):,} training images on {len(images)} devices, {from_to(sorted(images))} on a device."
    if len(detail.devices) <= MOST_BUBBLE_ROWS and len(classes) <= 20:
        chart = grids.bubbles(detail.devices, classes, detail.label_counts, label="labels over devices")
        note = f"The area of a disc is the number of images. {words}"
    else:
        counts = [[float(count) for count in row] for row in detail.label_counts]
        chart = grids.heat_map(
            detail.devices,
            classes,
            counts,
            label="labels over devices",
            text=lambda v: f"{v:.0f}",
            column_title="class",
        )
        note = f"The stronger the colour, the more images. {words}"
    if detail.class_names and not all(name.isdigit() for name in classes):
        note += " Classes from left to right: " + ", ".join(classes) + "."
    return Section("labels", "Labels over devices", lead, gallery([figure("Training images", chart, note=note)]))
