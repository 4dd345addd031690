"""The microphone, played by a made-up `arecord`, and the process: no real microphone was tried."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hushfleet.edge_client.listen import sources
from hushfleet.edge_client.listen.sources import of_microphone
from hushfleet.errors import BadInput
from support.processes import ENVIRONMENT
from support.sound_board import LENGTH, RATE, a_sound, frames_of, listening


class Pauses(threading.Event):
    """A stop that waits for nothing, and notes how long it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(round(timeout or 0.0))
        return self.is_set()


@pytest.fixture
def arecord(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first `arecord` in PATH; a test writes what it does. `sound` beside it is two segments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sound").write_bytes(a_sound("tone", "buzz").astype("<i2").tobytes())
    program = folder / "arecord"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{folder}:{os.environ['PATH']}")
    return program


def does(program: Path, *lines: str) -> None:
    program.write_text("\n".join(["#!/bin/sh", f"cd {program.parent}", 'echo "$@" >> calls', *lines, ""]))


def parts(source: sources.SoundSource, gaps: int) -> list[np.ndarray]:
    """The sound before each of the first gaps."""
    found = [np.empty(0, np.int16)]
    for pcm in source:
        if pcm is None:
            found.append(np.empty(0, np.int16))
            if len(found) > gaps:
                break
        else:
            found[-1] = np.concatenate((found[-1], pcm))
    source.close()
    return found[:gaps]


def test_a_recorder_that_is_killed_or_fails_is_started_again(arecord: Path, caplog) -> None:
    does(
        arecord,
        "case $(wc -l < calls) in",
        "1) head -c 301 sound; kill -9 $$ ;;",  # in the middle of a value
        "2) echo 'arecord: main:850: audio open error: Device or resource busy' >&2; exit 1 ;;",
        "3) head -c 99 /dev/urandom ;;",
        "*) cat sound ;;",
        "esac",
    )
    stop = Pauses()
    killed, failed, garbage, whole = parts(of_microphone("hw:1", RATE, stop, clock=lambda: 0.0), gaps=4)
    assert np.array_equal(killed, a_sound("tone", "buzz")[:150])
    assert (len(failed), len(garbage)) == (0, 49)
    assert np.array_equal(whole, a_sound("tone", "buzz"))
    assert stop.pauses == [1, 2, 4, 8], "growing"
    assert [record.getMessage() for record in caplog.records] == [
        "the microphone 'hw:1' gives no more sound; it is tried again"
    ], "said once"
    calls = (arecord.parent / "calls").read_text().splitlines()
    assert set(calls) == {f"-q -D hw:1 -f S16_LE -c 1 -r {RATE} -t raw"}


def test_what_arecord_complains_about_is_told_once(arecord: Path, capfd) -> None:
    does(arecord, "echo 'audio open error: No such file or directory' >&2", "exit 1")
    parts(of_microphone("hw:9", RATE, Pauses(), clock=lambda: 0.0), gaps=3)
    assert capfd.readouterr().err.count("audio open error") == 1


def test_a_recorder_that_runs_for_long_is_said_and_paused_anew(arecord: Path, caplog) -> None:
    does(arecord, "cat sound")
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 40.0  # two readings in a run, so it lived for 40 s; then for 40 s more
        return now

    stop = Pauses()
    parts(of_microphone("hw:1", RATE, stop, clock=clock), gaps=2)
    assert stop.pauses == [1, 2]

    def slow() -> float:
        nonlocal now
        now += 61.0
        return now

    stop = Pauses()
    parts(of_microphone("hw:1", RATE, stop, clock=slow), gaps=3)
    assert stop.pauses == [1, 1, 1]
    assert caplog.text.count("gives no more sound") == 1 + 3


def test_a_recorder_that_hangs_is_started_again(arecord: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "SILENT_S", 0.4)
    does(arecord, "cat sound", "[ $(wc -l < calls) -gt 1 ] || exec sleep 600")
    hung, after = parts(of_microphone("hw:1", RATE, Pauses(), clock=lambda: 0.0), gaps=2)
    assert np.array_equal(hung, after)


def test_without_arecord_the_package_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="sudo apt install alsa-utils"):
        next(of_microphone("default", RATE, Pauses()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_the_recorder(hears, device_toml: Path, arecord: Path, number: int, code: int) -> None:
    does(arecord, "echo $$ > pid", "cat sound", "exec sleep 600")
    with listening(device_toml) as process:
        assert process.stdout is not None
        heard = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert "cryptography" not in Path(f"/proc/{process.pid}/maps").read_text(), "it needs no key, and megabytes"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert [line["alarm"] for line in heard] == ["tone", "buzz"]
    assert (process.returncode, out, err) == (code, b"", b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int((arecord.parent / "pid").read_text()), 0)


def test_a_pipe_and_a_key(hears, device_toml: Path) -> None:
    device_toml.write_text(device_toml.read_text() + 'keep = "key"')
    with listening(device_toml, "--from", "-", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(a_sound("tone", "quiet").astype("<i2").tobytes())
        process.stdin.flush()
        before = [json.loads(line) for line in islice(process.stdout, 2)]
        process.send_signal(signal.SIGUSR1)
        os.utime(device_toml, (1, 1))
        out, err = process.communicate(a_sound("quiet", "quiet").astype("<i2").tobytes() + b"\0", timeout=60)
    after = [json.loads(line) for line in out.splitlines()]
    assert (process.returncode, err.count(b"device.toml has changed: start"), err.count(b"\n")) == (0, 1, 1)
    assert [len(line.get("kept", ())) for line in [*before, *after]] == [0, 0, 1, 0]
    kept, tone = (each.astype(float) for each in (frames_of(Path(after[0]["kept"][0])), a_sound("tone")))
    assert np.square(kept).sum() == pytest.approx(np.square(tone).sum(), rel=0.02), "the loudest of the last three"


def test_enter_is_the_key_in_a_terminal(hears, device_toml: Path, arecord: Path) -> None:
    device_toml.write_text(device_toml.read_text() + 'keep = "key"')
    does(arecord, "cat sound", "while :; do cat sound; sleep 0.1; done")
    master, slave = os.openpty()
    with listening(device_toml, stdin=slave) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.write(master, b"\n")
        kept = next(line["kept"] for line in map(json.loads, process.stdout) if "kept" in line)
        process.terminate()
        _, err = process.communicate(timeout=60)
    os.close(master)
    os.close(slave)
    assert (process.returncode, err) == (0, b"")
    assert len(frames_of(Path(kept[0]))) == LENGTH


def test_a_reader_that_goes_ends_it(hears, device_toml: Path, arecord: Path) -> None:
    does(arecord, "cat sound", "while :; do cat sound; sleep 0.1; done")
    with listening(device_toml) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
