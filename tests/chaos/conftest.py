"""The C library that cuts a process's power."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chaos.machine import build_library
from hushfleet.models.native.build import COMPILERS


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """What is preloaded for power cuts; None on a machine without any compiler. One that refuses is a fault of ours."""
    return build_library(tmp_path_factory.mktemp("library")) if any(map(shutil.which, COMPILERS)) else None
