"""Who holds what in a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.data.samples import DataSet, Samples
from hushfleet.data.sets import load
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.fleet import Fleet, Subset, make_fleet, save_samples
from hushfleet.simulator.run_folder import begin, go_on
from support.images import save_folder

DIGITS = load("digits")


def numbered() -> DataSet:
    """900 training and 300 test images, each unlike all others, of 3 classes in unequal numbers."""

    def part(count: int, first: int) -> Samples:
        numbers = np.arange(first, first + count)
        pixels = np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8)
        return Samples(pixels.reshape(count, 1, 1, 2), numbers % 6 // 2 * (numbers % 2), (0.0,), (1.0,))

    return DataSet("digits", part(900, 0), part(300, 1000), ("a", "b", "c"))


def numbers_of(part: Subset | Samples) -> list[int]:
    samples = part.samples if isinstance(part, Subset) else part
    high, low = samples.images.reshape(len(samples), 2).astype(int).T
    return (256 * high + low).tolist()


def task(*, seed: int = 0, **data: Any) -> Task:
    return parse_task(
        {
            "name": "fleet",
            "seed": seed,
            "model": {"name": "digits-cnn"},
            "method": {"name": "fedavg"},
            "data": {"name": "digits", "devices": 6, "partition": "dirichlet-class", "alpha": 0.5, **data},
        }
    )


def holdings(fleet: Fleet) -> list[tuple[list[int], list[int]]]:
    return [(numbers_of(device.train), numbers_of(device.local_test)) for device in fleet.devices]


@pytest.mark.parametrize("partition", ["iid", "dirichlet-class", "dirichlet-device", "pathological"])
def test_every_training_image_has_one_holder(partition: str) -> None:
    fleet = make_fleet(task(partition=partition, classes_per_device=2), numbered())
    held = [number for train, local_test in holdings(fleet) for number in train + local_test]
    assert sorted(held) == list(range(900))
    for device, row in zip(fleet.devices, fleet.label_counts, strict=True):
        labels = np.concatenate([device.train.samples.labels, device.local_test.samples.labels])
        assert np.bincount(labels, minlength=3).tolist() == row.tolist()
        assert len(device.local_test) == pytest.approx(0.2 * len(labels), abs=1)
    assert numbers_of(fleet.common_test) == list(range(1000, 1300))


@pytest.mark.parametrize("strangers", [0, 40])
def test_strangers_are_the_common_test_and_devices_have_their_own(strangers: int) -> None:
    data, tested = numbered(), np.arange(300) % 6
    tested[300 - strangers :] = -1
    given = replace(data, owners=np.arange(900) % 6, test_owners=tested, has_test=True)
    changed = parse_task({**task().to_plain(), "data": {"name": "arrays", "path": "x.npz", "partition": "given"}})
    fleet = make_fleet(replace(changed, data=replace(changed.data, devices=6)), given)
    assert numbers_of(fleet.common_test) == list(range(1300 - strangers if strangers else 1000, 1300))
    for index, (train, own) in enumerate(holdings(fleet)):
        assert (train, own) == (list(range(index, 900, 6)), list(range(1000 + index, 1300 - strangers, 6)))


def test_labels_travel_with_their_images() -> None:
    data = numbered()
    for device in make_fleet(task(), data).devices:
        assert device.train.samples.labels.tolist() == [int(data.train.labels[n]) for n in numbers_of(device.train)]
        held_out = [int(data.train.labels[n]) for n in numbers_of(device.local_test)]
        assert device.local_test.samples.labels.tolist() == held_out


def test_the_seed_makes_the_fleet() -> None:
    for settings in ({}, {"test_fraction": 0}, {"limit": 500}):
        first, again = (holdings(make_fleet(task(**settings), numbered())) for _ in range(2))
        assert first == again
        assert holdings(make_fleet(task(seed=1, **settings), numbered())) != first


def test_methods_are_compared_on_the_same_fleet() -> None:
    plain = task().to_plain()
    other = parse_task({**plain, "name": "other", "method": {"name": "dp-fedavg"}, "round": {"rounds": 3}})
    assert holdings(make_fleet(other, numbered())) == holdings(make_fleet(task(), numbered()))


def test_devices_are_numbered_named_and_get_boards_in_turn() -> None:
    boards = ("raspberry-pi-5-8gb", "jetson-orin-nano")
    fleet = make_fleet(task(devices=11, min_samples=2), numbered(), boards=boards)
    assert [device.index for device in fleet.devices] == list(range(11))
    assert [device.name for device in fleet.devices][:2] == ["device-00", "device-01"]
    assert fleet.devices[10].name == "device-10"
    assert [device.board for device in fleet.devices[:3]] == [boards[0], boards[1], boards[0]]
    single = make_fleet(task(devices=1), numbered()).devices
    assert [(device.name, device.board) for device in single] == [("device-0", "generic-x86")]


def test_the_limit_takes_that_many_at_random() -> None:
    fleet = make_fleet(task(limit=500), numbered())
    held = sorted(number for train, local_test in holdings(fleet) for number in train + local_test)
    assert len(held) == len(set(held)) == 500
    assert held != list(range(500))
    assert fleet.label_counts.sum() == 500
    everything = make_fleet(task(limit=5000), numbered())
    assert holdings(everything) == holdings(make_fleet(task(), numbered()))


def test_without_a_share_of_its_own_a_device_is_tested_on_common_images_like_its_own() -> None:
    data = numbered()
    fleet = make_fleet(task(test_fraction=0), data)
    assert sorted(number for train, _ in holdings(fleet) for number in train) == list(range(900))
    available = np.bincount(data.test.labels, minlength=3)
    for device in fleet.devices:
        numbers = numbers_of(device.local_test)
        assert len(numbers) == len(set(numbers))
        assert set(numbers) <= set(range(1000, 1300))
        shares = np.bincount(device.train.samples.labels, minlength=3) / len(device.train)
        counts = np.bincount(device.local_test.samples.labels, minlength=3)
        # In these shares no larger test part exists: one class is used up.
        largest = min(available[k] / shares[k] for k in range(3) if shares[k])
        np.testing.assert_allclose(counts, largest * shares, atol=0.5 + 1e-9)
        assert (counts <= available).all()


def test_own_data_are_judged_by_what_they_are_drawn_by_and_not_by_a_few_labels() -> None:
    data = numbered()
    shares = np.bincount(data.train.labels, minlength=3) / 900
    settings = {"test_fraction": 0, "devices": 60, "min_samples": 2}
    for device in make_fleet(task(partition="iid", limit=300, **settings), data).devices:
        counts = np.bincount(device.local_test.samples.labels, minlength=3)
        np.testing.assert_allclose(counts / counts.sum(), shares, atol=0.05)
    fleet = make_fleet(task(partition="dirichlet-device", alpha=5.0, **settings), data)
    tested = np.array([np.bincount(each.local_test.samples.labels, minlength=3) for each in fleet.devices])
    held = fleet.label_counts / fleet.label_counts.sum(1, keepdims=True)
    apart = np.abs(tested / tested.sum(1, keepdims=True) - held).max(1)
    assert apart.max() > 0.1, "fifteen labels are not their mix"
    assert np.median(apart) < 0.2
    owners = np.arange(900) // 15
    of_given = make_fleet(task(name="arrays", partition="given", **settings), replace(data, owners=owners))
    for device, row in zip(of_given.devices, of_given.label_counts, strict=True):
        counts = np.bincount(device.local_test.samples.labels, minlength=3)
        np.testing.assert_allclose(counts / counts.sum(), row / 15, atol=0.02)


@pytest.mark.parametrize("test_fraction", [0.2, 0.0])
def test_a_devices_test_file_gives_its_test_part_back(tmp_path: Path, test_fraction: float) -> None:
    plain = {"name": "parts", "model": {"name": "digits-cnn"}, "method": {"name": "fedavg"}}
    data = {"name": "digits", "devices": 3, "test_fraction": test_fraction}
    simulation = begin(parse_task(plain | {"data": data}), tmp_path / "run", data_dir=None)
    files = LoadedRun(tmp_path / "run", "onnx")
    for device in simulation.fleet.devices:
        found, expected = files.local_test(device.name), device.local_test.samples
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.labels, expected.labels)
        if device.index == 0:
            simulation.write_samples()
        size = (tmp_path / "run" / "devices" / device.name / "local_test.npz").stat().st_size
        assert (size < expected.images.nbytes) == (test_fraction == 0), "indices, not images"


def test_a_devices_file_gives_its_samples_back(tmp_path: Path) -> None:
    samples = make_fleet(task(), DIGITS).devices[0].train.samples
    save_samples(samples, tmp_path / "train.npz")
    with np.load(tmp_path / "train.npz", allow_pickle=False) as arrays:
        assert (arrays["images"].dtype, arrays["labels"].dtype) == (np.uint8, np.int64)
        np.testing.assert_array_equal(arrays["images"], samples.images)
        np.testing.assert_array_equal(arrays["labels"], samples.labels)


FOLDER_TASK = """
name = "folder"
model.name = "digits-cnn"
method.name = "fedavg"
[data]
name = "folder"
path = "images"
class_names = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
input_shape = [1, 8, 8]
devices = 3
"""


def test_a_folder_of_images_can_be_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(DIGITS.train.take(slice(0, 150)), tmp_path / "images" / "train", class_names=DIGITS.class_names)
    save_folder(DIGITS.test.take(slice(0, 40)), tmp_path / "images" / "test", class_names=DIGITS.class_names)
    (tmp_path / "task.toml").write_text(FOLDER_TASK)
    monkeypatch.chdir(tmp_path)
    simulation = begin(load_task(Path("task.toml")), tmp_path / "run", data_dir=None)
    fleet = simulation.fleet
    assert [len(device.train) for device in fleet.devices] == [50, 50, 50], "the data have a test part"
    assert all(device.local_test.source is fleet.common_test for device in fleet.devices)
    assert len(fleet.common_test) == 40
    held = np.concatenate([device.train.samples.images for device in fleet.devices])
    assert sorted(image.tobytes() for image in held) == sorted(image.tobytes() for image in DIGITS.train.images[:150])
    # Resumed from elsewhere, it still finds its images.
    monkeypatch.chdir(tmp_path / "images")
    again = go_on(tmp_path / "run", data_dir=None)
    for device, before in zip(again.fleet.devices, fleet.devices, strict=True):
        np.testing.assert_array_equal(device.train.samples.images, before.train.samples.images)


def test_a_folder_without_training_images_cannot_be_simulated(tmp_path: Path) -> None:
    save_folder(DIGITS.test.take(slice(0, 40)), tmp_path / "images" / "test", class_names=DIGITS.class_names)
    (tmp_path / "task.toml").write_text(FOLDER_TASK)
    with pytest.raises(BadInput, match=r"data.name = 'folder' needs data.path with a training part"):
        begin(load_task(tmp_path / "task.toml"), tmp_path / "run", data_dir=None)
    (tmp_path / "task.toml").write_text(FOLDER_TASK.replace('path = "images"\n', ""))
    with pytest.raises(BadInput, match=r"needs data.path with a training part"):
        begin(load_task(tmp_path / "task.toml"), tmp_path / "run", data_dir=None)
