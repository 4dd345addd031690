"""Clips of sound on the labelling page, `add`, `predict`, and alarms that the owner marks, by real HTTP."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from hushfleet.data.sound import read_clip, write_clip
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import load_config
from hushfleet.edge_client.labelling.desk import PLAYED_HZ, Desk
from hushfleet.edge_client.labelling.heard import heard_name, taken_for
from hushfleet.edge_client.labelling.spectrogram import SIZE, spectrogram
from support.edge import Package
from support.label_page import Browser, serving
from support.sound_board import (
    CLASSES,
    NONE,
    RATE,
    a_clip,
    a_sound,
    device_toml,
    give_model,
    hearing,
    hearing_task,
    hears,
)

__all__ = ["device_toml", "hearing", "hears"]


@pytest.fixture
def inbox(device_toml: Path) -> Path:
    """With two clips, and a file that is none."""
    folder = device_toml.with_name("inbox")
    a_clip(folder / "first.wav", "tone", "tone", "quiet", at=1e9)
    (folder / "notes.wav").write_bytes(b"RIFF")
    os.utime(folder / "notes.wav", (1e9 - 1, 1e9 - 1))
    a_clip(folder / "second.wav", "buzz", at=1e9 + 1)
    return folder


@pytest.fixture
def owner(hears, inbox: Path) -> Iterator[Browser]:
    with serving(Desk(hears, settled_s=0.0)) as server:
        yield Browser(server, server.token)


def below(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_a_clip_is_heard_seen_and_labelled(owner: Browser, inbox: Path) -> None:
    _, shown = owner.ask("/next")
    assert (shown["image"], shown["kind"], shown["waiting"], shown["classes"]) == ("first.wav", "clip", 2, [*CLASSES])
    assert shown["guess"][0] == "tone"
    assert "notes.wav cannot be read as sound" in shown["unreadable"][0]
    status, wav = owner.ask("/clip", json.dumps({"image": "first.wav", "version": shown["version"]}))
    assert (status, owner.headers["Content-Type"]) == (200, "audio/wav")
    assert "media-src blob:" in owner.headers["Content-Security-Policy"]
    (inbox / ".played.wav").write_bytes(wav)
    played = read_clip(inbox / ".played.wav", PLAYED_HZ)
    assert np.array_equal(played[:: PLAYED_HZ // RATE], a_sound("tone", "tone", "quiet"))
    status, picture = owner.look("first.wav")
    assert (status, owner.headers["Content-Type"], Image.open(io.BytesIO(picture)).size) == (200, "image/jpeg", SIZE)
    status, shown = owner.tap("first.wav", "tone")
    assert (status, shown["image"], shown["said"]) == (200, "second.wav", "first.wav is labelled tone.")
    owner.tap("second.wav", "")
    assert below(inbox.with_name("sounds")) == ["tone/first.wav"]
    assert below(inbox) == [".played.wav", "not-usable/second.wav", "notes.wav"]
    owner.ask("/undo")
    assert (inbox / "second.wav").exists()


def test_nobody_else_hears_a_clip(owner: Browser, inbox: Path) -> None:
    stranger = Browser(owner._server, "x" * 32)
    body = json.dumps({"image": "first.wav", "version": owner.version("first.wav")})
    assert stranger.ask("/clip", body)[0] == 401
    outside = a_clip(inbox.with_name("private.wav"), "tone")
    for name in ("../private.wav", str(outside), "notes"):
        assert owner.ask("/clip", json.dumps({"image": name, "version": ""}))[0] == 409


@pytest.mark.parametrize("seconds", [0.01, 1.0, 90.0])
@pytest.mark.parametrize("hz", [500, 3000, 7000])
def test_a_spectrogram_shows_a_tone_at_its_height(seconds: float, hz: int) -> None:
    pcm = np.round(8000 * np.sin(2 * np.pi * hz * np.arange(int(seconds * 16_000)) / 16_000)).astype(np.int16)
    pixels = np.asarray(Image.open(io.BytesIO(spectrogram(pcm, 16_000))).convert("L")).astype(float)
    row = pixels[:, : SIZE[0] // 2].mean(1).argmax()
    assert row == pytest.approx(SIZE[1] * (1 - hz / 8000), abs=3)
    assert pixels.min() < 130 < pixels.max()


def test_a_spectrogram_of_silence_is_drawn() -> None:
    assert Image.open(io.BytesIO(spectrogram(np.zeros(100, np.int16), RATE))).size == SIZE


@pytest.fixture
def alarms(device_toml: Path, hears, tmp_path: Path) -> list[str]:
    """Two clips that the board took for a tone, and one for a buzz; the names below the folder of alarms."""
    device_toml.write_text(device_toml.read_text() + "keep_alarms = 9")
    day = np.concatenate((a_sound("tone", "quiet", "buzz", "quiet"), a_sound("tone", loud=0.4)))
    write_clip(tmp_path / "day.wav", day, RATE)
    assert main(["listen", str(device_toml), "--from", str(tmp_path / "day.wav")]) == 0
    found = below(device_toml.with_name("inbox") / "alarms")
    assert [name.partition("/")[0] for name in found] == ["buzz", "tone", "tone"]
    return [found[1], found[0], found[2]]


def marking(device_toml: Path) -> Desk:
    return Desk(load_config(device_toml), settled_s=0.0, wrong=True)


def test_the_owner_marks_false_alarms(device_toml: Path, alarms: list[str]) -> None:
    with serving(marking(device_toml)) as server:
        owner = Browser(server, server.token)
        _, shown = owner.ask("/next")
        assert (shown["wrong"], shown["waiting"], shown["image"]) == (True, 3, alarms[0])
        assert shown["guess"] == ["tone", pytest.approx(taken_for(alarms[0])[1])]

        def tap(label: str) -> dict:
            _, now = owner.ask("/next")
            body = {"image": now["image"], "version": now["version"], "label": label}
            return owner.ask("/tap", json.dumps(body))[1]

        tap("tone")  # it was right
        tap("tone")  # it was another class
        assert tap("")["said"].endswith(f"is labelled {NONE}.")
        names = [name.partition("/")[2] for name in alarms]
        sounds = device_toml.with_name("sounds")
        assert below(sounds) == sorted([f"tone/{names[0]}", f"tone/{names[1]}", f"{NONE}/{names[2]}"])
        _, shown = owner.ask("/undo")
        assert (shown["image"], shown["waiting"]) == (alarms[2], 1)
    assert np.array_equal(read_clip(sounds / "tone" / names[1], RATE), a_sound("buzz"))


def test_an_alarm_that_is_already_a_sample_of_another_class_is_corrected(device_toml: Path, alarms: list[str]) -> None:
    sounds, inbox = device_toml.with_name("sounds"), device_toml.with_name("inbox")
    sample = sounds / "tone/2.wav"
    sample.write_bytes((inbox / "alarms" / alarms[0]).read_bytes())
    desk = marking(device_toml)
    desk.tap(alarms[0], "buzz", desk.next().version)
    assert below(sounds) == ["buzz/2.wav"]
    desk.undo()
    assert below(sounds) == ["tone/2.wav"]
    assert alarms[0] in below(inbox / "alarms")


def test_without_a_class_for_it_a_false_alarm_is_put_aside(
    device_toml: Path, alarms: list[str], package: Package, hears
) -> None:
    give_model(hears, hearing_task(package, ("buzz", "tone"), task="two"))
    with serving(marking(device_toml)) as server:
        owner = Browser(server, server.token)
        _, now = owner.ask("/next")
        _, shown = owner.ask("/tap", json.dumps({"image": now["image"], "version": now["version"], "label": ""}))
    assert shown["said"].endswith(f"is put aside. No class of the task is called '{NONE}'.")
    assert not below(device_toml.with_name("sounds"))
    assert below(device_toml.with_name("inbox") / "not-usable") == [alarms[0].partition("/")[2]]


def test_alarms_do_not_wait_for_a_label(device_toml: Path, alarms: list[str]) -> None:
    assert Desk(load_config(device_toml), settled_s=0.0).next().waiting == 0


def test_a_file_of_somebody_else_among_the_alarms(device_toml: Path, alarms: list[str]) -> None:
    a_clip(device_toml.with_name("inbox") / "alarms/own.wav", "buzz", at=1e9)
    shown = marking(device_toml).next()
    assert (shown.image, shown.guess) == ("own.wav", None)


def test_without_alarms_the_owner_is_told_how_to_keep_some(hears, device_toml: Path, capsys) -> None:
    assert main(["label", str(device_toml), "--wrong"]) == 2
    assert "write keep_alarms = 100 into [listen], and run hushfleet-edge listen" in capsys.readouterr().err


@pytest.mark.parametrize("probability", [0.0, 0.004, 0.5, 0.874, 0.999, 1.0])
def test_the_name_of_an_alarm_holds_what_it_was_taken_for(probability: float) -> None:
    name = heard_name(1.8e9 + 0.25, probability)
    assert taken_for(f"a-p12 b/{name}") == ("a-p12 b", pytest.approx(probability, abs=0.005))
    assert taken_for(f"dog/{heard_name(0.0)}") == ("dog", 1.0)


def test_sounds_are_added_to_a_class(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    pcm = a_sound("tone").astype(np.float32) / 32768
    soundfile.write(tmp_path / "a.flac", pcm, RATE)
    soundfile.write(tmp_path / "b.ogg", pcm, RATE)
    soundfile.write(tmp_path / "other-rate.wav", pcm, 2 * RATE)
    (tmp_path / "noise.wav").write_bytes(b"no sound")
    (tmp_path / "photo.jpg").write_bytes(b"no sound")
    files = [tmp_path / name for name in ("a.flac", "b.ogg", "other-rate.wav", "noise.wav", "photo.jpg", "a.flac")]
    assert main(["add", str(device_toml), *map(str, files), "--label", "tone"]) == 2
    out, err = capsys.readouterr()
    assert below(device_toml.with_name("sounds")) == ["tone/a.flac", "tone/b.ogg", "tone/other-rate.wav"]
    assert "3 of 6 added; the next round trains on them" in out
    assert "a.flac is there already (trained on)" in out
    assert "noise.wav cannot be read as sound" in err
    assert "photo.jpg cannot be read as sound: its name has no ending of sound" in err


def test_a_clip_is_predicted_by_segments_and_as_a_whole(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    file = a_clip(tmp_path / "a.wav", "tone", "quiet", "tone")
    assert main(["predict", str(device_toml), str(file), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}: by the fleet's model, of sounds"
    segments = [line.split()[0] + line.rpartition("%")[2] for line in lines[1:4]]
    assert segments == ["0.00 tone", f"0.25 {NONE}", "0.50 tone"]
    assert lines[4] == "  mean of 3 segments:"
    assert lines[5].endswith("%  tone")
    assert len(lines) == 6
    assert main(["predict", str(device_toml), str(file), str(file), "--json", "--top", "9"]) == 0
    [found, again] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found, found["task"], [each["from_s"] for each in found["segments"]]) == (again, "sounds", [0.0, 0.25, 0.5])
    for name in CLASSES:
        mean = np.mean([each["classes"][name] for each in found["segments"]])
        assert found["classes"][name] == pytest.approx(mean)
    assert main(["predict", str(device_toml), str(file), str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * (1 + 3 + 1 + 3)


def test_a_board_hears_in_listen_what_it_predicts_of_the_file(
    package: Package, device_toml: Path, tmp_path: Path, capsys
) -> None:
    give_model(load_config(device_toml), hearing_task(package, CLASSES, hop_s=0.1))
    file = a_clip(tmp_path / "a.wav", "tone", "quiet", "tone", "buzz")
    assert main(["listen", str(device_toml), "--from", str(file)]) == 0
    heard = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["predict", str(device_toml), str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["segments"]
    assert len(found) == 8
    assert [(each["from_s"], each["classes"]) for each in heard] == [
        (pytest.approx(each["from_s"]), each["classes"]) for each in found
    ]
