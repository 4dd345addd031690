"""The one command, `hushfleet`. Each part of the kit adds its own sub-commands by entry points.

An entry point of the group `hushfleet.commands` is a command's function, or a typer application with several commands.
So the ground floor imports nothing above it, and a missing package is reported by name, not as an import error.

A command is loaded when it is called, or when its options are completed. The list of commands, and the completion of
their names, take their texts from the first lines of their modules. A command's module declares its options, and
imports the modules that do the work only when it is called, because PyTorch alone takes seconds.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import logging
import os
import signal
import sys
import threading
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FrameType
from typing import Any

from hushfleet.aggregator.commands.old_names import renamed
from hushfleet.errors import GraphRefused, HushfleetError
from hushfleet.needs import too_old
from hushfleet.output import escape_output, log_to_stderr, one_line, take_all_characters
from hushfleet.version import __version__

if sys.version_info < (3, 11):  # noqa: UP036 - the package is for boards, too
    sys.exit("error: the command `hushfleet` needs Python 3.11 or newer; boards, and `hushfleet-edge`, need 3.10")
try:
    import typer.core
    from typer.main import get_group

    from hushfleet.aggregator.commands.help import Grouped, in_plain_text
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: the command `hushfleet` needs the package {missing.name!r}, which a device does not have. On a device "
        "use `hushfleet-edge DEVICE.toml`; elsewhere: pip install 'hushfleet[server]'"
    )

typer.core.HAS_RICH = False  # typer below 0.21 escapes brackets for rich even where rich formats nothing
INTERRUPTED = 130
AGAIN_S = 0.02
OBJECTS_TO_COLLECT = 50_000
"""New objects between two collections: with Python's 700, a sixth of a short command's time is collecting what it has
just imported."""
GROUPS = {
    "Try it (first: hushfleet demo)": ("demo", "plan", "simulate"),
    "A fleet (first: hushfleet fleet --help)": ("fleet", "flash", "push", "release", "report", "boards", "forecast"),
    "Research (first: hushfleet reproduce --list)": (
        "reproduce", "compare", "methods", "features", "privacy", "audit", "invert", "log",
    ),
}  # fmt: skip
"""The commands by what they are for, in the order of the list. A command that is not here is listed last."""
HIDDEN = ("aggregator", "broker")
"""Commands that units and scripts call; the list leaves them out."""


class _LoadedWhenCalled(Grouped):
    """Lists stand-ins of all commands, and loads the one that is called or completed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args if ctx.resilient_parsing else renamed(args))
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed if name is None else load_command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.replace(
                "Value error, ", ""
            )  # the prefix of pydantic, with which typer reads values
            raise


def load_command(name: str) -> Any:
    """Returns the click command of this name, with its options."""
    entry, *_ = entry_points(group="hushfleet.commands", name=name)
    app, loaded = typer.Typer(rich_markup_mode=None), entry.load()
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=name, cls=Grouped)
    else:
        app.command(name)(loaded)
    return in_plain_text(get_group(app).commands[name])


def build_app() -> typer.Typer:
    """Returns the application."""
    app = typer.Typer(
        name="hushfleet",
        cls=_LoadedWhenCalled,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Personalized federated learning with local differential privacy, over MQTT.\n\n"
        "Every command explains itself with `--help`.",
    )

    @app.callback(invoke_without_command=True)
    def main_options(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    ) -> None:
        if version:
            print(f"hushfleet {__version__}")
            raise typer.Exit()

    places = {name: group for group, names in GROUPS.items() for name in names}
    entries = {each.name: each for each in sorted(entry_points(group="hushfleet.commands"), key=lambda e: e.name)}
    for name in sorted(entries, key=[*places, *sorted(entries.keys() - places)].index):
        line, group = _first_line(entries[name]), places.get(name, "Others")
        app.command(name, help=line, short_help=line, rich_help_panel=group, hidden=name in HIDDEN)(_not_loaded)
    return app


def _first_line(entry: EntryPoint) -> str:
    """Reads the text after "`hushfleet NAME`: " in the docstring of a command's module, without importing it."""
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.origin is None:
        return ""
    with Path(spec.origin).open(encoding="utf-8") as file:
        line = file.readline().strip()
    said = line.strip('"').removeprefix(f"`hushfleet {entry.name}`: ") if line.startswith('"""') else ""
    return said[:1].upper() + said[1:]


def _not_loaded() -> None:
    """Takes the place of a command that was not called."""


def main() -> None:
    """Runs the `hushfleet` script; every expected error is printed as one clear paragraph."""
    take_all_characters()
    escape_output()
    log_to_stderr("%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    came = _noted_interrupts()
    gc.set_threshold(OBJECTS_TO_COLLECT)
    try:
        build_app()()
    except HushfleetError as error:
        old = too_old() if isinstance(error, GraphRefused) else ""  # any error of PyTorch's exporter
        sys.exit(_print_error(f"{error}. {old}" if old else str(error), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(_code_of(came))
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED and came:
            sys.exit(_code_of(came))
        raise
    except Exception as error:
        if came and isinstance(error, (ImportError, SystemError)):
            sys.exit(_code_of(came))
        if not (words := _in_words(error)):
            raise
        sys.exit(_print_error(words, 1))


def _in_words(error: Exception) -> str:
    """Returns what happened, and what to do; empty for a fault of our own."""
    if isinstance(error, OSError):  # a full disk, a folder that may not be written to
        named = error.filename2 or error.filename  # of two files the one that was written to
        if named is not None or error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{named}: {error.strerror}" if named else f"{error.strerror}; free some space"
    if isinstance(error, MemoryError):
        return f"this machine has too little memory for that: {error or 'none is left'}"
    if old := too_old():
        return f"{type(error).__name__}: {error}. {old}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in ("", "hushfleet"):
        return f"this needs the package {error.name!r}; install it with: pip install 'hushfleet[server]'"
    return ""


def _code_of(came: list[int]) -> int:
    """Returns the exit code that a shell gives a program ended by a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + came[0] if came else INTERRUPTED


def _noted_interrupts() -> list[int]:
    """Returns a list that grows by the signal's number with each Ctrl-C and SIGTERM; both end a command the same way.

    Compiled code turns a KeyboardInterrupt into an ImportError when it is imported, and into a SystemError when it
    builds a schema. Any other error after such a signal comes from the work that follows it.
    """
    came: list[int] = []

    def unraisable(ignored: sys.UnraisableHookArgs) -> None:
        """Sends a signal again if it came during a callback that cannot raise, such as one of a weak reference."""
        if not came or not issubclass(ignored.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(ignored)
            return
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), came[-1]))
        again.daemon = True
        again.start()

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT is ignored in the background of a shell
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
    sys.unraisablehook = unraisable
    return came


def _print_error(text: str, code: int) -> int:
    from rich.markup import escape

    from hushfleet.aggregator.report.console import Console  # most calls do not need it

    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(one_line(text))}")
    return code
