"""Output in whatever encoding: a character that it lacks is written in others, and ends no run."""

from __future__ import annotations

import codecs
import io
import sys

_OTHERWISE = {
    "\N{INFINITY}": "inf",
    "\N{NO-BREAK SPACE}": " ",
    "\N{EN DASH}": "-",
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{DEGREE SIGN}": " deg ",
}
_HANDLER = "hushfleet"


def take_all_characters() -> None:
    """From now on standard output and standard error refuse no character, as they do under `LC_ALL=C`."""
    codecs.register_error(_HANDLER, _otherwise)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's takes all
            stream.reconfigure(errors=_HANDLER)


def _otherwise(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_OTHERWISE.get(character, "?") for character in lacking), error.end
