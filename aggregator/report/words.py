"""Renders the words of a report from its templates, which have the sentences by verdict."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hushfleet.aggregator.report import readable
from hushfleet.aggregator.report.verdict import LIMIT, VERDICTS, Headline, gain_of, seen_by_server
from hushfleet.aggregator.results.result import Result
from hushfleet.privacy.protection import LARGEST_EPSILON, guess_rate, protection

SENTENCES = ("answer", "lost", "own_heads", "lifetime", "privacy", "trust", "trade")


class Words:
    """The words on a run, in a template's macros. Whitespace in them is folded."""

    def __init__(self, result: Result, headline: Headline, *, template: str = "sentences.jinja") -> None:
        self._rows: list[tuple[str, str]] = []
        self._macros = (
            _templates()
            .get_template(template)
            .make_module(
                {
                    "result": result,
                    "headline": headline,
                    "fact": lambda name, value: self._rows.append((name, str(value))),
                }
            )
        )

    def told(self, name: str, *values: Any) -> str:
        """Returns the text of a macro."""
        return _folded(getattr(self._macros, name)(*values))

    def heading(self, name: str, *values: Any) -> tuple[str, str]:
        """Returns the first line of a macro, and the others."""
        title, _, lead = getattr(self._macros, name)(*values).partition("\n")
        return title, _folded(lead)

    def facts(self, name: str, *values: Any) -> list[tuple[str, str]]:
        """Returns the names and values that a macro tells by `fact`."""
        self._rows.clear()
        self.told(name, *values)
        return [(name, _folded(value)) for name, value in self._rows]


def sentences(result: Result, headline: Headline) -> dict[str, str]:
    """Returns the sentences on a run by name, in the order of `SENTENCES`; those with nothing to say are missing."""
    words = Words(result, headline)
    return {name: text for name in SENTENCES if (text := words.told(name))}


def _folded(text: str) -> str:
    return re.sub(r"[ \n]+", " ", text).strip()


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__),
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    named = ("number", "percent", "percent_up", "points", "gained", "size", "codec", "evaluated", "statistic_lines")
    functions = {name: getattr(readable, name) for name in (*named, "format_lifetime", "from_to", "repeating")}
    functions |= {"epsilon": readable.epsilon_number, "is_finite": math.isfinite, "protection": protection}
    functions |= {"guess_rate": guess_rate, "seen_by_server": seen_by_server, "gain_of": gain_of}
    made.filters |= functions
    made.globals |= {**functions, "verdicts": VERDICTS, "limit": LIMIT, "levels": LARGEST_EPSILON}
    return made
