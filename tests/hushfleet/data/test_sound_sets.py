"""The standard sets of sound by tiny folders of their layout; the sets themselves have not been tried here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.data.samples import DataSet
from hushfleet.data.sound import write_clip
from hushfleet.errors import BadInput
from hushfleet.simulator.fleet import make_fleet

SHORT = {"sample_rate": 1000, "segment_s": 0.1}


def clip(path: Path, value: int, *, frames: int = 100) -> None:
    write_clip(path, np.full(frames, value, np.int16), 1000)


def speech_commands(root: Path) -> Path:
    for value, word in enumerate(("no", "yes"), 1):
        for speaker in ("0a", "1b", "2c", "3d"):
            for number in range(2):
                clip(root / word / f"{speaker}_nohash_{number}.wav", value)
    clip(root / "_background_noise_" / "white_noise.wav", 9, frames=500)
    (root / "validation_list.txt").write_text("no/2c_nohash_0.wav\nno/2c_nohash_1.wav\nyes/2c_nohash_0.wav\n")
    (root / "testing_list.txt").write_text(
        "".join(f"{word}/3d_nohash_{n}.wav\n" for word in ("no", "yes") for n in (0, 1))
    )
    return root


def table(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def esc_50(root: Path) -> Path:
    rows = [(f"{fold}-{kind}00-A-{kind}.wav", fold, kind) for fold in range(1, 6) for kind in (0, 1)]
    for name, _, kind in rows:
        clip(root / "audio" / name, 1 + kind, frames=300)
    lines = [f"{name},{fold},{kind},{('rain', 'dog')[kind]},True,1,A" for name, fold, kind in rows]
    table(root / "meta" / "esc50.csv", ["filename,fold,target,category,esc10,src_file,take", *lines])
    return root


def urbansound8k(root: Path) -> Path:
    rows = [(f"10{fold}-{kind}-0-0.wav", fold, kind) for fold in range(1, 11) for kind in (0, 1)]
    for name, fold, kind in rows:
        clip(root / "audio" / f"fold{fold}" / name, 1 + kind)
    lines = [f"{name},1,0.0,4.0,1,{fold},{kind},{('siren', 'dog_bark')[kind]}" for name, fold, kind in rows]
    table(
        root / "metadata" / "UrbanSound8K.csv", ["slice_file_name,fsID,start,end,salience,fold,classID,class", *lines]
    )
    return root


def loaded(name: str, data_dir: Path, **data: object) -> DataSet:
    task = parse_task(
        {
            "name": "try",
            "model": {"name": "linear"},
            "method": {"name": "fedavg"},
            "data": {"name": name, **SHORT, "devices": 2, "min_samples": 1, **data},
        }
    )
    dataset = prepare(task, data_dir=data_dir).dataset
    assert dataset is not None
    make_fleet(task, dataset)
    return dataset


@pytest.mark.parametrize("place", ["speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02", "."])
def test_speech_commands_has_speakers_as_devices(tmp_path: Path, place: str) -> None:
    speech_commands(tmp_path / place)
    found = loaded("speech-commands", tmp_path, partition="given", devices=3, min_samples=1)
    assert found.class_names == ("no", "yes")
    assert found.device_names == ("0a", "1b", "2c")
    assert found.owners is not None
    assert found.owners.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2]  # one clip of 2c is in neither list
    assert found.train.labels.tolist() == [0] * 4 + [1] * 5
    assert found.test.labels.tolist() == [0, 0, 1, 1]
    assert (found.train.images[:, 0, 0, 0] == found.train.labels + 1).all()


@pytest.mark.parametrize(
    ("name", "make", "place", "classes", "counts"),
    [
        ("esc-50", esc_50, "ESC-50-master", ("dog", "rain"), (24, 6)),
        ("urbansound8k", urbansound8k, "UrbanSound8K", ("dog_bark", "siren"), (18, 2)),
    ],
)
def test_sets_with_folds_are_tested_on_the_last(
    tmp_path: Path, name: str, make, place: str, classes: tuple[str, str], counts: tuple[int, int]
) -> None:
    make(tmp_path / place)
    found = loaded(name, tmp_path)
    assert found.class_names == classes
    assert (len(found.train), len(found.test)) == counts  # the clips of ESC-50 have three segments here
    for part in (found.train, found.test):
        assert (part.images[:, 0, 0, 0] == 2 - part.labels).all()
    assert found.owners is None
    with pytest.raises(BadInput, match="'given' goes with"):
        loaded(name, tmp_path, partition="given")


def test_a_set_that_is_missing_or_broken_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"looked for ESC-50-master/meta/esc50.csv; download the set"):
        loaded("esc-50", tmp_path)
    root = esc_50(tmp_path / "ESC-50-master")
    (root / "audio" / "1-000-A-0.wav").write_bytes(b"RIFF")
    with pytest.raises(BadInput, match=r"1-000-A-0\.wav: .*ends within its head"):
        loaded("esc-50", tmp_path)
    (root / "meta" / "esc50.csv").write_text("filename\n1-000-A-0.wav\n")
    with pytest.raises(BadInput, match=r"esc50\.csv lacks the column 'category'"):
        loaded("esc-50", tmp_path)
