"""What all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the benches of several folders' tests


@pytest.fixture(scope="session", autouse=True)
def _own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keys that a test makes stay out of the user's configuration folder."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder
