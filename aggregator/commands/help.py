"""Formats help as plain text of 80 columns, in which every command can be copied and pasted unchanged."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.core import TyperGroup

COLUMNS = 80
_INDENT = 2  # Click's
_KEPT = "\b\n"  # marks a paragraph whose lines Click keeps
_COMMAND = re.compile(r"(?P<before>(?:[^`]+:)?)\s*`(?P<command>hushfleet(?:-edge)? [^`]+)`")
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Grouped(TyperGroup):
    """Lists its commands in the groups that they name by `rich_help_panel`, in the order of their declaration."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                group = getattr(command, "rich_help_panel", None) or "Commands"
                rows.setdefault(group, []).append((name, command.get_short_help_str()))
        width = max(len(name) for group in rows.values() for name, _ in group)
        for group, listed in rows.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), text) for name, text in listed])


def in_plain_text(command: Any) -> Any:
    """Returns the command with plain help for it and its sub-commands.

    A paragraph of the help that is one command in backticks, perhaps after words with a colon, gets lines of its own,
    continued with backslashes. The same holds for the commands of an indented paragraph, whose other lines are kept.
    """
    paragraphs = (command.help or "").split("\n\n")
    command.short_help = command.short_help or " ".join(paragraphs[0].split())
    command.help = "\n\n".join(_KEPT + each for paragraph in paragraphs for each in _plain(paragraph))
    hints = get_type_hints(command.callback) if command.params else {}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: ""  # its name is enough
        else:
            parameter.metavar = parameter.metavar or _metavar(hints[parameter.name])
    for each in getattr(command, "commands", {}).values():
        in_plain_text(each)
    return command


def _metavar(hint: Any) -> str | None:
    """Returns the word for a value of this type; None where the values are listed, and for a flag.

    It reads the signature, since each version of typer has another name for its own description of a type.
    """
    return _METAVARS.get(hint) or next(filter(None, map(_metavar, get_args(hint))), None)


def _plain(paragraph: str) -> Iterator[str]:
    if found := _COMMAND.fullmatch(paragraph.strip()):
        if found["before"]:
            yield _filled(found["before"])
        yield _pasted(found["command"])
    elif paragraph.startswith("    "):
        lines = textwrap.dedent(paragraph).splitlines()
        yield "\n".join(_pasted(line) if line.startswith("hushfleet") else f"  {line}" for line in lines)
    elif paragraph.strip():
        yield _filled(paragraph)


def _filled(words: str) -> str:
    return textwrap.fill(" ".join(words.split()), COLUMNS - _INDENT, break_on_hyphens=False, break_long_words=False)


def _pasted(command: str) -> str:
    """Returns the command, on several lines if it is too long; an option stays on the line of its value."""
    together = re.sub(r"(--[\w-]+) (?!-)", "\\1\0", " ".join(command.split()))
    width = COLUMNS - _INDENT - len(" \\")
    lines = textwrap.wrap(
        together, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
    )  # fmt: skip
    return " \\\n".join(lines).replace("\0", " ")
