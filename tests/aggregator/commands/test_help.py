"""The help of all commands: 80 columns, and what can be copied and pasted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from hushfleet.aggregator.commands.help import COLUMNS, in_plain_text
from hushfleet.aggregator.commands.main import build_app, load_command
from hushfleet.edge_client.__main__ import main as edge_main

APPLICATION = typer.main.get_command(build_app())
NAMES = sorted(APPLICATION.commands)


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command and of all below it, as a terminal of 80 columns shows it."""
    yield name, command.get_help(command.make_context(name, ["--"], resilient_parsing=True))
    for sub, each in getattr(command, "commands", {}).items():
        yield from helps(each, f"{name} {sub}")


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        whole = APPLICATION.get_help(APPLICATION.make_context("hushfleet", ["--"], resilient_parsing=True))
        every = (load_command(name) for name in NAMES)
        return {
            "hushfleet": whole,
            **{name: text for each in every for name, text in helps(each, f"hushfleet {each.name}")},
        }


def pasted(text: str) -> list[str]:
    """The commands of a help, as a shell takes them when their lines are copied."""
    return re.findall(r"^ +(hushfleet .+)$", re.sub(r"\\\n *", "", text), re.MULTILINE)


def test_every_line_fits_a_terminal_of_80_columns(shown: dict[str, str]) -> None:
    assert len(shown) > 40
    for name, text in shown.items():
        assert [line for line in text.splitlines() if len(line) > COLUMNS or line != line.rstrip()] == [], name


@pytest.mark.parametrize("word", [[], ["run"], ["predict"], ["status"]], ids=" ".join)
def test_so_does_the_help_of_a_board(
    word: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit):
        edge_main([*word, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= COLUMNS


def test_no_help_shows_a_python_type(shown: dict[str, str]) -> None:
    for name, text in shown.items():
        assert not re.search(r"<(bool|str|int|float|path|file|list)\b", text), name


def options_of(command: Any) -> Iterator[Any]:
    yield from (each for each in command.params if each.param_type_name == "option")
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)


def test_a_value_has_no_name_that_typer_takes_for_the_options_own() -> None:
    """Version 0.27 would make `--IMAGE` of `--image` if its value were called IMAGE."""
    every = [each for name in NAMES for each in options_of(load_command(name))]
    assert len(every) > 150
    assert [each.name for each in every if (each.metavar or "").lower() == each.name] == []


def test_values_are_named_by_their_types(shown: dict[str, str]) -> None:
    """Whatever typer calls the types."""
    words = shown["hushfleet simulate"] + shown["hushfleet broker"] + shown["hushfleet audit"]
    for option, value in {
        "--seed": "N",
        "--seconds": "X",
        "--host": "TEXT",
        "--out": "PATH",
        "--ca-file": "FILE",
    }.items():
        assert re.search(rf"^ +{option} {value}\b", words, re.MULTILINE), option
    assert re.search(r"^ +--engine [<\[]fast\|live\|ray[>\]]", words, re.MULTILINE)
    assert re.search(r"^ +--json  ", words, re.MULTILINE)


def test_every_example_is_a_whole_command(shown: dict[str, str]) -> None:
    """An example of a command begins with its name, and holds no word that is not of the command line."""
    examples = {name: pasted(text) for name, text in shown.items() if name != "hushfleet"}
    assert sum(map(len, examples.values())) > 60
    for name, commands in examples.items():
        for command in commands:
            assert not set("`()\\") & set(command), (name, command)
            assert shlex.split(command)[0] == "hushfleet"


def test_an_example_keeps_its_words_and_an_option_its_value() -> None:
    words = "hushfleet simulate tasks/digits-hush.toml --set privacy.epsilon=8 --engine live --own-processes 8 --resume"
    command = SimpleNamespace(help=f"Does it.\n\n    {words}\n\nAgain: `{words}`", short_help=None, params=[])
    text = in_plain_text(command).help
    assert pasted(text) == [words, words]
    assert re.search(r"privacy.epsilon=8 \\\n +--engine live", text)
    assert "Again:" in text
    assert command.short_help == "Does it."


def test_commands_are_listed_in_groups_and_without_what_units_call(shown: dict[str, str]) -> None:
    heads = {name: re.findall(r"^(\S.+):$", text, re.MULTILINE) for name, text in shown.items()}
    assert [head.partition(" (first: hushfleet ")[0] for head in heads["hushfleet"]] == [
        "Options", "Try it", "A fleet", "Research",
    ]  # fmt: skip
    assert all("(first: " in head for head in heads["hushfleet"][1:]), "each says what to type first"
    assert len(heads["hushfleet fleet"]) == 5
    assert not re.search(r"^  (aggregator|broker|serve) ", shown["hushfleet"] + shown["hushfleet fleet"], re.MULTILINE)


def test_lists_of_commands_have_whole_sentences(shown: dict[str, str]) -> None:
    for name, text in shown.items():
        assert "..." not in text.rpartition("Show this message and exit.")[2], name
