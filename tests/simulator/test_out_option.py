"""A place that cannot be written is refused at once, by every command that writes to a place of one's choice."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from hushfleet.aggregator.commands.main import build_app, load_command
from hushfleet.errors import BadInput
from hushfleet.user_files import checked_file, checked_folder

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is not here")
TASK = str(Path(__file__).parents[2] / "tasks" / "digits-fedglp-adp.toml")
WORDS = {
    "aggregator": [TASK, "--broker", "mqtt://localhost", "--enrolment", "open", "--out"],
    "audit": [TASK, "--out"],
    "compare": ["no-run", "--out"],
    "demo": ["--out"],
    "features make": [TASK, "--out"],
    "flash": ["--fleet", "no-fleet", "--image", "no.img", "--out"],
    "fleet roster export": ["no-fleet", "--out"],
    "fleet roster sign": [TASK, "--key", TASK, "--out"],
    "forecast": [TASK, "--plot"],
    "invert": [TASK, "--out"],
    "log": ["no-run", "--out"],
    "plan": ["--devices", "60", "--images", "40", "--classes", "10", "--epsilon", "4", "--out"],
    "report": ["no-run", "--out"],
    "reproduce": ["--report", "--out"],
    "simulate": [TASK, "--out"],
}
PLACES = ("--out", "--plot")


def writing(command: object, name: str) -> list[str]:
    """The commands with an option that names a place to write to."""
    found = [name] if any(set(PLACES) & set(each.opts) for each in getattr(command, "params", ())) else []
    return found + [n for sub, each in getattr(command, "commands", {}).items() for n in writing(each, f"{name} {sub}")]


def test_every_command_with_such_an_option_is_here() -> None:
    names = sorted(typer.main.get_command(build_app()).commands)
    assert sorted(WORDS) == sorted(each for name in names for each in writing(load_command(name), name))


@pytest.mark.parametrize("name", WORDS)
def test_a_place_where_nothing_can_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, *subs = name.split()
    with pytest.raises(BadInput, match=r"--(out|plot) /proc/x(\.png)?: nothing can be written to /proc"):
        load_command(command).main([*subs, *WORDS[name], "/proc/x.png"], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_other_places_of_the_kind(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing" / "there")
    for place, why in (
        (file, "is a file"), (file / "below", "is a file"), (link, "link to nothing"), (link / "x", "link to nothing"),
        (tmp_path / ("a" * 300), "name too long"), (Path("/proc/self"), "nothing can be written"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=why):
            checked_folder(place)
    for place, why in (
        (tmp_path, "is a folder"),
        (Path("-"), "nothing is printed"),
        (file / "x", "is a file"),
        (tmp_path / ("a" * 300), "name too long"),
    ):
        with pytest.raises(BadInput, match=why):
            checked_file(place)
    assert checked_folder(tmp_path / "new" / "run") == tmp_path / "new" / "run"
    assert checked_file(file) == file
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
