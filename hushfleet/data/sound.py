"""Reads and writes clips of sound, and cuts them into segments: int16, one channel, at the sample rate of a task.

WAV files are read by the standard library; other formats and other sample rates need the extra `sound`. A clip takes
memory for `MOST_FRAMES` frames at most, whatever its file says, and is read in blocks.
"""

from __future__ import annotations

import contextlib
import io
import wave
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hushfleet import atomic_file
from hushfleet.data.form import SampleForm
from hushfleet.errors import BadInput
from hushfleet.paths import no_file

Pcm = npt.NDArray[np.int16]
MOST_FRAMES = 1 << 24
"""The most frames of a clip, in its file and at the task's rate: 17 minutes at 16 kHz."""
UNIT = 1 << 15
"""The value of int16 that stands for 1."""
_BLOCK = 1 << 16  # values that are converted at once
_NEEDS = "{} the extra sound: pip install 'hushfleet[sound]'"


@dataclass(frozen=True)
class SoundForm:
    """The form of a task's segments.

    :param sample_rate: Hz.
    :param hop: frames from the beginning of one segment to that of the next.
    :param one_a_clip: whether each clip gives its loudest segment alone, as with the unit `record`.
    :param in_files: whether segments stay in their files (`Segments`).
    """

    sample_rate: int
    hop: int
    one_a_clip: bool = False
    in_files: bool = False

    @classmethod
    def of(cls, form: SampleForm, *, one_a_clip: bool, in_files: bool = False) -> SoundForm | None:
        """Returns the form that a task names; None if its samples are no sound."""
        return cls(form.sample_rate, form.hop, one_a_clip, in_files) if form.sample_rate else None

    def segments(self, file: Path, length: int) -> Pcm:
        """Returns the segments of a file, int16 `[m, 1, 1, length]`. Raises `BadInput`."""
        found = segments_of(read_clip(file, self.sample_rate), length, self.hop)
        return (loudest(found) if self.one_a_clip else found)[:, None, None]

    def read(self, file: Path, length: int) -> Pcm | Segments:
        """Returns the same, in memory or in its file. Raises `BadInput`."""
        found = self.segments(file, length)
        return Segments(self, length, ((file, place) for place in range(len(found)))) if self.in_files else found

    def joined(self, parts: Sequence[Any], length: int) -> Any:
        """Returns the segments of several files, as `read` returns those of one."""
        if self.in_files:
            return Segments(self, length, ()).joined(parts)
        return np.concatenate([np.empty((0, 1, 1, length), np.int16), *parts])


class Segments:
    """Segments that are read from their files when they are used: an array int16 `[n, 1, 1, T]` in little memory.

    A file that is gone by then, or has become shorter, gives zeros: it must not decide about the others.

    :param places: of each segment: its file, and which of its segments it is.
    """

    dtype, ndim = np.dtype(np.int16), 4

    def __init__(self, form: SoundForm, length: int, places: Iterable[tuple[Path, int]]) -> None:
        self.places = tuple(places)
        self.shape = (len(self.places), 1, 1, length)
        self.nbytes = 0  # of memory
        self._form = form

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Pcm]:
        file, segments = None, np.empty((0, *self.shape[1:]), np.int16)
        for wanted, place in self.places:
            if wanted != file:
                file, segments = wanted, segments[:0]
                with contextlib.suppress(BadInput):
                    segments = self._form.segments(file, self.shape[3])
            yield segments[place] if place < len(segments) else np.zeros(self.shape[1:], np.int16)

    def __getitem__(self, indices: Any) -> Segments:
        places = np.arange(len(self))[indices].tolist()
        return Segments(self._form, self.shape[3], (self.places[place] for place in places))

    def joined(self, others: Iterable[Segments]) -> Segments:
        """Returns these and others, one after the other."""
        return Segments(self._form, self.shape[3], (place for each in (self, *others) for place in each.places))

    def astype(self, kind: Any) -> np.ndarray:
        """Returns all of them as an array in memory."""
        found = np.empty(self.shape, kind)
        for place, segment in enumerate(self):
            found[place] = segment
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.astype(dtype or self.dtype)


def read_clip(path: Path, sample_rate: int) -> Pcm:
    """Reads a clip of at least one frame, int16 `[frames]`; channels are averaged.

    :param sample_rate: Hz; a clip of another rate is resampled.
    :raises BadInput: the file is broken, too long, or needs a package that is not installed; the text names file and
        reason.
    """
    try:
        if what := no_file(path):
            raise BadInput(f"it is {what}")
        with contextlib.suppress(wave.Error):  # another format, also one that is in a WAV file
            return _read_wav(path, sample_rate)
        return _read_other(path, sample_rate)
    except MemoryError:
        raise
    except Exception as error:  # broken files fail in many ways: EOFError, struct.error, LibsndfileError, ...
        known = {EOFError: "it ends within its head", FileNotFoundError: "there is no such file"}
        cause = BadInput(known[type(error)]) if type(error) in known else error
        kind = "" if isinstance(cause, BadInput) else f"{type(cause).__name__}: "
        raise BadInput(f"{path} cannot be read as sound: {kind}{cause}") from cause


