"""Folders of clips: what is read of them, and that no split divides a clip."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.rerun import samples_digest
from hushfleet.data.folder import FileForm, load_folder_set, load_unlabelled, scan_folder
from hushfleet.data.form import SampleForm
from hushfleet.data.held_out import is_held_out
from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.data.sound import SoundForm
from hushfleet.errors import BadInput
from hushfleet.schema import from_plain, to_plain
from hushfleet.simulator.fleet import make_fleet
from support.sound import LENGTH, RATE, numbers_of, save_clip


def form(**changes: Any) -> FileForm:
    sound = SoundForm(RATE, LENGTH, **changes)
    return {"input_shape": (1, 1, LENGTH), "class_names": ("a", "b"), "mean": (0.0,), "std": (1.0,), "sound": sound}


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    for number in range(1, 31):
        save_clip(tmp_path / "clips" / "ab"[number % 2] / f"{number:02}.wav", number, frames=30 * number)
    return tmp_path / "clips"


def test_segments_keep_their_label_and_their_clip(clips: Path) -> None:
    samples, skipped = scan_folder(clips, **form())
    assert skipped == ()
    assert samples.images.dtype == np.int16
    assert samples.x.max() == np.float32((30 * 10 + 8) / 32768)
    numbers = np.array(numbers_of(samples))
    assert (samples.labels == numbers % 2).all()
    first, number = samples.records
    assert (numbers == numbers[first][number]).all()
    assert sorted(numbers[first]) == list(range(1, 31))
    one, _ = scan_folder(clips, **form(one_a_clip=True))
    assert sorted(numbers_of(one)) == list(range(1, 31))
    longest = one.images[numbers_of(one).index(30), 0, 0]
    assert longest.tolist() == [308] * LENGTH, "the loudest"


def test_what_cannot_be_read_is_left_out_and_named(clips: Path) -> None:
    (clips / "a" / "text.wav").write_text("no sound")
    (clips / "a" / "note.txt").write_text("no sound")
    (clips / "a" / "cut.wav").write_bytes((clips / "a" / "30.wav").read_bytes()[:-1])
    (clips / "b" / "image.png").write_bytes(b"")
    whole, _ = scan_folder(clips, **form())
    samples, skipped = scan_folder(clips, lenient=True, **form(in_files=True))
    assert numbers_of(samples) == numbers_of(whole), "the others are read as before"
    reasons = dict(each.split(": ", 1) for each in skipped)
    assert reasons.keys() == {"a/text.wav", "a/note.txt", "a/cut.wav", "b/image.png"}
    assert "it was cut off" in reasons["a/cut.wav"]
    assert reasons["a/note.txt"] == "its name has no ending of sound, such as .wav or .flac"
    assert len(load_unlabelled(clips, most=5, **form()).records[0]) == 5


def test_sound_in_files_is_the_sound_in_memory(clips: Path) -> None:
    (memory, _), (files, _) = (scan_folder(clips, **form(in_files=each)) for each in (False, True))
    np.testing.assert_array_equal(np.asarray(files.images), memory.images)
    chosen = np.random.default_rng(0).permutation(len(memory))[:20]
    for part in (slice(3, 9), chosen):
        np.testing.assert_array_equal(files.take(part).x, memory.take(part).x)
    (clips / "a" / "30.wav").unlink()
    save_clip(clips / "b" / "29.wav", 29, frames=LENGTH)
    for was, now in zip(memory.images, np.asarray(files.images), strict=True):
        is_gone = was.flat[0] // 10 == 30 or was.flat[0] in range(291, 300)
        np.testing.assert_array_equal(now, 0 if is_gone else was)


def sides(fleet: Any) -> list[set[int]]:
    return [set(numbers_of(part.samples)) for device in fleet.devices for part in (device.train, device.local_test)]


def task(path: Path, **data: Any) -> Any:
    data = {"name": "sound", "path": str(path), "sample_rate": RATE, "segment_s": 0.1, "min_samples": 1, **data}
    return parse_task({"name": "try", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "data": data})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("partition", ["iid", "dirichlet-class", "dirichlet-device", "pathological"])
def test_no_clip_is_on_two_sides(clips: Path, partition: str, seed: int) -> None:
    dataset = load_folder_set(clips, **form())
    train, test = set(numbers_of(dataset.train)), set(numbers_of(dataset.test))
    assert (len(train), len(test), train & test) == (24, 6, set())
    asked = task(clips, devices=3, partition=partition, alpha=1.0, classes_per_device=2, limit=20)
    found = sides(make_fleet(asked, dataset))
    assert sum(map(len, found)) == len(set().union(*found)) == 20
    assert all(found)


def test_folders_of_devices_say_whose_a_clip_is(tmp_path: Path) -> None:
    for number in range(1, 19):
        save_clip(tmp_path / f"board-{number % 3}" / "ab"[number % 2] / f"{number}.wav", number)
    asked = form() | {"class_names": ()}
    whole = load_folder_set(tmp_path, by_device=True, **asked)
    files = load_folder_set(tmp_path, by_device=True, **(form(in_files=True) | {"class_names": ()}))
    assert [files.train.images.nbytes, samples_digest(files.train)] == [0, samples_digest(whole.train)]
    assert (whole.class_names, whole.device_names) == (("a", "b"), ("board-0", "board-1", "board-2"))
    assert whole.owners is not None
    assert (whole.owners == np.array(numbers_of(whole.train)) % 3).all()
    assert not set(numbers_of(whole.train)) & set(numbers_of(whole.test))
    found = sides(make_fleet(task(tmp_path, devices=3, partition="given", test_fraction=0.25), whole))
    assert sum(map(len, found)) == len(set().union(*found))
    assert [{number % 3 for number in side} for side in found] == [{0}, {0}, {1}, {1}, {2}, {2}]
    parts = tmp_path.with_name("parts")
    (parts / "test").mkdir(parents=True)
    tmp_path.rename(parts / "train")
    save_clip(parts / "test" / "board-1" / "a" / "40.wav", 40)
    save_clip(parts / "test" / "elsewhere" / "b" / "41.wav", 41)
    both = load_folder_set(parts, by_device=True, **asked)
    assert (both.has_test, len(both.train.records[0])) == (True, 18)
    assert both.test_owners is not None
    assert dict(zip(numbers_of(both.test), both.test_owners.tolist(), strict=True)) == {40: 1, 41: -1}


def slow_place(segments: np.ndarray) -> float:
    digest = hashlib.blake2b(segments.tobytes(), digest_size=8, person=b"hushfleet held").digest()
    return int.from_bytes(digest, "big") / 2**64


def test_a_clip_is_held_out_by_its_own_content(clips: Path) -> None:
    samples, _ = scan_folder(clips, **form())
    first, number = samples.records
    expected = [slow_place(samples.images[number == clip]) < 0.4 for clip in range(len(first))]
    assert 0 < sum(expected) < 30
    for are_all in (False, True):
        assert is_held_out(samples, 0.4, are_all=are_all).tolist() == np.array(expected)[number].tolist()
    for chosen in ([3], [3, 4]):
        few = samples.take(samples.of_records(np.array(chosen)))
        sides = is_held_out(few, 1e-9)
        assert len({bool(side) for side in sides}) == len(chosen), "of two clips one, of one none"


@pytest.mark.parametrize("input_shape", [None, (1, 1, 1), (1, 1, 2)])
def test_features_keep_the_clips(input_shape: tuple[int, int, int] | None) -> None:
    samples = Samples(np.ones((4, 1, 1, 3), np.int16), np.arange(4), (0.0,), (1.0,), clips=np.array([0, 0, 1, 2]))
    features, skipped = np.ones((4, 2, 1, 1), np.float32), list[str]()
    features[1] = np.nan
    made = FeatureSamples.of(features, samples, input_shape, skipped)
    assert (made.labels.tolist(), len(skipped)) == ([0, 2, 3], 1)
    assert made.x.shape == (3, *(input_shape or (2, 1, 1)))
    assert made.clips is not None
    assert made.clips.tolist() == [0, 1, 2]
    assert made.take(np.array([2])).clips is not None


def test_empty_folders_and_foreign_classes_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="lacks the folder test/"):
        load_folder_set(tmp_path, **form())
    (tmp_path / "a").mkdir()
    with pytest.raises(BadInput, match="no readable clip in a class folder"):
        load_folder_set(tmp_path, **form())
    save_clip(tmp_path / "c" / "1.wav", 1)
    with pytest.raises(BadInput, match="'c', which is not a class of this task"):
        load_folder_set(tmp_path, **form())


def test_forms_of_tables_have_the_bytes_that_they_had() -> None:
    assert to_plain(SampleForm(columns=("x",), decimal=",")) == {"columns": ("x",), "decimal": ","}
    sound = SampleForm(sample_rate=16000, segment_s=1.0)
    assert to_plain(sound) == {"sample_rate": 16000, "segment_s": 1.0}
    assert from_plain(SampleForm, to_plain(sound)) == sound


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"segment_s": 3600.0, "sample_rate": 16000}, "segment_s = 3600.0: must be 1 to 1048576 frames at 16000 Hz"),
        ({"segment_s": 1e-9}, "segment_s = 1e-09: must be 1 to"),
        ({"hop_s": 1e-9}, "hop_s = 1e-09: must be a frame or more"),
        ({"input_shape": [1, 1, 100]}, "input_shape must be left out"),
    ],
)
def test_a_form_that_no_segment_has_is_refused(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        task(tmp_path, **data)


def test_a_task_says_its_form_by_default(tmp_path: Path) -> None:
    plain = {"name": "sound", "path": str(tmp_path)}
    asked = parse_task({"name": "try", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "data": plain})
    assert asked.data.form == SampleForm(sample_rate=16000, segment_s=1.0)
    assert asked.data.shape == (1, 1, 16000)
    assert parse_task(asked.to_plain()) == asked
