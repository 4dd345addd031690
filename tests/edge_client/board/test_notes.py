"""What a client waits for, in its note and in its log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import SILENT_S, WaitingNote, advice_on_silence, read_waiting
from hushfleet.edge_client.status import format_status, status
from hushfleet.edge_client.storage.state_files import WAITING
from hushfleet.wire.format.messages import NotEnrolled, ServerState
from support.edge import DEVICE, Bench, Clock

MakeBench = Callable[..., Bench]


def test_the_note_is_written_when_it_changes(tmp_path: Path) -> None:
    clock = Clock()
    note = WaitingNote(tmp_path / WAITING, {}, clock=clock)
    assert read_waiting(tmp_path) is None
    note.is_("broker", "the broker: refused")
    first = read_waiting(tmp_path)
    assert first is not None
    (tmp_path / WAITING).unlink()
    clock.now += 100
    note.is_("broker", "the broker: refused")
    assert read_waiting(tmp_path) is None, "nothing is written again"
    note.is_("broker", "the broker: timed out")
    again = read_waiting(tmp_path)
    assert again is not None
    assert again.since == pytest.approx(first.since - 100, abs=5), "it is the same wait"
    (tmp_path / WAITING).write_text(json.dumps({"kind": "broker"}))
    assert read_waiting(tmp_path) is None


def test_a_lasting_silence_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    note = WaitingNote(None, advice_on_silence("board-1", "field"), clock=clock)
    for kind, seconds, count in (
        ("aggregator", 0, 0),
        ("aggregator", SILENT_S - 1, 0),
        ("aggregator", 2, 1),
        ("aggregator", 1000, 1),
        ("round", 0, 1),
        ("aggregator", 0, 1),
        ("aggregator", SILENT_S, 2),
    ):
        clock.now += seconds
        note.is_(kind, "words")  # type: ignore[arg-type]
        assert len(caplog.records) == count
    assert "its access list knows this connection by another name than board-1" in caplog.text


def test_an_agent_says_for_whom_it_waits(
    make_bench: MakeBench, config: DeviceConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hushfleet.edge")
    bench = make_bench(config=replace(config, simulation=None), announce=False)
    folder = config.store_path.parent

    def words() -> str:
        waiting = read_waiting(folder)
        assert waiting is not None
        return f"{waiting.kind}: {waiting.words}"

    bench.steps(3)
    assert words() == "aggregator: an aggregator: none was heard of in the federation test"
    bench.clock.now += SILENT_S + 1
    bench.steps(3)
    assert "connected, and nothing has come from an aggregator" in caplog.text
    bench.server.knows = False
    bench.server.announce()
    bench.steps()
    assert words() == "answer: the aggregator, which has not answered yet"
    key = bench.store.identity.public_key
    bench.server.send(bench.server.topics.down(DEVICE), NotEnrolled(DEVICE, key, "its operator must add it"))
    bench.steps()
    assert words() == "operator: its operator must add it"
    bench.server.knows = True
    bench.clock.now += 1000
    bench.steps()
    assert words() == "round: a round"
    bench.train(1)
    bench.steps(3)
    assert words() == "round: round 1 of 5 of digits-test"
    server = bench.server
    server.open_round(1, phase="closed")
    bench.steps(3)
    caplog.clear()
    server.send(server.topics.server, ServerState(server.epoch, "lost", server.identity.public_key), retain=True)
    bench.steps(3)
    assert words() == "away: the aggregator, which is away"
    bench.clock.now += SILENT_S + 1
    bench.steps(2)
    server.open_round(5, phase="finished")
    bench.until(lambda: words() == "round: the next task; the last one has ended")
    for _ in range(3):
        bench.clock.now += SILENT_S + 1
        bench.steps(2)
    assert words() == "round: the next task; the last one has ended"
    assert not caplog.records, "an aggregator that has ended its task is not missed"
    bench.hub.cut(DEVICE)
    bench.steps(1)
    assert words().startswith("broker: the broker mqtt://localhost: ")
    report = status(bench.config, bench.store)
    assert report["running"] is True
    assert report["waits_for"]["who"] == "broker"
    assert any(line.startswith("client      waiting for the broker mqtt://localhost") for line in format_status(report))


def test_status_says_how_right_the_personalized_model_is_on_held_out_images(
    make_bench: MakeBench, config: DeviceConfig
) -> None:
    bench = make_bench()
    assert status(bench.config, bench.store)["model"] is None
    bench.train(1)
    model = status(bench.config, bench.store)["model"]
    assert (model["model"], model["right"]) == ("personalised", None)
    held_out = replace(bench.config, data=replace(config.data, held_out=config.data.path))
    model = status(held_out, bench.store)["model"]
    own = bench.store.load_state("digits-test")
    assert own is not None
    task = bench.loaded
    samples = task.data.samples()
    right = int((task.inference(own.own, samples.x).argmax(axis=1) == samples.y).sum())
    assert (model["right"], model["images"], model["which"]) == (right, len(samples), "held-out samples")
    away = replace(bench.config, data=replace(config.data, held_out="/media/stick/held-out"))
    report = status(away, bench.store)
    assert report["epsilon_server"] > 0, "what was spent is told, though the disk with these images was taken out"
    assert any("cannot be measured: /media/stick/held-out cannot be read" in line for line in format_status(report))
