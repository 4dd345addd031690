"""The one command, `hushfleet`. Each part of the kit brings its own sub-commands by entry points.

An entry point of the group `hushfleet.commands` is a function that takes the typer application and adds to it. So the
ground floor imports nothing above it, and a part whose packages are not installed is named, not an import error.

Only the sub-command that is called is imported, since PyTorch alone takes seconds. The list of commands takes its texts
from the first lines of their modules.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import hushfleet
from hushfleet.errors import HushfleetError

if sys.version_info < (3, 11):  # noqa: UP036 - the package is for boards, too
    sys.exit("error: the command `hushfleet` needs Python 3.11 or newer; boards, and `hushfleet-edge`, need 3.10")
try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: the command `hushfleet` needs the package {missing.name!r}, which a device does not have. On a device "
        "use `hushfleet-edge DEVICE.toml`; elsewhere: pip install 'hushfleet[server]'"
    )

INTERRUPTED = 130


def build_app(only: str | None = None) -> typer.Typer:
    """The application.

    :param only: a sub-command to load, where there is one of this name; the others are only listed. None: load all.
    """
    app = typer.Typer(
        name="hushfleet",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        help="Personalized federated learning with local differential privacy, over MQTT.\n\n"
        "Start with `hushfleet demo`. Every command explains itself with `--help`.",
    )

    @app.callback(invoke_without_command=True)
    def main_options(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    ) -> None:
        if version:
            print(f"hushfleet {hushfleet.__version__}")
            raise typer.Exit()

    for entry in sorted(entry_points(group="hushfleet.commands"), key=lambda e: e.name):
        if only is not None and entry.name != only:
            app.command(entry.name, help=_first_line(entry))(_not_loaded)
            continue
        try:
            register = entry.load()
        except ModuleNotFoundError as error:
            _explain_missing(app, entry.name, error)
        else:
            register(app)
    return app


def _first_line(entry: EntryPoint) -> str:
    """What the docstring of a command's module says after "`hushfleet NAME`: ", without importing the module."""
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    said = text.partition("\n")[0].removeprefix(f"`hushfleet {entry.name}`: ")
    return said[:1].upper() + said[1:]


def _not_loaded() -> None:
    """Stands for a command that was not called."""


def _explain_missing(app: typer.Typer, name: str, error: ModuleNotFoundError) -> None:
    @app.command(name=name, help=f"Not available here: the package {error.name!r} is not installed.")
    def unavailable() -> None:
        raise HushfleetError(
            f"`hushfleet {name}` needs the package {error.name!r}; install it with: pip install 'hushfleet[server]'"
        )


def main() -> None:
    """The entry point of the `hushfleet` script; every error on purpose is one clear paragraph."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    called = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    completing = "_HUSHFLEET_COMPLETE" in os.environ  # then the words are elsewhere
    try:
        build_app(None if completing else called)()
    except HushfleetError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escape(str(error))}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
