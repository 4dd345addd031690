"""`hushfleet-edge listen`, by files, pipes and a made-up `arecord`: no real microphone was tried."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.data.sound import segments_of, write_clip
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.labelling.heard import taken_for
from hushfleet.edge_client.listen.kept_clips import KeptClips
from hushfleet.edge_client.listen.listener import SegmentListener
from hushfleet.edge_client.listen.model_in_use import ModelInUse
from hushfleet.edge_client.listen.recent_sound import SEGMENTS, RecentSound
from hushfleet.errors import GraphRefused, StoreError
from support.sound_board import CLASSES, LENGTH, RATE, a_clip, a_sound, frames_of, give_model, hearing_task


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def heard(device_toml: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main(["listen", str(device_toml), "--from", str(file)]) == 0
    return lines(capsys.readouterr().out)


def test_each_segment_is_a_line(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    found = heard(device_toml, a_clip(tmp_path / "a.wav", "quiet", "tone", "tone", "quiet", "buzz"), capsys)
    assert [next(iter(line["classes"])) for line in found] == ["none of these", "tone", "tone", "none of these", "buzz"]
    assert [line["alarm"] for line in found] == ["", "tone", "tone", "", "buzz"]
    assert [line["from_s"] for line in found] == [n * LENGTH / RATE for n in range(5)]
    assert found[1]["dbfs"] == pytest.approx(-9.0, abs=0.1)
    assert (found[0]["task"], found[0]["model"]) == ("sounds", "global")


def waiting(device_toml: Path) -> list[Path]:
    return sorted(device_toml.with_name("inbox").rglob("*.wav"))


def with_rule(device_toml: Path, *keys: str) -> None:
    device_toml.write_text(device_toml.read_text() + "\n".join(keys))


def test_nothing_is_kept_unless_the_owner_says_so(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    heard(device_toml, a_clip(tmp_path / "a.wav", "tone", "quiet", "buzz"), capsys)
    assert not waiting(device_toml)


def test_the_loudest_part_of_a_loud_sound_is_kept_once(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    with_rule(device_toml, 'keep = "loud"', "loud_dbfs = -20.0")
    pcm = a_sound("quiet", "quiet", "quiet", "tone", "quiet", "quiet", "quiet")
    write_clip(tmp_path / "a.wav", pcm[LENGTH // 2 :], RATE)  # the tone lies in two segments
    found = heard(device_toml, tmp_path / "a.wav", capsys)
    assert [len(line.get("kept", ())) for line in found] == [0, 0, 0, 1, 0, 0, 0]
    [file] = waiting(device_toml)
    assert found[3]["kept"] == [str(file)]
    kept = frames_of(file).astype(float)
    assert len(kept) == LENGTH
    assert np.square(kept).sum() > 0.97 * np.square(a_sound("tone").astype(float)).sum()


def test_a_loud_sound_is_kept_when_the_file_ends_in_it(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    with_rule(device_toml, 'keep = "loud"')
    found = heard(device_toml, a_clip(tmp_path / "a.wav", "quiet", "quiet", "tone"), capsys)
    assert [len(line.get("kept", ())) for line in found] == [0, 0, 0, 1], "after its segments"
    assert sorted(found[3]) == ["at", "dbfs", "from_s", "kept", "model", "task"]
    assert (found[3]["from_s"], found[3]["dbfs"]) == (2 * LENGTH / RATE, found[2]["dbfs"])
    [file] = waiting(device_toml)
    assert (frames_of(file) == a_sound("quiet", "quiet", "tone")[-LENGTH:]).all()


def test_a_long_sound_is_kept_without_overlap(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    with_rule(device_toml, 'keep = "loud"')
    rng = np.random.default_rng(3)
    pcm = rng.integers(-9000, 9000, 8 * LENGTH).astype(np.int16)
    write_clip(tmp_path / "a.wav", pcm, RATE)
    heard(device_toml, tmp_path / "a.wav", capsys)
    found = np.lib.stride_tricks.sliding_window_view(pcm, LENGTH)
    places = sorted(int((found == frames_of(file)).all(1).argmax()) for file in waiting(device_toml))
    assert len(places) == 4
    assert min(np.diff(places)) >= LENGTH


def test_segments_of_which_the_model_is_not_sure_are_kept(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    with_rule(device_toml, 'keep = "unsure"', "unsure_below = 0.7")
    pcm = np.concatenate([a_sound("tone"), a_sound("tone", loud=0.2), a_sound("buzz")])
    write_clip(tmp_path / "a.wav", pcm, RATE)
    found = heard(device_toml, tmp_path / "a.wav", capsys)
    assert [max(line["classes"].values()) < 0.7 for line in found] == [False, True, False]
    [file] = waiting(device_toml)
    assert (frames_of(file) == a_sound("tone", loud=0.2)).all()


def test_before_the_first_task_a_board_collects_sound(device_toml: Path, tmp_path: Path, capsys, caplog) -> None:
    with_rule(device_toml, 'keep = "loud"')
    write_clip(tmp_path / "a.wav", np.full(40_000, 9000, np.int16), 16_000)
    found = heard(device_toml, tmp_path / "a.wav", capsys)
    assert [sorted({*line} - {"kept"}) for line in found] == [["at", "dbfs", "from_s"]] * 4
    assert [len(line.get("kept", ())) for line in found] == [0, 1, 0, 1]
    assert "the client has not run yet" in caplog.text


def test_alarms_are_kept_by_class_the_newest(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    with_rule(device_toml, "keep_alarms = 2")
    names = ("tone", "tone", "quiet", "buzz", "quiet", "tone", "tone", "tone")
    found = heard(device_toml, a_clip(tmp_path / "a.wav", *names), capsys)
    kept = [len(line.get("kept", ())) for line in found]
    assert kept == [1, 0, 0, 1, 0, 1, 0, 0], "a sound that goes on is one alarm"
    names = [file.relative_to(device_toml.with_name("inbox")).as_posix() for file in waiting(device_toml)]
    assert [name.rpartition("/")[0] for name in names] == ["alarms/buzz", "alarms/tone"]
    assert found[5]["kept"] == [str(waiting(device_toml)[1])]
    assert taken_for(names[1]) == ("alarms/tone", pytest.approx(found[5]["classes"]["tone"], abs=0.005))


def test_only_what_listen_has_kept_makes_room(hears, device_toml: Path, tmp_path: Path, capsys) -> None:
    with_rule(device_toml, 'keep = "loud"', "most_kept = 1")
    camera = a_clip(device_toml.with_name("inbox") / "own.wav", "buzz")
    later = a_clip(device_toml.with_name("inbox") / "heard-later.wav", "buzz", at=4e9)  # before the clock was set back
    heard(device_toml, a_clip(tmp_path / "a.wav", *("tone", "quiet", "quiet") * 3), capsys)
    assert len(waiting(device_toml)) == 2
    assert camera in waiting(device_toml)
    assert later not in waiting(device_toml), "the newest is what was heard last"


def test_a_full_disk_is_said_once_and_nothing_is_lost(
    hears, device_toml: Path, tmp_path: Path, capsys, caplog, monkeypatch
) -> None:
    with_rule(device_toml, 'keep = "loud"', "most_kept = 1")
    many = a_clip(tmp_path / "b.wav", *("tone", "quiet", "quiet") * 3)
    heard(device_toml, a_clip(tmp_path / "a.wav", "tone", "quiet"), capsys)
    before = waiting(device_toml)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = heard(device_toml, many, capsys)
    assert len(found) == 9
    assert not any("kept" in line for line in found)
    assert waiting(device_toml) == before
    assert not list(device_toml.with_name("inbox").rglob(".*"))
    assert caplog.text.count("a clip is not kept") == 1
    assert "free some space" in caplog.text


def test_a_newer_model_is_used_without_a_restart(hears, package, hearing) -> None:
    now = 0.0
    model = ModelInUse(hears, clock=lambda: now)
    assert model.predict(a_sound("tone"))[0][0] == "tone"
    give_model(hears, hearing_task(package, ("buzz", "none of these", "something"), task="later"))
    model.look()
    assert model.about["task"] == "sounds", "it asks every ten seconds"
    now = 10.0
    model.look()
    assert model.about == {"task": "later", "model": "global"}
    assert model.predict(a_sound("tone"))[0][0] == "none of these"


def test_a_model_that_could_not_be_read_is_tried_again(hears, monkeypatch, caplog) -> None:
    now = 0.0

    def refuses(store: object) -> None:
        raise StoreError("the store is not readable")

    with monkeypatch.context() as patched:
        patched.setattr("hushfleet.edge_client.listen.model_in_use.personalized_model", refuses)
        model = ModelInUse(hears, clock=lambda: now)
        now = 10.0
        model.look()
    assert (model.about, caplog.text.count("not readable")) == ({}, 1)
    now = 20.0
    model.look()
    assert model.about["task"] == "sounds"


def test_a_segment_of_which_no_features_can_be_made_ends_nothing(hears, monkeypatch, caplog) -> None:
    model = ModelInUse(hears)

    def refuses(*_: object) -> None:
        raise GraphRefused("the graph makes features that are not finite numbers")

    with monkeypatch.context() as patched:
        patched.setattr("hushfleet.edge_client.listen.model_in_use.outputs_of", refuses)
        assert [model.predict(a_sound("tone")) for _ in range(3)] == [(), (), ()]
        patched.setattr("hushfleet.edge_client.listen.model_in_use.outputs_of", lambda *_: np.full((1, 3), np.nan))
        assert model.predict(a_sound("tone")) == ()
    assert caplog.text.count("not finite numbers") == 1
    assert model.predict(a_sound("tone"))[0][0] == "tone"


def test_a_gap_is_in_no_segment(hears) -> None:
    model = ModelInUse(hears)
    listener = SegmentListener(model.form, hears.listen, model, KeptClips(hears), threading.Event())
    half = a_sound("tone")[: LENGTH // 2]
    pieces = [half, None, half, None, half[:9], np.concatenate((a_sound("tone")[9:], half)), half[::-1]]
    found = [heard for pcm in pieces for heard in listener.hear(pcm, at=0.0)]
    assert [heard.from_s for heard in found] == [LENGTH / RATE, 2 * LENGTH / RATE]
    assert found[0].alarm == "tone"


def test_a_loud_sound_before_a_gap_is_kept_once(hears) -> None:
    hears = replace(hears, listen=replace(hears.listen, keep="loud"))
    model = ModelInUse(hears)
    listener = SegmentListener(model.form, hears.listen, model, KeptClips(hears), threading.Event())
    half = a_sound("tone")[: LENGTH // 2]
    found = [heard for pcm in (a_sound("tone"), half, None, half, None, None) for heard in listener.hear(pcm, at=0.0)]
    assert [bool(heard.classes) for heard in found] == [True, False]
    [file] = found[1].kept
    assert len(frames_of(file)) == LENGTH


@pytest.mark.parametrize(("classes", "warnings"), [(("buzz", "tone"), 1), (CLASSES, 0)])
def test_that_a_task_has_no_class_of_other_sounds_is_said_once(
    hears, package, device_toml: Path, tmp_path: Path, capsys, caplog, classes: tuple[str, ...], warnings: int
) -> None:
    give_model(hears, hearing_task(package, classes, task="two"))
    heard(device_toml, a_clip(tmp_path / "a.wav", "quiet", "tone", "quiet"), capsys)
    assert caplog.text.count("the task two has no class 'none of these'") == warnings


def test_a_board_of_images_does_not_listen(device_toml: Path, capsys) -> None:
    device_toml.write_text(device_toml.read_text().replace('"sound"', '"folder"'))
    assert main(["listen", str(device_toml)]) == 2
    assert "data.kind = 'folder': to listen needs kind = 'sound'" in capsys.readouterr().err


def test_a_rule_needs_an_inbox(device_toml: Path, capsys) -> None:
    device_toml.write_text(device_toml.read_text().replace('inbox = "inbox"', ""))
    with_rule(device_toml, "keep_alarms = 1")
    assert main(["listen", str(device_toml)]) == 2
    assert 'write inbox = "/path/to/inbox" into [data]' in capsys.readouterr().err


@given(st.data())
def test_a_stream_has_the_segments_of_the_whole(data: st.DataObject) -> None:
    length, hop = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 20))
    pcm = np.arange(1, data.draw(st.integers(1, 100)) + 1, dtype=np.int16)
    whole = segments_of(pcm, length, hop)
    padded = np.concatenate((pcm, np.zeros(hop + length, np.int16)))[: (len(whole) - 1) * hop + length]
    recent, found = RecentSound(length, hop), list[np.ndarray]()
    while len(padded):
        piece = data.draw(st.integers(1, 40))
        found += recent.add(padded[:piece])
        padded = padded[piece:]
    assert np.array_equal(found, whole)


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 99))
def test_the_loudest_place_is_among_the_last_frames(length: int, more: int, seed: int) -> None:
    pcm = np.random.default_rng(seed).integers(-30000, 30000, length + more).astype(np.int16)
    recent = RecentSound(length, length)
    list(recent.add(pcm))
    last = pcm[-SEGMENTS * length :]
    hop = max(1, length // 16)
    starts = range((len(last) - length) % hop, len(last) - length + 1, hop)
    best = max(np.square(last[n : n + length], dtype=np.int64).sum() for n in starts)
    assert np.square(recent.loudest(len(pcm)), dtype=np.int64).sum() == best
