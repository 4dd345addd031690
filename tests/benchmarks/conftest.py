"""`benchmarks` is not installed with the project, and other packages bring a folder of that name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def figures_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a benchmark's `main`; its figures from the JSON, which must name no path of this machine.

    They are then shown and drawn again from that file, which must print the same.
    """

    def run(main: Callable[[list[str]], object], words: str) -> Any:
        path, chart = tmp_path / "figures.json", tmp_path / "figures.png"
        main([*words.split(), "--json", str(path), "--plot", str(chart)])
        first, text = chart.read_bytes() if chart.exists() else b"", path.read_text()
        shown = capsys.readouterr().out
        assert str(tmp_path) not in text
        main(["--show", str(path), "--plot", str(chart)])
        assert shown.endswith(capsys.readouterr().out)
        assert not first or first.startswith(b"\x89PNG")
        return json.loads(text)

    return run
