"""Tests `examples/words` and `examples/birds` on a few boards, with voices that are made here."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hushfleet as hf
from hushfleet.data.sound import read_clip

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.needs("espeak-ng")


@pytest.fixture
def make_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES / "words")
    import make_data

    yield make_data
    del sys.modules["make_data"]


@pytest.mark.parametrize("example", ["words", pytest.param("birds", marks=pytest.mark.slow)])
def test_a_few_boards_learn_words_and_strangers_are_the_common_test(
    tmp_path: Path, make_data: ModuleType, example: str
) -> None:
    pytest.importorskip("livekit.wakeword")
    place = tmp_path / "words"
    make_data.make(place, boards=4, clips=12, strangers=2, public=20)
    changes = {"data.path": str(place), "data.devices": "4", "privacy.epsilon": "50"}
    if example == "birds":  # BirdNET's file is not here
        changes |= {"model.features": "sound:speech", "data.sample_rate": "16000", "data.segment_s": "1.0"}
    else:
        changes["model.public"] = str(place / "public")
    task = hf.task(EXAMPLES / example / "task.toml", changes)
    run = hf.simulate(task, out=tmp_path / "run", workers=1, quiet=True)
    details = run.result.details
    assert details.common_test_images == 2 * make_data.TESTED
    assert sorted(details.class_names) == sorted(make_data.WORDS)
    assert run.devices["accuracy_own_local"].mean() > 0.25, "chance is a twelfth"


def test_the_same_seed_makes_the_same_clips(tmp_path: Path, make_data: ModuleType) -> None:
    def digests(name: str, seed: int) -> dict[str, str]:
        make_data.make(tmp_path / name, boards=1, clips=2, strangers=0, public=2, seed=seed)
        files = sorted((tmp_path / name).glob("**/*.wav"))
        assert {read_clip(file, make_data.RATE).shape for file in files} == {(make_data.RATE,)}
        return {str(f.relative_to(tmp_path / name)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}

    first = digests("first", 3)
    assert first == digests("again", 3)
    assert len(first) == 2 + make_data.TESTED + 2
    assert not set(first.values()) & set(digests("other", 4).values())
