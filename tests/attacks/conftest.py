"""Attacks use the benches of the other folders' tests: the aggregator's field, and certificates."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hushfleet.aggregator.publish.prepare import PreparedTask

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


make_field = _bench("field_bench", "aggregator/test_coordinator.py").make_field
_certificates = _bench("certificates_bench", "hushfleet/test_wire_tls.py")
_bench("edge_bench", "edge_client/edge_bench.py")
_whole = _bench("whole_bench", "attacks/whole_bench.py")


@pytest.fixture(scope="session")
def prepared_runs() -> tuple[PreparedTask, PreparedTask]:
    """One task, and the same task begun another time."""
    return _whole.prepared_digits("one"), _whole.prepared_digits("two")