def segments_of(pcm: Pcm, length: int, hop: int) -> Pcm:
    """Cuts a clip into segments, int16 `[m, length]`, m at least 1; one begins every `hop` frames.

    What no whole segment has at the end is padded with zeros if it is half a segment or longer, or all of the clip;
    otherwise it is left out.

    >>> segments_of(np.arange(1, 7, dtype=np.int16), 4, 4).tolist()
    [[1, 2, 3, 4], [5, 6, 0, 0]]
    """
    whole = 0 if len(pcm) < length else 1 + (len(pcm) - length) // hop
    rest = len(pcm) - max(whole * hop, (whole - 1) * hop + length)
    count = whole + (not whole or 2 * rest >= length)
    padded = np.zeros(max(len(pcm), (count - 1) * hop + length), np.int16)
    padded[: len(pcm)] = pcm
    found: Pcm = np.lib.stride_tricks.sliding_window_view(padded, length)[: (count - 1) * hop + 1 : hop].copy()
    return found


def loudest(segments: Pcm) -> Pcm:
    """Returns the segment with the largest energy, the first of several, int16 `[1, length]`."""
    energy = [int(np.square(each, dtype=np.int64).sum()) for each in segments]
    place = energy.index(max(energy))
    return segments[place : place + 1]


def wav_of(pcm: Pcm, sample_rate: int) -> bytes:
    """Returns a WAV file of 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.asarray(pcm, "<i2").tobytes())
    return content.getvalue()


def write_clip(path: Path, pcm: Pcm, sample_rate: int) -> None:
    """Writes a WAV file of 16 bits; it is there whole or not at all. Raises `StoreFull`."""
    atomic_file.write_whole(path, wav_of(pcm, sample_rate), durable=True)


def _read_wav(path: Path, sample_rate: int) -> Pcm:
    with open(path, "rb") as raw, wave.open(raw) as file:
        channels, width, rate, frames = file.getparams()[:4]
        here = raw.tell()
        if frames * channels * width > raw.seek(0, 2) - here:
            raise BadInput(f"it ends before its {frames:,} frames: it was cut off while it was written")
        raw.seek(here)

        def blocks(count: int) -> Iterator[np.ndarray]:
            while content := file.readframes(count):
                yield _unit(content, width).reshape(-1, channels)

        return _mono(blocks, frames, channels, rate, sample_rate)


def _read_other(path: Path, sample_rate: int) -> Pcm:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise BadInput(_NEEDS.format("WAV files of 8 to 32 bits are read without it; for others install it")) from error
    with soundfile.SoundFile(path) as file:

        def blocks(count: int) -> Iterator[np.ndarray]:
            while len(block := file.read(count, "float64", always_2d=True)):
                yield block

        return _mono(blocks, file.frames, file.channels, file.samplerate, sample_rate)


def _mono(blocks: Any, frames: int, channels: int, rate: int, sample_rate: int) -> Pcm:
    """:param blocks: yields float64 `[frames, channels]` in -1..1, given how many frames at most."""
    if not (frames and channels and rate):
        raise BadInput(f"it has {frames} frames of {channels} channels at {rate} Hz")
    longest = frames * max(1, sample_rate / rate)
    if longest > MOST_FRAMES:
        raise BadInput(
            f"it has {frames / rate:,.0f} seconds, and clips of at most {frames * MOST_FRAMES / longest / rate:,.0f} "
            f"are read at {rate} Hz; cut it into shorter ones"
        )
    pcm, done = np.empty(frames, np.int16), 0
    for block in blocks(max(1, _BLOCK // channels)):
        if not np.isfinite(block).all():
            raise BadInput("it has values that are no finite numbers")
        pcm[done : done + len(block)] = _pcm(block.sum(1) / channels)
        done += len(block)
    if done < frames:
        raise BadInput(f"it ends after {done:,} of its {frames:,} frames: it was cut off while it was written")
    return pcm if rate == sample_rate else _resampled(pcm, rate, sample_rate)


def _resampled(pcm: Pcm, rate: int, sample_rate: int) -> Pcm:
    try:
        import soxr
    except ImportError as error:
        told = f"it has {rate} Hz, and the task {sample_rate} Hz; to resample it install it"
        raise BadInput(_NEEDS.format(told)) from error
    stream, parts = soxr.ResampleStream(rate, sample_rate, 1, dtype="float32"), list[Pcm]()
    for first in range(0, len(pcm), _BLOCK):
        block = pcm[first : first + _BLOCK].astype(np.float32) / np.float32(UNIT)
        parts.append(_pcm(stream.resample_chunk(block, last=first + _BLOCK >= len(pcm))))
    if not len(found := np.concatenate(parts)):
        raise BadInput(f"it has {len(pcm)} frames at {rate} Hz, too few for one at {sample_rate} Hz")
    return found


def _unit(content: bytes, width: int) -> np.ndarray:
    """Returns the values of a WAV file in -1..1, float64."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        content, width = wide.tobytes(), 4
    return np.frombuffer(content, f"<i{width}") / 2.0 ** (8 * width - 1)


def _pcm(values: np.ndarray) -> Pcm:
    found: Pcm = np.clip(np.rint(values * UNIT), -UNIT, UNIT - 1).astype(np.int16)
    return found
