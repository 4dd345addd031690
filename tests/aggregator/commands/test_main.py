"""The command `hushfleet`: what it imports, and what it lists."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main

from hushfleet.aggregator.commands.main import build_app

IMPORTED = """
import sys
from hushfleet.aggregator.commands.main import main
sys.argv = ["hushfleet", *sys.argv[1:]]
try:
    main()
finally:
    print("imported", *(name for name in ("numpy", "torch", "onnxruntime") if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "simulate"),
        (["--version"], 0, "hushfleet"),
        (["nonsense"], 2, "No such command"),
        (["client", "--help"], 0, "hushfleet-edge"),
    ],
)
def test_what_is_not_called_is_not_imported(words: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "torch" not in done.stdout.splitlines()[-1]
    if words != ["client", "--help"]:
        assert done.stdout.splitlines()[-1].strip() == "imported"


def test_the_list_has_every_command_with_its_text() -> None:
    loaded, listed = (typer.main.get_command(build_app(only)) for only in (None, ""))
    assert sorted(listed.commands) == sorted(loaded.commands)
    assert all(len(command.help) > 20 for command in listed.commands.values())
