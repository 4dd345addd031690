"""Attacks use the benches of the other folders' tests: a device, and certificates."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hushfleet.aggregator.payloads.prepare import PreparedTask
from support import whole
from support.device import config, linear, make_bench, package
from support.enroller import Desk

__all__ = ["config", "linear", "make_bench", "package"]

TESTS = Path(__file__).resolve().parents[1]


def _bench(name: str, file: str) -> ModuleType:
    """The module of a test file of another folder, which pytest's importlib mode does not let us import."""
    spec = importlib.util.spec_from_file_location(name, TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_certificates = _bench("certificates_bench", "hushfleet/wire/link/test_tls.py")


@pytest.fixture(scope="session")
def prepared_runs() -> tuple[PreparedTask, PreparedTask]:
    """One task, and the same task begun another time."""
    return whole.prepared_digits("one"), whole.prepared_digits("two")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Who answers the requests for certificates."""
    made = Desk(tmp_path, certificate_days=90)
    yield made
    made.close()
