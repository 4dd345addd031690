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
    """Runs a benchmark's `main`; its figures from the JSON, which must name no path of this machine."""

    def run(main: Callable[[list[str]], object], words: str) -> Any:
        path = tmp_path / "figures.json"
        main([*words.split(), "--json", str(path)])
        assert capsys.readouterr().out
        assert str(tmp_path) not in path.read_text()
        return json.loads(path.read_text())

    return run
