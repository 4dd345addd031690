"""What all tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the benches of several folders' tests

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


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes fleets of `fleet_bench`: an aggregator's rounds, and devices that sign what it is given."""
    from fleet_bench import Fleet  # with PyTorch, which many tests do without

    fleets: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        fleets.append(Fleet(tmp_path / f"run-{len(fleets)}", **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.store.close()
