"""Prints the tree of `hushfleet`'s commands, and counts them: `python -m benchmarks.command_tree`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import typer.main

from hushfleet.aggregator.commands.main import build_app, load_command


class Listed(NamedTuple):
    """A command.

    :param words: without `hushfleet`.
    :param hidden: whether `--help` leaves it out, or a group above it.
    :param subs: number of commands below it; 0 for one that does something.
    :param group: the part of the help that lists it.
    """

    words: tuple[str, ...]
    hidden: bool
    subs: int
    group: str


def command_tree() -> list[Listed]:
    """Returns all commands and groups, in the order of the help."""
    application: Any = typer.main.get_command(build_app())
    return [
        each
        for name, stand_in in application.commands.items()
        for each in _below(load_command(name), (name,), hidden=stand_in.hidden)
    ]


def counts(tree: list[Listed]) -> dict[str, int]:
    """Returns the numbers of listed and hidden commands: first level of `hushfleet`, of `hushfleet fleet`, and all
    that do something."""
    rows = {
        "hushfleet --help": [each for each in tree if len(each.words) == 1],
        "hushfleet fleet --help": [each for each in tree if len(each.words) == 2 and each.words[0] == "fleet"],
        "with sub-commands": [each for each in tree if not each.subs],
    }
    return {
        f"{name}{', hidden' * hidden}": sum(each.hidden == hidden for each in each_row)
        for name, each_row in rows.items()
        for hidden in (False, True)
    }


def _below(command: Any, words: tuple[str, ...], *, hidden: bool) -> Iterator[Listed]:
    hidden = hidden or command.hidden
    subs = getattr(command, "commands", {})
    yield Listed(words, hidden, len(subs), getattr(command, "rich_help_panel", None) or "")
    for name, each in subs.items():
        yield from _below(each, (*words, name), hidden=hidden)


if __name__ == "__main__":
    tree = command_tree()
    for each in tree:
        print(f"{'  ' * (len(each.words) - 1)}{each.words[-1]}{'  (hidden)' * each.hidden}")
    for name, count in counts(tree).items():
        print(f"{count:4}  {name}")
