"""The number of commands only falls: a new one takes the place of another, or says here why not."""

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


def _below(command: Any, words: tuple[str, ...], *, hidden: bool) -> Iterator[Listed]:
    hidden, subs = hidden or command.hidden, getattr(command, "commands", {})
    yield Listed(words, hidden, len(subs), getattr(command, "rich_help_panel", None) or "")
    for name, each in subs.items():
        yield from _below(each, (*words, name), hidden=hidden)


def test_a_newcomer_finds_few_commands() -> None:
    """Before there were 19, 26 and 56. `fleet set` is the 17th and the 43rd, `features make` the 18th and the 44th."""
    shown = [each for each in command_tree() if not each.hidden]
    assert sum(len(each.words) == 1 for each in shown) <= 18
    assert sum(len(each.words) == 2 and each.words[0] == "fleet" for each in shown) <= 17
    assert sum(not each.subs for each in shown) <= 44


def test_what_units_call_is_hidden_and_works() -> None:
    hidden = [" ".join(each.words) for each in command_tree() if each.hidden]
    assert hidden == ["fleet serve", "aggregator", "broker"]


def test_the_first_two_groups_of_a_fleet_are_twelve_commands() -> None:
    tree = [each for each in command_tree() if each.words[0] == "fleet" and len(each.words) == 2 and not each.hidden]
    first = [each.words[1] for each in tree if each.group in ("Make it and let it learn", "Boards, in and out")]
    assert len({*first} - {"set"}) == 12
