"""A text that harms a terminal or a log that shows it as it is."""

from __future__ import annotations

NO_UTF8 = "\udcff"  # a byte of a file's name
HOSTILE = "\x1b[2J\x9b31m\u202e\r\b\nERROR   all is lost"
SHOWN = r"\x1b[2J\x9b31m\u202e\r\x08\nERROR   all is lost"
HOSTILE_FILE, SHOWN_FILE = f"{HOSTILE}{NO_UTF8}", rf"{SHOWN}\udcff"


def assert_harmless(output: str, *, colours: bool = False) -> None:
    """:param colours: whether the output may have escape sequences of rich."""
    obeyed = "\x9b\u202e\r\b" + NO_UTF8 + ("" if colours else "\x1b")
    assert [character for character in obeyed if character in output] == []
    assert "\x1b[2J" not in output
    assert "\nERROR   all" not in output
