"""Reads sound from the microphone, by `arecord` as a child process, or from a file or pipe in its place.

Each source yields int16 frames as they come, and None where some are missing.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np

from hushfleet.data.sound import Pcm, read_clip, segments_of
from hushfleet.edge_client.rate_limits import Backoff
from hushfleet.errors import BadInput

SoundSource = Generator[Pcm | None, None, None]
LOOK_S = 0.2  # how soon a stop is noticed
SILENT_S = 10.0
"""A recorder that has given nothing for this time is started again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_READ_BYTES = 1 << 14

_log = logging.getLogger("hushfleet.edge")


def of_file(path: Path, sample_rate: int, length: int, hop: int) -> SoundSource:
    """Yields a sound file, with zeros after its end where its last segment needs them."""
    pcm = read_clip(path, sample_rate)
    frames = (len(segments_of(pcm, length, hop)) - 1) * hop + length
    padded = np.concatenate((pcm[:frames], np.zeros(max(0, frames - len(pcm)), np.int16)))
    yield from (padded[place : place + hop] for place in range(0, frames, hop))


def of_pipe(stop: threading.Event) -> SoundSource:
    """Yields what comes from standard input: 16 bits, little-endian, one channel, without a head."""
    yield from _frames(sys.stdin.fileno(), stop)


def of_microphone(
    device: str, sample_rate: int, stop: threading.Event, *, clock: Callable[[], float] = time.monotonic
) -> SoundSource:
    """Yields what `arecord` records, and starts it again, after growing pauses, if it ends. Raises `BadInput`.

    That it ended is logged once, with its own words, until it has recorded for longer than the longest pause.

    :param device: ALSA's name of the microphone.
    """
    command = ["arecord", "-q", "-D", device, "-f", "S16_LE", "-c", "1", "-r", str(sample_rate), "-t", "raw"]
    pause, said = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, now=clock()), False
    while not stop.is_set():
        began, words = clock(), subprocess.DEVNULL if said else None
        try:  # its own session: Ctrl-C ends it only through us
            recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, start_new_session=True)
        except OSError as error:
            raise BadInput(f"arecord cannot be started ({error.strerror}): sudo apt install alsa-utils") from error
        assert recorder.stdout is not None
        try:
            yield from _frames(recorder.stdout.fileno(), stop, patience_s=SILENT_S)
        finally:
            recorder.kill()
            recorder.communicate()
        now = clock()
        if now - began > LONGEST_PAUSE_S:
            pause.reset(now)
            said = False
        if not (said or stop.is_set()):
            _log.warning("the microphone %r gives no more sound; it is tried again", device)
        said = True
        pause.tried(now)
        stop.wait(pause.due_at - now)
        yield None


def _frames(stream: int, stop: threading.Event, *, patience_s: float = float("inf")) -> Iterator[Pcm]:
    """Yields frames until the stream ends, is silent for too long, or there is a stop."""
    rest, waited = b"", 0.0
    while not stop.is_set() and waited < patience_s:
        if not select.select((stream,), (), (), LOOK_S)[0]:
            waited += LOOK_S
            continue
        if not (found := os.read(stream, _READ_BYTES)):
            return
        found, waited = rest + found, 0.0
        whole = len(found) & ~1
        rest = found[whole:]
        yield np.frombuffer(found[:whole], "<i2").astype(np.int16, copy=False)
