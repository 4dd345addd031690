"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says how busy the machine is, and no test is about that.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keys that a test makes stay out of the user's configuration folder."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder
