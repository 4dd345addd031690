"""Scales, ticks and a small SVG canvas: what charts are drawn with.

Charts are hand-written SVG: text stays text, colours are classes that the page's style sheet sets for light,
dark and paper, and a report needs no plotting library and no script. A canvas is `WIDTH` units wide and
scales with the page, so a chart stays readable on a telephone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 460


@dataclass(frozen=True)
class Scale:
    """Maps values `low..high` to pixels `start..stop`, linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + (self.stop - self.start) * share

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale."""
        if self.log:
            return log_ticks(self.low, self.high, count)
        return linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten inside `low..high`, about `count` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten inside `low..high`, with 2 and 5 between them where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in powers for m in parts if low * 0.999 <= m * 10.0**p <= high * 1.001]
        if len(ticks) <= count + 2:
            return ticks
    return ticks[:: max(1, math.ceil(len(ticks) / count))]


def whole_ticks(low: int, high: int, count: int) -> list[int]:
    """Round numbers for an axis that counts, such as rounds."""
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if (high - low) / s < count), 1000)
    return [n for n in range(low, high + 1) if n % step == 0]


def span(values: Sequence[float], *, margin: float = 0.06) -> tuple[float, float]:
    """Lowest and highest value with a margin, never of zero height; (0, 1) where there are none."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = (high - low) * margin or abs(high) * 0.1 or 1.0
    return low - room, high + room


@dataclass
class Canvas:
    """Collects SVG elements; coordinates in units of the canvas, origin top left."""

    height: float
    label: str
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>')

    def path(self, points: Sequence[tuple[float, float]], css: str, *, closed: bool = False) -> None:
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="M{steps}{"Z" if closed else ""}" class="{css}"/>')

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        css: str,
        *,
        tip: str = "",
        opacity: float | None = None,
    ) -> None:
        shade = "" if opacity is None else f' fill-opacity="{opacity:.3f}"'
        self._shape(
            f'rect x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{max(0, height):.1f}" '
            f'class="{css}"{shade}',
            tip,
        )

    def circle(self, x: float, y: float, radius: float, css: str, *, tip: str = "") -> None:
        self._shape(f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{css}"', tip)

    def mark(self, kind: int, x: float, y: float, css: str, *, tip: str = "", radius: float = 3.4) -> None:
        """A point whose form follows its series, so that colour is never alone."""
        r = radius
        if kind % 4 == 0:
            self.circle(x, y, r, css, tip=tip)
        elif kind % 4 == 1:
            self.rect(x - r * 0.9, y - r * 0.9, r * 1.8, r * 1.8, css, tip=tip)
        else:
            corners = (
                [(x, y - r * 1.2), (x + r * 1.1, y + r * 0.8), (x - r * 1.1, y + r * 0.8)]
                if kind % 4 == 2
                else [(x, y - r * 1.25), (x + r * 1.25, y), (x, y + r * 1.25), (x - r * 1.25, y)]
            )
            steps = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
            self._shape(f'polygon points="{steps}" class="{css}"', tip)

    def text(self, x: float, y: float, words: str, css: str = "t", *, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>')

    def _shape(self, element: str, tip: str) -> None:
        name = element.partition(" ")[0]
        self.parts.append(f"<{element}><title>{escape(tip)}</title></{name}>" if tip else f"<{element}/>")

    def svg(self) -> str:
        """The element; `label` is what a screen reader says."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(self.label)}">'
            f"{''.join(self.parts)}</svg>"
        )
