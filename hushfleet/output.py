"""Makes output safe in any encoding: a character that the encoding lacks is replaced, so that it does not end a run."""

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
    """Makes standard output and standard error accept all characters; under `LC_ALL=C` they refuse some."""
    codecs.register_error(_HANDLER, _otherwise)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's stream accepts all characters
            stream.reconfigure(errors=_HANDLER)


def _otherwise(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_OTHERWISE.get(character, "?") for character in lacking), error.end
