"""`hushfleet methods`: what there is, with its source and its settings."""

from __future__ import annotations

import dataclasses
import json
import sys

import typer
from rich.console import Console
from rich.table import Table

from hushfleet.methods import METHODS, all_names, allow_file, find_method
from hushfleet.methods.method import TrainingConfig


def register(app: typer.Typer) -> None:
    @app.command()
    def methods(
        as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
        file: str = typer.Option("", "--method", metavar="FILE.py:NAME", help="Also this one, from a file."),
    ) -> None:
        """List all methods that are installed, their sources and their settings in a task file.

        Example:  hushfleet methods --json
        """
        names = [*METHODS, *sorted(all_names() - set(METHODS))]
        if file:
            names.append(allow_file(file))
        rows = [
            {
                "name": name,
                "source": found.source,
                "summary": found.summary,
                "settings": {f.name: f.default for f in dataclasses.fields(found.config)},
            }
            for name in names
            for found in [find_method(name)]
        ]
        if as_json:
            json.dump(rows, sys.stdout, indent=2)
            print()
            return
        common = [f.name for f in dataclasses.fields(TrainingConfig)]
        table = Table("method", "source", "what it does", "its own settings with their defaults", show_lines=True)
        for row in rows:
            own = [f"{name} = {value!r}" for name, value in row["settings"].items() if name not in common]
            table.add_row(row["name"], row["source"], row["summary"], "\n".join(own))
        Console().print(table)
        Console().print(f"All of them take {', '.join(common)}; docs/methods.md says what leaves the device.")
