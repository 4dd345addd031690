"""What a program brings is simulated: tables, test parts, devices with one sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hushfleet as hf
from hushfleet.aggregator.config.task import parse_task
from hushfleet.data.arrays import Data
from hushfleet.data.samples import DataSet
from hushfleet.errors import BadInput
from hushfleet.simulator.fleet import Fleet, make_fleet

X, Y = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 4


def plain(**data: Any) -> dict[str, Any]:
    return {
        "name": "own", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "round": {"rounds": 1},
        "data": {"name": "arrays", "path": "d.npz", "devices": 4, "min_samples": 1, **data},
    }  # fmt: skip


def fleet_of(data: DataSet, **section: Any) -> Fleet:
    return make_fleet(parse_task(plain(**section)), data)


def test_a_test_part_means_that_devices_train_on_all_that_they_have() -> None:
    given, held_out = Data(X, Y, X[:20], Y[:20]).dataset("d"), Data(X, Y).dataset("d")
    assert [len(device.train) for device in fleet_of(given).devices] == [10] * 4
    assert [len(device.train) for device in fleet_of(given, test_fraction=0.2).devices] == [8] * 4
    assert [len(device.train) + len(device.local_test) for device in fleet_of(held_out).devices] == [8] * 4
    numbers = hf.Data(X, Y / 3, X[:20], Y[:20] / 3)
    task = parse_task(
        plain(target_mean=[0.0], target_std=[1.0]) | {"model": {"name": "linear", "loss": "squared", "tolerance": 0.1}}
    )
    for device in make_fleet(task, numbers.dataset("d", targets=task.targets)).devices:
        assert (len(device.train), len(device.local_test)) == (10, 20), "without classes the whole test part"


def test_a_device_may_have_one_sample() -> None:
    owners = np.array([0] * 1 + [1] * 13 + [2] * 13 + [3] * 13)
    data = Data(X, Y, X, Y, train_device=owners).dataset("d")
    assert data.device_names == ("0", "1", "2", "3")
    for fraction in ({}, {"test_fraction": 0.2}):
        first = fleet_of(data, partition="given", **fraction).devices[0]
        assert len(first.train) == 1
        assert (first.local_test.samples.labels == Y[0]).all()
        assert first.local_test.source is data.test
    with pytest.raises(
        BadInput, match=r"1 devices have fewer, as number 0 \(from 0\) with 1; set data.min_samples = 1"
    ):
        fleet_of(data, partition="given", min_samples=10)


def test_classes_that_the_test_part_lacks_are_not_tested() -> None:
    data = Data(X, Y, X[Y < 2], Y[Y < 2]).dataset("d")
    assert all(set(device.local_test.samples.labels) == {0, 1} for device in fleet_of(data).devices)
    with pytest.raises(BadInput, match=r"no image of 2, 3, so data.test_fraction = 0 cannot .* device-0; set"):
        fleet_of(data, test_fraction=0)
    alone = Data(X, Y, X[Y < 2], Y[Y < 2], train_device=Y).dataset("d")
    with pytest.raises(BadInput, match=r"no image of 2, so .* of device-2"):
        fleet_of(alone, partition="given")


TABLE = pd.DataFrame(X, columns=list("abcd")).assign(kind=np.array(list("wxyz"))[Y], who=np.arange(40) // 10)


@pytest.mark.slow
def test_a_table_is_simulated_from_a_program_and_from_a_file(tmp_path: Path) -> None:
    """By the columns that the task names, to the bit."""
    named = {"data.label_column": "kind", "data.device_column": "who", "data.columns": ["d", "a"]}
    options: dict[str, Any] = {"quiet": True, "workers": 1, "local_only": False}
    of_program = hf.simulate(plain(), named, data=TABLE, out=tmp_path / "a", **options)
    TABLE.to_csv(tmp_path / "t.csv", index=False)
    pytest.importorskip("pyarrow")
    TABLE.to_parquet(tmp_path / "t.parquet")
    paths = {"csv": tmp_path / "t.csv", "parquet": tmp_path / "t.parquet"}
    for kind, path in paths.items():
        where = {"data.name": "table", "data.path": str(path), "data.partition": "given"}
        of_file = hf.simulate(plain(), named | where, out=tmp_path / kind, **options)
        for name, value in of_program.model("global").items():
            assert (of_file.model("global")[name] == value).all()


@pytest.mark.slow
def test_one_sample_of_a_device_goes_through_a_whole_run(tmp_path: Path) -> None:
    names = np.array([f"clinic {at}" for at in range(12)])[::-1]
    data = {"train": (X[:12], Y[:12], names), "test": (X, Y)}
    run = hf.simulate(plain(devices=12), data=data, out=tmp_path / "r", quiet=True, local_only=False, workers=1)
    assert run.devices["name"].tolist() == sorted(names)
    assert run.devices["accuracy_own_local"].notna().all()
