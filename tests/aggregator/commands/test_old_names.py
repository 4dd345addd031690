"""Names of commands of the version before: each says its present name, and does what it did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app, load_command
from hushfleet.aggregator.commands.old_names import GONE, OLD_NAMES, renamed
from hushfleet.errors import BadInput
from hushfleet.wire.format.identity import Identity
from support.desk import make_folder

ROOT = Path(__file__).parents[3]
FOLDERS = ("aggregator", "benchmarks", "docs", "edge_client", "examples", "firmware_profiles", "hushfleet", "models",
           "simulator", "tasks")  # fmt: skip
TEXTS = {".conf", ".html", ".js", ".md", ".py", ".sh", ".service", ".toml", ".txt", ".yml"}
KEY = Identity.from_bytes(bytes([7]) * 32).public_key.hex()


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_is_told_and_leads_to_a_command_that_is_there(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    new = renamed([*old.split(), "greenhouse", "x"])
    said = capsys.readouterr().err
    assert said == f"`hushfleet {old}` is now `hushfleet {OLD_NAMES[old]}`; the old name goes after 0.4\n"
    assert new[-2:] == ["greenhouse", "x"]
    command: Any = load_command(new[0])
    for word in new[1:-2]:
        if not word.startswith("-"):
            command = command.commands[word]
    assert not command.hidden


@pytest.mark.parametrize("old", OLD_NAMES)
def test_no_list_shows_it(old: str) -> None:
    first, *rest = old.split()
    application: Any = typer.main.get_command(build_app())
    if first in application.commands:
        command: Any = load_command(first)
        for word in rest:
            command = getattr(command, "commands", {}).get(word)
        assert command is None


@pytest.mark.parametrize("gone", GONE)
def test_a_command_that_went_says_what_to_use(gone: str) -> None:
    with pytest.raises(BadInput, match=f"`hushfleet {gone}` went after 0.3; "):
        renamed([*gone.split(), "greenhouse"])


@pytest.mark.parametrize("words", [["fleet", "status", "list"], ["release", "add", "x"], ["report", "devices"], []])
def test_present_names_are_left_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert renamed(words) == words
    assert capsys.readouterr().err == ""


def test_no_text_of_the_project_names_it() -> None:
    files = [ROOT / "README.md", *(file for name in FOLDERS for file in (ROOT / name).rglob("*"))]
    texts = [file for file in files if file.suffix in TEXTS and file.name != "old_names.py"]
    assert len(texts) > 700
    names = "|".join(old for old in OLD_NAMES if " " in old)
    old = re.compile(rf"hushfleet devices|(?:hushfleet |`)(?:{names})(?![\w-])")
    found = {file.relative_to(ROOT): each for file in texts if (each := old.findall(file.read_text("utf-8")))}
    assert not found


def called(*words: object) -> str:
    outcome = CliRunner().invoke(build_app(), [*map(str, words)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_they_still_work(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", make_folder(tmp_path / "greenhouse")
    called("devices", "add", run, "one", "--key", KEY)
    assert KEY in called("devices", "list", run)
    called("devices", "block", run, "one")
    called("devices", "forget", run, "one")
    assert "no device is known" in called("devices", "list", run)
    for words in (("list",), ("show",), ("page",), ("release",), ("release-key", "show"), ("rollout",)):
        ids = ("greenhouse-01",) if words == ("show",) else ()
        assert "is now `hushfleet" in called("fleet", *words, folder.path, *ids)
