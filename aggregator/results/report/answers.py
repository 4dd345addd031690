"""Makes the report's section on the models' answers: images of the common test set, and confusion matrices."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.aggregator.results.report import charts
from hushfleet.aggregator.results.report.page import PageCell, Picture, Pictures, Section, SectionPart
from hushfleet.aggregator.results.report.readable import percent
from hushfleet.aggregator.results.result import Example, Result


def answers_section(result: Result) -> Section | None:
    """Returns the section; None if no answers are known, as in the field, where images stay with their owners."""
    detail = result.details
    parts: list[SectionPart] = []
    if detail.examples:
        parts.append(Pictures([_picture(each, detail.class_names) for each in detail.examples]))
    asked = "a device" if detail.confusion_devices == 1 else f"{detail.confusion_devices} devices"
    for title, counts in (
        ("The global model", detail.confusion_global),
        (f"Own models of {asked}", detail.confusion_own),
    ):
        if counts:
            parts.append(_confusion(title, counts, detail.class_names))
    if not parts:
        return None
    lead = "Images of the common test set, chosen by chance, and what models take them for. A matrix has a row a class."
    return Section("answers", "What the models say", lead, parts)


def _picture(each: Example, names: Sequence[str]) -> Picture:
    said = (("global", each.said_global), (f"{each.device}, own", each.said_own), ("alone", each.said_alone))
    lines = [
        PageCell(f"{who}: {names[what] if what < len(names) else what}", "right" if what == each.label else "wrong")
        for who, what in said
        if what is not None
    ]
    return Picture(each.png, names[each.label], lines)


def _confusion(title: str, counts: Sequence[Sequence[int]], names: Sequence[str]) -> SectionPart:
    shares = [[count / sum(row) if sum(row) else None for count in row] for row in counts]
    right = {name: row[n] for n, (name, row) in enumerate(zip(names, shares, strict=True))}
    known = {name: share for name, share in right.items() if share is not None}
    worst = min(known, key=lambda name: known[name], default=None)
    note = "" if worst is None else f"Weakest class: {worst}, {percent(known[worst])} right."
    return charts.heat_map(title, names, names, shares, form=".0%", x="taken for", note=note)
