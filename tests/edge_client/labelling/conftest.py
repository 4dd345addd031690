"""A board with class folders and an inbox, whose client has taken part in one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from support.edge import Bench, Package, device_file
from support.pictures import CLASSES, a_picture


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Class folders with one image each of two classes."""
    for seed, name in enumerate(("leaf", "mould")):
        a_picture(tmp_path / "images" / name / f"{name}.png", seed=100 + seed)
    return tmp_path / "images"


@pytest.fixture
def board(config: DeviceConfig, photographs: Path, tmp_path: Path) -> DeviceConfig:
    """Its client has not run yet."""
    (tmp_path / "inbox").mkdir()
    data = OwnDataSection("folder", str(photographs), inbox=str(tmp_path / "inbox"))
    return replace(config, data=data, simulation=None)


@pytest.fixture
def device_toml(board: DeviceConfig, tmp_path: Path) -> Path:
    """The board's file, for commands."""
    return device_file(tmp_path / "device.toml", kind="folder", path="images", more='held_out = "test"')


@pytest.fixture
def trained(make_bench: Callable[..., Bench], board: DeviceConfig, package: Package) -> Bench:
    model = replace(package.spec.model, class_names=CLASSES, input_shape=(1, 8, 8))
    bench = make_bench(package.with_spec(model=model), board)
    bench.train(1)
    return bench
