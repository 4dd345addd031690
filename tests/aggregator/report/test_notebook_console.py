"""A run in a notebook: one display that is redrawn, not a line for all that happens."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from hushfleet.aggregator.report import notebook
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.report.notebook import NotebookConsole, run_console
from hushfleet.aggregator.report.progress import show_progress
from hushfleet.progress import doing


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(notebook, "EVERY_S", 0.01)
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def events(rounds: int) -> list[dict[str, Any]]:
    begun = {"event": "run", "task": "digits", "method": "hush", "engine": "fast", "rounds": rounds, "delta": 1e-5}
    each = {"event": "round_close", "participants": 2, "uplink_bytes": 10, "downlink_bytes": 10}
    return [begun, *({**each, "round": number} for number in range(1, rounds + 1))]


def test_all_of_a_run_is_one_display() -> None:
    with capture_output() as seen:
        console = NotebookConsole()
        console.print("gradients by onnx", style="bright_black", highlight=False)
        with show_progress(console), doing("reading digits"):
            console.print("a word meanwhile")
        with FleetDisplay(console=console) as display:
            for event in events(12):
                display.apply(event)
        with show_progress(console), doing("training alone"):
            pass
        console.print("a note")
    first, *others = [vars(each) for each in seen.outputs]
    assert (seen.stdout, first["update"]) == ("", False)
    assert others
    assert all(each["update"] and each["transient"] == first["transient"] for each in others)
    last = others[-1]["data"]
    for words in ("gradients by onnx", "12/12", "a note"):
        assert last["text/plain"].count(words) == 1
        assert words in last["text/html"]
    assert "reading digits" not in last["text/plain"]  # has ended
    assert any("reading digits" in each["data"]["text/plain"] for each in [first, *others])


def test_elsewhere_a_run_has_an_ordinary_console(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(run_console(quiet=False)) is Console
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert type(run_console(quiet=False)) is NotebookConsole
    assert run_console(quiet=True).quiet
