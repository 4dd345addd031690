"""Every command on every page is one that the command lines take; cheap ones are run, and print what the page says.

Also those in the commands' own help, in the examples and in the Containerfile. Of an expensive command a test holds the
task file, its changed keys, and the cells that it selects.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import typer.main

import hushfleet
from hushfleet import methods
from hushfleet.aggregator.commands.main import build_app, load_command
from hushfleet.aggregator.config.task import load_task
from hushfleet.edge_client.__main__ import _parser
from hushfleet.errors import BadInput
from hushfleet.simulator.studies.reproduce.cells import cells_of
from hushfleet.simulator.studies.reproduce.recipe import find_recipe
from support.documents import BLOCKS, DOCUMENTS, EXAMPLES, ROOT

CONSOLE = ("console", "sh", "bash", "shell")
PROGRAMS = r"(?:hushfleet|hushfleet-edge|pip install|make) "
CHEAP = re.compile(r"hushfleet (privacy .*--delta|boards|methods|reproduce --list)")
CLAIM = re.compile(r"(?:epsilon_\w+|replace-one|noise multiplier) \d+(?:\.\d+)?|-?[\d.]+ dB")
# typer carries its own copy of click, or uses the installed one, by version
USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
MAKE_TARGETS = set(" ".join(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)).split())


class Command(NamedTuple):
    """A command of a page.

    :param folder: where a reader types it.
    :param said: the page's comment on it.
    """

    where: str
    line: str
    folder: Path = ROOT
    said: str = ""


def in_blocks() -> Iterator[Command]:
    for block in BLOCKS:
        if block.language not in CONSOLE:
            continue
        page = ROOT / block.document
        folder = page.parent if page.is_relative_to(EXAMPLES) else ROOT
        lines = block.text.splitlines()
        for offset, line in enumerate(lines):
            if line.strip() and not line.lstrip().startswith("#"):
                below = next((n for n, other in enumerate(lines[offset + 1 :]) if not is_comment(other)), None)
                said = [line.partition(" #")[2], *lines[offset + 1 :][:below]]
                yield Command(f"{block.where}+{offset + 1}", line.strip(), folder, "\n".join(said))


def is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def in_sentences() -> Iterator[Command]:
    """Placeholders in them are written in capitals."""
    for path in DOCUMENTS:
        for index, code in enumerate(re.findall(rf"(?<!`)`({PROGRAMS}[^`]+)`(?!`)", without_fences(path))):
            line = code.replace("[NAME]", "").replace("NAME", "generic-x86")
            yield Command(f"{path.relative_to(ROOT)}:{index}", line)


def without_fences(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def in_help(command: Any, name: str) -> Iterator[Command]:
    text = re.sub(r"\\\n +", "", command.help)
    shown = re.findall(r"`(hushfleet[ -][^`]+)`|^ *(hushfleet .+)$", text, re.MULTILINE)
    for index, found in enumerate(shown):
        yield Command(f"{name} --help:{index}", "".join(found).strip())
    for sub, each in getattr(command, "commands", {}).items():
        yield from in_help(each, f"{name} {sub}")


def in_other_files() -> Iterator[Command]:
    for path in (ROOT / "Containerfile", *EXAMPLES.glob("*.py"), ROOT / "edge_client" / "__main__.py"):
        shown = re.findall(r"^(?:#.* )? *(hushfleet(?:-edge)? \w.+?)(?: {3}.*)?$", path.read_text(), re.M)
        yield from (Command(f"{path.name}:{index}", line) for index, line in enumerate(shown))
    for path in (ROOT / "tasks").glob("*.toml"):
        text = path.read_text("utf-8").replace("#   ...", f"#   hushfleet simulate tasks/{path.name}")
        shown = re.findall(r"^# +(hushfleet .+?)(?: {3}.*)?$", re.sub(r"\\\n# +", "", text), re.MULTILINE)
        yield from (Command(f"{path.name}:{index}", line) for index, line in enumerate(shown))


@cache
def application() -> Any:
    group = typer.main.get_command(build_app())
    assert hasattr(group, "commands")
    return group


COMMANDS = [
    *in_blocks(),
    *in_sentences(),
    *in_other_files(),
    *(each for name in application().commands for each in in_help(load_command(name), f"hushfleet {name}")),
]


def words_of(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    if words[:1] == ["sudo"]:
        words = words[1:]
        if words[:1] == ["-u"]:
            words = words[2:]
    return words


def check_hushfleet(arguments: list[str], folder: Path) -> None:
    """The sub-command exists and takes exactly these options, values and arguments."""
    if not arguments or arguments[0].startswith("-"):
        assert set(arguments) <= {"--help", "--version"}
        return
    name, *rest = arguments
    assert name in application().commands, f"there is no `hushfleet {name}`"
    given = parsed(load_command(name), name, rest)
    if name == "reproduce" and given["paper"]:
        recipe = find_recipe(given["paper"], table=given["table"], figure=given["figure"])
        only = {"datasets": given["dataset"], "methods": given["method"], "columns": given["column"]}
        assert cells_of(recipe, seeds=1, quick=given["quick"], **{key: value or () for key, value in only.items()})
    task = folder / next(iter(rest), "")
    if folder != ROOT or re.match(r"(tasks|examples|simulator)/.*\.toml$", next(iter(rest), "")):
        changes = [value for key, value in pairwise(rest) if key == "--set"]
        files = [folder / value.split(":")[0] for key, value in pairwise(rest) if key in ("--method", "--model")]
        assert all(file.is_file() for file in (task, *files))
        if not files:
            load_task(task, tuple(changes))


def parsed(command: Any, name: str, arguments: list[str]) -> dict[str, Any]:
    """The values of its parameters. A command that is only named, as in a sentence, needs no arguments."""
    if hasattr(command, "commands"):
        if not arguments:
            return {}
        sub, *rest = arguments
        assert sub in command.commands, f"there is no `{name} {sub}`"
        return parsed(command.commands[sub], f"{name} {sub}", rest)
    asks = [each for each in arguments if each != "--help"]
    values: dict[str, Any] = command.make_context(name, asks, resilient_parsing=asks != arguments or not asks).params
    return values


def check_edge_client(arguments: list[str]) -> None:
    arguments = list(arguments)
    try:
        _parser(arguments).parse_args(arguments)
    except SystemExit as error:
        raise AssertionError(f"`hushfleet-edge {shlex.join(arguments)}` does not parse") from error


def check_pip(what: str) -> None:
    """No index has us; an extra of a clone or a wheel exists."""
    assert not what.startswith("hushfleet[")
    if wheel := re.search(r"hushfleet-([0-9.]+)-", what):
        assert wheel[1] == hushfleet.__version__
    for extra in re.findall(r"\[([a-z,]+)\]$", what):
        assert (
            set(extra.split(","))
            <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
        )


def check(command: str, folder: Path = ROOT) -> None:
    """Raises an error if the command does not parse; the files that it names are made, empty, where we are."""
    words = words_of(command)
    for word in words[1:]:
        if (
            re.fullmatch(r"[^.]\S*\.(pem|key|toml|csv|hfr|pub|json|txt|signed|unsigned)", word)
            and not Path(word).is_absolute()
        ):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    program = Path(words[0]).name
    if program == "hushfleet":
        check_hushfleet(words[1:], folder)
    elif program == "hushfleet-edge":
        check_edge_client(words[1:])
    elif program == "pip":
        check_pip(words[-1])
    elif program == "make":
        assert words[1] in MAKE_TARGETS
    elif program.startswith("python"):
        name = words[2].replace(".", "/") if words[1] == "-m" else words[1].removesuffix(".py")
        known = name in ("venv", "pip", "pytest")
        assert known or any((folder / f"{name}{end}").exists() for end in (".py", "/__main__.py"))
    elif program in ("sh", "cp"):
        source = next(word for word in words[1:] if not word.startswith("-"))
        assert not source.startswith("examples/") or (ROOT / source).is_file()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", [pytest.param(each, id=each.where) for each in COMMANDS])
def test_commands_are_real(command: Command) -> None:
    check(command.line, command.folder)
    _, *after = re.split(r" or(?:, after .*)?: ", command.said)
    for other in after:
        check(other, command.folder)


@pytest.mark.parametrize("command", [pytest.param(each, id=each.where) for each in COMMANDS if CHEAP.match(each.line)])
def test_cheap_commands_print_what_the_page_says(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(os.environ, methods.ALLOWED_FILE, "")
    name, *rest = words_of(command.line)[1:]
    assert not load_command(name).main(rest, standalone_mode=False)
    printed = capsys.readouterr().out
    assert printed
    for claim in CLAIM.findall(command.said):
        assert re.search(rf"{re.escape(claim)}(?!\.?\d)", printed), f"the page says {claim!r}:\n{printed}"


@pytest.mark.parametrize(
    "wrong",
    [
        "hushfleet simulat tasks/a.toml",
        "hushfleet simulate tasks/a.toml --enginee fast",
        "hushfleet simulate tasks/a.toml --engine warp",
        "hushfleet aggregator task.toml --broker",
        "hushfleet reproduce dp-fedsim --table II --method dp-fedsim",
        "hushfleet simulate tasks/digits-hush.toml --set privacy.epsilonn=8",
        "hushfleet fleet init greenhouse --broker-name broker.example --taks task.toml",
        "hushfleet fleet blok greenhouse",
        "pip install 'hushfleet[ray]'",
        "pip install '.[rya]'",
        "hushfleet-edge status",
        "sudo -u hushfleet /opt/bin/hushfleet-edge status device.toml --jsn",
        "make dmeo",
        "python -m benchmarks.devise",
        "python examples/fedbabi.py",
    ],
)
def test_a_wrong_command_would_be_found(wrong: str) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR, BadInput)):
        check(wrong)


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 200
    assert sum(bool(CHEAP.match(each.line)) for each in COMMANDS) > 10
    assert {path.name for path in DOCUMENTS} >= {"README.md", "architecture.md", "field.md", "methods.md"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_stand_in_fences(path: Path) -> None:
    """Where they are looked for."""
    assert re.findall(rf"^(?: {{4,}}|\t)(?:\$ |sudo )?{PROGRAMS}.*$", without_fences(path), re.MULTILINE) == []
