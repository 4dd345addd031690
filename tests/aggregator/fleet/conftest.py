"""Fixtures of the fleet's tests."""

from __future__ import annotations

import pytest

from hushfleet.aggregator.fleet import service


@pytest.fixture(autouse=True)
def parts_act_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that took long on a busy machine would act later than the tests' own clocks say."""
    monkeypatch.setattr(service, "REST", 0.0)
