"""Networks come from the cache of exports; every program is compiled once a session, into an empty cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from hushfleet.models import get_model, native
from hushfleet.models.export import Graphs, export_graphs
from hushfleet.models.native.build import COMPILERS
from support import tools


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """The `XDG_CACHE_HOME` of compiled programs, the same for all processes that run the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def why_not_compiled() -> Callable[[], str | None]:
    """Why nothing can be compiled here; fails where there is a compiler, since its refusal is a fault of ours."""

    def why() -> str | None:
        reason = native.unavailable()
        if reason is not None:
            assert not any(map(shutil.which, COMPILERS)), f"a compiler that refuses the kernels is a fault: {reason}"
        return reason

    return why


@pytest.fixture(scope="session")
def need_compiler(why_not_compiled) -> Callable[[], None]:
    """Skips on a machine without any compiler."""

    def need() -> None:
        if why_not_compiled() is not None:
            tools.need("compiler")

    return need


@pytest.fixture(scope="session")
def graphs_of() -> Callable[[str], Graphs]:
    return cache(lambda name: export_graphs(get_model(name)))
