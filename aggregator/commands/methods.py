"""`hushfleet methods`: list all methods, with sources and settings."""

from __future__ import annotations

import dataclasses
import json
import sys

import typer


def methods(
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    file: str = typer.Option("", "--method", metavar="FILE.py:NAME", help="Include a method from a file."),
) -> None:
    """List all methods that are installed, their sources and their settings in a task file.

    Example: `hushfleet methods --json`
    """
    from rich.table import Column, Table

    from hushfleet.aggregator.report.console import Console
    from hushfleet.methods import GROUPS, METHODS, all_names, allow_file, find_method
    from hushfleet.methods.method import TrainingConfig

    others = [*sorted(all_names() - set(METHODS)), *([allow_file(file)] if file else [])]
    groups = {**GROUPS, "others": others}
    group_of = {name: group for group, names in groups.items() for name in names}
    found = {name: find_method(name) for name in group_of}
    settings = {name: {f.name: f.default for f in dataclasses.fields(method.config)} for name, method in found.items()}
    if as_json:
        rows = [
            {
                "name": name,
                "group": group_of[name],
                "source": method.source,
                "summary": method.summary,
                "settings": settings[name],
            }
            for name, method in found.items()
        ]
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    common = [f.name for f in dataclasses.fields(TrainingConfig)]
    settings_column = Column("its own settings\nwith their defaults", no_wrap=True)  # a task needs their whole names
    told = (Column(name, overflow="fold") for name in ("source", "what it does"))
    table = Table(Column("method", no_wrap=True), *told, settings_column, show_lines=True)
    for name, method in found.items():
        if name == groups[group_of[name]][0]:
            table.add_row(f"[bold]{group_of[name]}[/]")
        own = [f"{key} = {value!r}" for key, value in settings[name].items() if key not in common]
        table.add_row(method.name if ":" in name else name, method.source, method.summary, "\n".join(own))
    Console().print(table)
    Console().print(f"All of them take {', '.join(common)}; docs/methods.md says what leaves the device.")
