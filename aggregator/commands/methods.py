"""`hushfleet methods`: what there is, with its source and its settings."""

from __future__ import annotations

import dataclasses
import json
import sys

import typer
from rich.console import Console
from rich.table import Table

from hushfleet.methods import METHODS
from hushfleet.methods.base import TrainingConfig


def register(app: typer.Typer) -> None:
    @app.command()
    def methods(as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table.")) -> None:
        """List the published methods, their sources and their settings in a task file.

        Example:  hushfleet methods --json
        """
        rows = [
            {
                "name": method.name,
                "source": method.source,
                "summary": method.summary,
                "settings": {f.name: f.default for f in dataclasses.fields(method.config_class)},
            }
            for method in METHODS.values()
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
