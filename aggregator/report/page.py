"""Makes one HTML page with interactive plots that needs nothing else: no network, no font, no second file.

A page is a headline and sections, a section is a list of parts: plots, tables, facts, prose. The template turns them
into HTML and escapes every text. Plotly's script is embedded once, compressed, if there is a plot. The content security
policy allows only the page's own script and Plotly's, so a text that came from a device can never run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from hushfleet.aggregator.report.tables import PageCell, Table

BLUE, ORANGE, GREEN, PINK = SERIES = tuple(f"var(--c{n})" for n in range(1, 5))
INK, SOFT, GRID, CARD = "var(--ink)", "var(--soft)", "var(--grid)", "var(--card)"
"""Colours are variables of the style sheet, which has their values for light, dark and paper."""


@dataclass(frozen=True)
class Plot:
    """A chart with its title and a note below it.

    :param traces: Plotly's, as plain data; colours may be variables of the style sheet, such as `var(--c1)`.
    :param wide: whether it takes the whole width of the page.
    """

    kind: ClassVar = "plot"
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    title: str
    note: str = ""
    wide: bool = False

    def json(self) -> Markup:
        """Returns the figure as JSON that is safe inside a script element."""
        figure = _shown({"data": self.traces, "layout": self.layout})
        return htmlsafe_json_dumps(figure, separators=(",", ":"), allow_nan=False)


def _shown(value: Any) -> Any:
    """Returns plain data with six digits a number; a number that is not finite is None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Facts:
    """Names and their values, a line each."""

    kind: ClassVar = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Prose:
    """Paragraphs.

    :param css: `note` for small print, `missing` if there are no data for a chart: see `present`.
    """

    kind: ClassVar = "prose"
    sentences: Sequence[str]
    css: str = ""


@dataclass(frozen=True)
class Code:
    """Text to copy, below words to click on."""

    kind: ClassVar = "code"
    folded: str
    text: str


@dataclass(frozen=True)
class Heading:
    """The heading of a group of parts inside a section, and a sentence that explains them."""

    kind: ClassVar = "heading"
    title: str
    lead: str


@dataclass(frozen=True)
class Picture:
    """An image with words below it.

    :param png: base64.
    :param lines: may be cells of the class `right` or `wrong`.
    """

    png: str
    title: str
    lines: Sequence[PageCell] = ()


@dataclass(frozen=True)
class Pictures:
    """Images next to each other.

    :param css: `drawing` for one in its own width.
    """

    kind: ClassVar = "pictures"
    pictures: Sequence[Picture]
    css: str = "pictures"


SectionPart = Plot | Table | Facts | Prose | Code | Pictures | Heading


@dataclass(frozen=True)
class Section:
    """A heading, one plain sentence that explains the parts, and the parts.

    :param folded: only the heading is visible until the reader clicks on it.
    """

    anchor: str
    title: str
    lead: str
    parts: Sequence[SectionPart]
    folded: bool = False


def missing(words: str) -> Prose:
    """Returns a text that says why there is no chart."""
    return Prose([words], css="missing")


def present(parts: Sequence[SectionPart]) -> list[SectionPart]:
    """Returns the existing parts of a group and a note on missing ones; nothing if only its heading exists."""
    shown = [part for part in parts if not (isinstance(part, Prose) and part.css == "missing")]
    words = [words for part in parts if isinstance(part, Prose) and part.css == "missing" for words in part.sentences]
    note = [Prose([" ".join(words)], css="note")] if words else []
    return [*shown, *note] if any(not isinstance(part, Heading) for part in shown) else []


def _spread(section: Section) -> Section:
    """Returns the section without empty halves: a plot without a part next to it takes the whole width."""
    parts, beside = list(section.parts), list[int]()
    for place, part in enumerate([*parts, None]):
        if (isinstance(part, Plot) and not part.wide) or (isinstance(part, Prose) and part.css != "note"):
            beside.append(place)
            continue
        if len(beside) % 2 and isinstance(last := parts[beside[-1]], Plot):
            parts[beside[-1]] = replace(last, wide=True)
        beside = []
    return replace(section, parts=parts)


def label(text: str, *, longest: int = 24) -> str:
    """Escapes an external text for a figure, which would read `<b>` as markup; the middle of a long text is removed."""
    if len(text) > longest:
        text = f"{text[: longest // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{text[-(longest // 2) :]}"
    return escape(text, quote=False)


def page(
    title: str,
    sections: Sequence[Section],
    *,
    under: str = "",
    answer: Sequence[str] = (),
    tiles: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns the HTML.

    :param under: one line below the title.
    :param answer: sentences that come first, the first of them in bold.
    :param tiles: large numbers, which may be a `PageCell`, each with its description.
    """
    plots = any(isinstance(part, Plot) for section in sections for part in section.parts)
    script, packed = Markup(template("page.js")), plotly_script() if plots else b""
    plotly = gzip.decompress(packed).decode() if plots else ""
    html = _templates().get_template("page.html")
    return html.render(
        title=title,
        under=under,
        answer=answer,
        tiles=tiles,
        sections=list(map(_spread, sections)),
        css=Markup(template("page.css")),
        script=script,
        packed=base64.b64encode(packed).decode(),
        allowed=Markup(" ".join(f"'sha256-{_digest(each)}'" for each in (script, plotly) if each)),
    )


def plotly_script() -> bytes:
    """Returns Plotly's code, compressed: the bundle `plotly.js-cartesian-dist-min` of npm, a third of the whole."""
    return files(__package__).joinpath("templates", "plotly-cartesian.min.js.gz").read_bytes()


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )


def template(name: str) -> str:
    """Returns the text of a file in the templates' folder."""
    environment = _templates()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
