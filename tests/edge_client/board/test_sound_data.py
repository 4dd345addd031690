"""A board's clips: windows, held-out clips, one segment with the unit `record`, and what a clip can do to others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.data.form import SampleForm
from hushfleet.data.samples import FeatureSamples, LabelledSamples, Samples
from hushfleet.durations import Period
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.data_place import describe_data
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.retention import DAY_S, Retention
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, ModelSpec
from support.sound import LENGTH, RATE, numbers_of, save_clip

GRAPH = BlobRef(bytes(32), 1)
MODEL = ModelSpec(
    "own", ParamLayout(("w",), ((2,),)), (1, 1, LENGTH), ("cat", "dog"), (0.0,), (1.0,), (), GRAPH, GRAPH,
    form=SampleForm(sample_rate=RATE, segment_s=LENGTH / RATE),
)  # fmt: skip


class Loudest:
    """Features in place of those of a graph: the largest value of a segment."""

    def of(self, samples: Samples, *, skipped: list[str] | None = None) -> FeatureSamples:
        assert not isinstance(samples.images, np.ndarray), "the sound of all clips is not in memory"
        features = np.array([[[[segment.max()]]] for segment in samples.images], np.float32)
        return FeatureSamples.of(features.reshape(-1, 1, 1, 1), samples, None, skipped)


def data_of(path: Path, model: ModelSpec = MODEL, **options: Any) -> LocalData:
    return LocalData(OwnDataSection("sound", str(path)), model, **{"may_be_empty": True, **options})


def seen(samples: LabelledSamples) -> list[int]:
    assert isinstance(samples, Samples)
    return numbers_of(samples)


def test_a_clip_is_in_the_window_in_which_it_came(tmp_path: Path) -> None:
    first, second = Period(10 * 86400, 20 * 86400), Period(20 * 86400, 30 * 86400)
    clips, now = tmp_path / "clips", [first.start]
    save_clip(clips / "cat" / "1.wav", 1)
    with DeviceStore(tmp_path / "store.sqlite", device="board", durable=False) as store:
        data = data_of(clips, by_content=True, arrivals=lambda keys: store.arrivals.of(keys, now=now[0]))
        assert seen(data.samples(first)) == [1, 1, 1]
        now[0] = second.start
        save_clip(clips / "dog" / "2.wav", 2, frames=LENGTH)
        assert seen(data.samples(second)) == [2]
        os.rename(clips / "cat" / "1.wav", clips / "dog" / "other.wav")
        assert (seen(data.samples(second)), seen(data.samples(first))) == ([2], [1, 1, 1])


@pytest.mark.parametrize("by_record", [False, True])
def test_no_clip_decides_how_others_are_read(tmp_path: Path, by_record: bool) -> None:
    options = {"by_content": True, "one_a_clip": by_record, "held_out": 0.3}
    for number in range(1, 21):
        save_clip(tmp_path / ("cat", "dog")[number % 2] / f"{number}.wav", number)

    def parts() -> tuple[dict[int, bytes], dict[int, bytes]]:
        data = data_of(tmp_path, **options)
        found: list[Any] = [data.samples(), data.held_out()]
        return tuple({n: part.images[np.array(seen(part)) == n].tobytes() for n in set(seen(part))} for part in found)  # type: ignore[return-value]

    before = parts()
    assert before[0].keys() | before[1].keys() == set(range(1, 21))
    assert not before[0].keys() & before[1].keys()
    assert {len(each) for each in before[0].values()} == {2 * LENGTH * (1 if by_record else 3)}
    save_clip(tmp_path / "cat" / "loud.wav", 3000, frames=10_000)
    (tmp_path / "cat" / "cut.wav").write_bytes((tmp_path / "cat" / "loud.wav").read_bytes()[:-3])
    (tmp_path / "dog" / "empty.wav").write_bytes(b"")
    after = parts()
    for old, new in zip(before, after, strict=True):
        assert {number: new[number] for number in old} == old


def test_features_are_computed_without_the_sound_of_all_clips(tmp_path: Path) -> None:
    for number in range(1, 9):
        save_clip(tmp_path / "cat" / f"{number}.wav", number)
    data = data_of(tmp_path, features=Loudest(), held_out=0.3)
    both = [data.samples().x.ravel(), data.held_out().x.ravel()]
    assert sorted(np.concatenate(both).round().tolist()) == sorted(10 * n + k for n in range(1, 9) for k in range(3))


@pytest.mark.parametrize(("kind", "model"), [("folder", MODEL), ("sound", replace(MODEL, form=SampleForm()))])
def test_sound_and_images_are_not_confused(tmp_path: Path, kind: str, model: ModelSpec) -> None:
    save_clip(tmp_path / "cat" / "1.wav", 1)
    data = LocalData(OwnDataSection(kind, str(tmp_path)), model)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=f"data.kind = '{kind}': the task needs kind"):
        data.samples()


def test_a_folder_without_sound_is_described(tmp_path: Path) -> None:
    section = OwnDataSection("sound", str(tmp_path))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"")
    assert "there is no sound in class folders, as in" in str(describe_data(section))
    save_clip(tmp_path / "cat" / "1.wav", 1)
    assert describe_data(section) is None


def test_old_clips_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    clips, now = tmp_path / "clips", [0.0]
    kept = [save_clip(clips / "cat" / "1.wav", 1).with_suffix(end) for end in (".txt", ".png")]
    for file in kept:
        file.write_bytes(b"mine")
    now[0] = os.stat(clips / "cat" / "1.wav").st_ctime
    retention = Retention(OwnDataSection("sound", str(clips), keep="2d"), tmp_path, now=lambda: now[0])
    for day in range(6):
        retention.advance(day * DAY_S)
        now[0] += DAY_S
    assert sorted((clips / "cat").iterdir()) == sorted(kept)


def test_a_package_says_sound_of_its_own_shape() -> None:
    with pytest.raises(ValueError, match=r"input_shape = \(1, 1, 100\): must be \(1, 1, 200\), as segments of sound"):
        replace(MODEL, form=SampleForm(sample_rate=RATE, segment_s=0.2))
