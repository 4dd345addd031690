"""Makes output safe: no text of somebody else commands a terminal or forges a line, and no character ends a run.

Names of files and classes, labels, and texts from the network may hold control characters, which move the cursor or
erase what stands there, and characters that change the direction of the text. They are escaped where texts leave: in
the streams of a command (`escape_output`), in its log (`log_to_stderr`) and in rich's console
(`hushfleet.aggregator.report.console`). Texts inside the program, and JSON, keep the true name.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any, TextIO, cast

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
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but tab and line break
    r"\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    r"\ud800-\udfff]"  # bytes of a file's name that are no UTF-8
)
"""Characters that a terminal obeys, or that it does not show although they change what it shows."""


def shown(text: str) -> str:
    r"""Returns the text with escapes, like `\x1b`, for such characters. A text that it has returned does not change.

    >>> shown("leaf\x1b[31m")
    'leaf\\x1b[31m'
    """
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text) if _HIDDEN.search(text) else text


def one_line(text: str) -> str:
    r"""Returns what `shown` does, with line breaks escaped, too.

    >>> one_line("two\nlines")
    'two\\nlines'
    """
    return shown(text).replace("\n", "\\n")


def say(*lines: str, error: bool = False) -> None:
    """Prints lines of texts that may contain names; only the ends of the lines are line breaks."""
    print(*map(one_line, lines), sep="\n", file=sys.stderr if error else sys.stdout, flush=True)


def take_all_characters() -> None:
    """Makes standard output and standard error accept all characters; under `LC_ALL=C` they refuse some."""
    codecs.register_error(_HANDLER, _otherwise)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's stream accepts all characters
            stream.reconfigure(errors=_HANDLER)


def escape_output() -> None:
    """Makes standard output and standard error of a command escape as `shown` does, whoever writes there."""
    sys.stdout, sys.stderr = (_Escaping.around(stream) for stream in (sys.stdout, sys.stderr))


def unescaped(stream: Any) -> Any:
    """Returns the stream inside one of `escape_output`, for a writer that commands the terminal itself."""
    return getattr(stream, "unescaped", stream)


def log_to_stderr(form: str, *, level: int = logging.NOTSET) -> None:
    """Lets the log go to standard error, each record in a line.

    :param form: the format of a record.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(form))
    logging.basicConfig(handlers=[handler], level=level)


class _Escaping:
    """A text stream that escapes what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream

    @classmethod
    def around(cls, stream: TextIO) -> TextIO:
        return stream if isinstance(stream, cls) else cast(TextIO, cls(stream))

    def write(self, text: str) -> int:
        self.unescaped.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


class _OneLine(logging.Formatter):
    """Indents tracebacks, so that no text in them looks like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return textwrap.indent(shown(super().formatException(ei)), "  ")


def _otherwise(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_OTHERWISE.get(character, "?") for character in lacking), error.end
