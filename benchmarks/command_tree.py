"""Prints the tree of `hushfleet`'s commands, and counts them: `python -m benchmarks.command_tree`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import typer.main

from hushfleet.aggregator.commands.main import build_app, load_command


class Listed(NamedTuple):
    """A command, or a group of commands.

    :param words: without `hushfleet`.
    :param hidden: whether the help leaves it out, or a group above it.
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
    tops = application.commands.items()
    return [each for name, top in tops for each in _below(load_command(name), (name,), hidden=top.hidden)]


def counts(tree: list[Listed]) -> dict[str, int]:
    """Returns the number of listed commands: in two helps, and all that do something."""
    shown = [each for each in tree if not each.hidden]
    return {
        "hushfleet --help": sum(len(each.words) == 1 for each in shown),
        "hushfleet fleet --help": sum(len(each.words) == 2 and each.words[0] == "fleet" for each in shown),
        "with sub-commands": sum(not each.subs for each in shown),
        "hidden": len(tree) - len(shown),
    }


def _below(command: Any, words: tuple[str, ...], *, hidden: bool) -> Iterator[Listed]:
    hidden, subs = hidden or command.hidden, getattr(command, "commands", {})
    yield Listed(words, hidden, len(subs), getattr(command, "rich_help_panel", None) or "")
    for name, each in subs.items():
        yield from _below(each, (*words, name), hidden=hidden)


if __name__ == "__main__":
    for each in (tree := command_tree()):
        print(f"{'  ' * (len(each.words) - 1)}{each.words[-1]}{'  (hidden)' * each.hidden}")
    for name, count in counts(tree).items():
        print(f"{count:4}  {name}")
