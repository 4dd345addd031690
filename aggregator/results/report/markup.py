"""The report's building blocks in HTML: figures, tables, lists. All text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hushfleet.aggregator.results.report.charts import Series


@dataclass(frozen=True)
class Section:
    """A heading, one plain sentence on what is to be seen, and HTML below it."""

    anchor: str
    title: str
    lead: str
    body: str


def figure(title: str, chart: str, legend: Sequence[Series] = (), *, note: str = "") -> str:
    """A chart with its title, legend and note."""
    keys = "".join(
        f'<li class="key k{one.color}{" dashed" if one.dashed else ""}">{escape(one.name)}</li>' for one in legend
    )
    keys = f"<ul>{keys}</ul>" if len(legend) > 1 or any(one.faint or one.band for one in legend) else ""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{keys}{chart}{below}</figure>"


def missing(words: str) -> str:
    """Stands where a chart would be if there were data for it."""
    return f'<p class="missing">{escape(words)}</p>'


def prose(sentences: Sequence[str]) -> str:
    return '<div class="prose">' + "".join(f"<p>{escape(words)}</p>" for words in sentences) + "</div>"


def gallery(parts: Sequence[str]) -> str:
    return f'<div class="gallery">{"".join(parts)}</div>'


def definitions(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"<dl>{rows}</dl>"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """A table whose first `names` columns (1 or 2) are words and whose others are numbers."""
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    body = f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table class="names-{names}">{body}</table></div>'
