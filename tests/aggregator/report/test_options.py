"""Commands whose options are dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import load_command
from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.schema import AtLeast1

MOST = 8


@dataclass(frozen=True, kw_only=True)
class Where:
    out: Annotated[Path | None, Option(help="Folder.")] = None


@dataclass(frozen=True, kw_only=True)
class How(Where):
    name: Annotated[str, Option(metavar="NAME", help="Its name.")]
    rounds: Annotated[AtLeast1, Option("--rounds", "-r", help="Number of rounds.")] = 3


def test_a_command_gets_its_options_whole_and_help_lists_them() -> None:
    app, got = typer.Typer(), []

    @app.command()
    @with_options
    def run(context: typer.Context, task: Annotated[str, typer.Argument()], options: How) -> None:
        """Runs it."""
        got.append((task, options, sorted(context.params)))

    assert CliRunner().invoke(app, ["t", "--name", "a", "-r", "5"]).exit_code == 0
    assert got == [("t", How(name="a", rounds=5), ["name", "out", "rounds", "task"])]
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(word in shown for word in ("--out", "NAME", "Number of rounds.", "Runs it."))
    assert CliRunner().invoke(app, ["t"]).exit_code == 2, "NAME is missing"
    assert CliRunner().invoke(app, ["t", "--name", "a", "-r", "0"]).exit_code == 2


@pytest.mark.parametrize("name", ["aggregator", "audit", "flash", "forecast", "privacy", "reproduce", "simulate"])
def test_long_commands_are_made_of_a_dataclass(name: str) -> None:
    command = load_command(name)
    assert len(command.params) > MOST
    assert "options" in command.callback.__wrapped__.__wrapped__.__annotations__
