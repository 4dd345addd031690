"""`hushfleet methods` on a terminal of 80 columns: names that a task needs stand there whole."""

from __future__ import annotations

import os

import pytest

from hushfleet import methods
from hushfleet.aggregator.commands.main import load_command
from support.documents import EXAMPLES


def test_settings_and_a_files_method_can_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(os.environ, methods.ALLOWED_FILE, "")
    words = ["--method", f"{EXAMPLES / 'fedbabu.py'}:fedbabu"]
    load_command("methods").main(words, standalone_mode=False)
    printed = capsys.readouterr().out
    for told in (
        "│ fedbabu ",
        *(f"│ {group} " for group in (*methods.GROUPS, "others")),
        "distillation_weight = 0.5",
        "server_learning_rate = 1.0",
    ):
        assert told in printed
    assert "…" not in printed
