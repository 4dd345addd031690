"""Every network is exported once a session, and every program compiled once, into empty caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from models import get_model
from models.export import Graphs, export_graphs


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """The `XDG_CACHE_HOME` of compiled programs."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def graphs_of(tmp_path_factory) -> Callable[[str], Graphs]:
    folder = tmp_path_factory.mktemp("graphs")

    @cache
    def graphs(name: str) -> Graphs:
        return export_graphs(get_model(name), cache_dir=folder)

    return graphs
