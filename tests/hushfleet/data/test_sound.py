"""Clips of sound against a slow, obvious reader: each value by itself, as a fraction."""

from __future__ import annotations

import struct
import sys
import tempfile
import tracemalloc
import wave
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data import sound
from hushfleet.data.form import SampleForm
from hushfleet.data.sound import SoundForm, loudest, read_clip, segments_of, write_clip
from hushfleet.errors import BadInput

RATE = 16000


def wav(path: Path, frames: list[list[int]], *, width: int, rate: int = RATE) -> Path:
    """Writes values of `width` bytes, a list a frame."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(frames[0]) if frames else 1)
        file.setsampwidth(width)
        file.setframerate(rate)
        offset = 128 if width == 1 else 0
        file.writeframes(
            b"".join((v + offset).to_bytes(width, "little", signed=width > 1) for frame in frames for v in frame)
        )
    return path


def slow_pcm(frames: list[list[int]], width: int) -> list[int]:
    means = [Fraction(sum(frame), len(frame)) / 2 ** (8 * width - 1) for frame in frames]
    return [min(max(round(mean * 32768), -32768), 32767) for mean in means]  # half to even


@st.composite
def written(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    width, channels = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 6))
    most = 2 ** (8 * width - 1)
    value = st.integers(-most, most - 1) | st.sampled_from([-most, most - 1, 0])
    return width, draw(st.lists(st.lists(value, min_size=channels, max_size=channels), min_size=1, max_size=30))


@settings(max_examples=60)
@given(what=written(), block=st.integers(1, 40))
def test_a_wav_file_is_read_as_the_slow_way_reads_it(what: tuple[int, list[list[int]]], block: int) -> None:
    width, frames = what
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sound, "_BLOCK", block)
        path = wav(Path(folder) / "a.wav", frames, width=width)
        assert read_clip(path, RATE).tolist() == slow_pcm(frames, width)


@settings(max_examples=30)
@given(frames=st.lists(st.lists(st.integers(-32768, 32767), min_size=2, max_size=2), min_size=1, max_size=30))
@pytest.mark.parametrize(("ending", "kind"), [("flac", "PCM_16"), ("aiff", "PCM_24"), ("wav", "FLOAT")])
def test_other_formats_are_read_alike(frames: list[list[int]], ending: str, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{ending}"
        soundfile.write(path, np.array(frames) / 32768, RATE, subtype=kind)
        assert read_clip(path, RATE).tolist() == slow_pcm(frames, 2)


def slow_segments(pcm: list[int], length: int, hop: int) -> list[list[int]]:
    found, start, heard = list[list[int]](), 0, 0
    while start + length <= len(pcm):
        found.append(pcm[start : start + length])
        heard, start = start + length, start + hop
    rest = len(pcm) - max(start, heard)
    if not found or rest * 2 >= length:
        found.append((pcm[start:] + [0] * length)[:length])
    return found


@settings(max_examples=150)
@given(count=st.integers(1, 40), length=st.integers(1, 20), hop=st.integers(1, 25))
def test_segments_are_those_of_the_slow_way(count: int, length: int, hop: int) -> None:
    pcm = np.arange(1, count + 1, dtype=np.int16)
    found = segments_of(pcm, length, hop)
    assert found.dtype == np.int16
    assert found.tolist() == slow_segments(pcm.tolist(), length, hop)
    assert loudest(found).shape == (1, length)
    assert loudest(found).tolist() == [max(found.tolist(), key=lambda each: sum(v * v for v in each))]


def test_the_loudest_of_the_loudest_values_does_not_overflow() -> None:
    segments = np.array([[-32768] * 70000, [32767] * 70000], np.int16)
    assert loudest(segments)[0, 0] == -32768


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_another_rate_keeps_tone_and_length(tmp_path: Path, rate: int) -> None:
    wave_of = lambda hz: np.sin(2 * np.pi * 440 * np.arange(hz) / hz) * 16384  # noqa: E731
    write_clip(tmp_path / "a.wav", wave_of(rate).astype(np.int16), rate)
    found, expected = read_clip(tmp_path / "a.wav", RATE), wave_of(RATE)
    assert found.shape == (RATE,)
    middle = slice(RATE // 10, -RATE // 10)
    assert np.abs(found[middle] - expected[middle]).max() < 32


@pytest.mark.parametrize(("rate", "frames"), [(RATE, 1 << 20), (8000, 1 << 19), (44100, 1 << 20)])
def test_a_long_clip_takes_eight_bytes_a_frame(tmp_path: Path, rate: int, frames: int) -> None:
    """So the longest one takes 128 MiB, as an image may."""
    write_clip(tmp_path / "a.wav", np.full(frames, 1000, np.int16), rate)
    read_clip(tmp_path / "a.wav", RATE)  # with its packages
    tracemalloc.start()
    SoundForm(RATE, RATE).segments(tmp_path / "a.wav", RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * (1 << 20) + (1 << 20)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    pcm = np.random.default_rng(0).integers(-32768, 32768, 1000).astype(np.int16)
    write_clip(tmp_path / "new" / "a.wav", pcm, 8000)
    np.testing.assert_array_equal(read_clip(tmp_path / "new" / "a.wav", 8000), pcm)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.wav"]


def test_a_form_gives_segments_or_the_loudest_alone(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.wav", np.repeat(np.array([1, 9, 2], np.int16), 100), 100)
    form = SampleForm(sample_rate=100, segment_s=1.0)
    assert form.sound_shape == (1, 1, 100)
    several, one = (SoundForm.of(form, one_a_clip=each) for each in (False, True))
    assert several is not None
    assert one is not None
    assert several.segments(tmp_path / "a.wav", 100)[:, 0, 0, 0].tolist() == [1, 9, 2]
    assert one.segments(tmp_path / "a.wav", 100)[:, 0, 0, 0].tolist() == [9]
    assert SoundForm.of(SampleForm(), one_a_clip=False) is None


def broken(path: Path, kind: str) -> Path:
    whole = wav(path, [[1, 2]] * 100, width=2).read_bytes()
    rate = whole.index(b"fmt ") + 12
    texts = {
        "empty": b"",
        "text": b"no sound at all" * 10,
        "cut": whole[:-7],
        "head": whole[:20],
        "no frames": whole[:44],
    }
    if kind in texts:
        path.write_bytes(texts[kind])
    elif kind == "0 Hz":
        path.write_bytes(whole[:rate] + struct.pack("<I", 0) + whole[rate + 4 :])
    elif kind == "nan":
        soundfile.write(path, np.array([0.5, np.nan]), RATE, subtype="FLOAT")
    elif kind == "hours":
        soundfile.write(path.with_suffix(".flac"), np.zeros((1 << 24) + 1, np.int16), RATE)
        return path.with_suffix(".flac")
    elif kind == "missing":
        path.unlink()
    elif kind == "one Hz":
        wav(path, [[1]] * 2000, width=2, rate=1)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "as sound: there is no such file$"),
        ("empty", "it ends within its head"),
        ("text", "Format not recognised"),
        ("cut", "it ends before its 100 frames: it was cut off"),
        ("head", "it ends within its head"),
        ("no frames", "it ends before its 100 frames"),
        ("0 Hz", "it has 100 frames of 2 channels at 0 Hz"),
        ("nan", "no finite numbers"),
        ("hours", "it has 1,049 seconds, and clips of at most 1,049 are read at 16000 Hz"),
        ("one Hz", "it has 2,000 seconds, and clips of at most 1,049 are read at 1 Hz"),
    ],
)
def test_a_broken_file_is_told_by_its_reason(tmp_path: Path, kind: str, said: str) -> None:
    path = broken(tmp_path / "a.wav", kind)
    with pytest.raises(BadInput, match=said) as caught:
        read_clip(path, RATE)
    assert str(path) in str(caught.value)


def test_files_of_an_extensible_head_are_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(-(2**23), 2**23, (50, 6))
    soundfile.write(tmp_path / "a.wav", (values << 8).astype(np.int32), RATE, format="WAVEX", subtype="PCM_24")
    assert read_clip(tmp_path / "a.wav", RATE).tolist() == slow_pcm(values.tolist(), 3)


@pytest.mark.parametrize(("module", "name", "rate"), [("soundfile", "a.flac", RATE), ("soxr", "a.wav", 8000)])
def test_a_missing_package_is_named_by_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, rate: int
) -> None:
    soundfile.write(tmp_path / name, np.zeros(100, np.int16), rate)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=r"the extra sound: pip install 'hushfleet\[sound\]'"):
        read_clip(tmp_path / name, RATE)
