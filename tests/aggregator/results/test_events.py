"""The event log: standard JSON, whole lines only, and a reader that goes on where it stopped."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.results.events import EventLog, EventTail, iterate_events
from hushfleet.errors import StoreError


def test_events_come_back_in_order_with_their_time_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path, clock=lambda: 12.34567) as log:
        log.write("round_open", round=1, cohort=["a", "b"])
        log.write("finished")
    assert list(iterate_events(path)) == [
        {"at": 12.346, "event": "round_open", "round": 1, "cohort": ["a", "b"]},
        {"at": 12.346, "event": "finished"},
    ]


def test_infinity_is_a_string_in_the_file_and_a_number_to_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        seen = log.write("update", device="inf", epsilon_server=math.inf, clip_norms=[math.inf, 1.0], snr_db=-math.inf)
        log.write("round_close", loss=math.nan)
    lines = path.read_text().splitlines()
    strict = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert strict[0]["epsilon_server"] == "inf"
    assert strict[1]["loss"] is None
    first, second = list(iterate_events(path))
    assert first == seen
    assert first["device"] == "inf"
    assert first["epsilon_server"] == math.inf
    assert first["snr_db"] == -math.inf
    assert first["clip_norms"] == [math.inf, 1.0]
    assert second["loss"] is None


def test_numpy_values_are_written_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("update", round=np.int64(3), shared=np.array([4, 5]), snr_db=np.float32(1.5))
    (event,) = iterate_events(path)
    assert (event["round"], event["shared"], event["snr_db"]) == (3, [4, 5], 1.5)


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = b'{"event":"run"}\n{"event":"round_open","round":1}\n'
    tail = EventTail(path)
    assert tail.read() == []
    seen: list[str] = []
    for stop in range(1, len(whole) + 1):
        path.write_bytes(whole[:stop])
        seen += [event["event"] for event in tail.read()]
        assert len(seen) == whole[:stop].count(b"\n")
    assert seen == ["run", "round_open"]


def test_reopening_after_a_crash_does_not_write_into_the_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"run","at":1}\n{"event":"upda')
    with EventLog(path) as log:
        log.write("finished")
    assert [event["event"] for event in iterate_events(path)] == ["run", "finished"]


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'nonsense\n[1]\n{"round":1}\n\xff\xfe\n' + b"[" * 100_000 + b'\n\n{"event":"run"}\n')
    assert EventTail(path).read() == [{"round": 1}, {"event": "run"}]
    assert list(iterate_events(path)) == [{"event": "run"}]


def test_events_one_by_one_are_those_of_the_whole_log_without_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert list(iterate_events(path)) == []
    with EventLog(path) as log:
        for number in range(5):
            log.write("update", round=number, epsilon_server=math.inf, device="inf")
    path.write_bytes(path.read_bytes() + b'{"event":"finished"}')
    assert list(iterate_events(path)) == EventTail(path).read()
    assert len(list(iterate_events(path))) == 5


@pytest.mark.parametrize("about_bytes", [1, 30, 1000])
def test_a_long_log_is_read_in_pieces(tmp_path: Path, about_bytes: int) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock=lambda: 0.0) as log:
        for number in range(20):
            log.write("update", round=number, cohort=["a"] * number)
    tail, found = EventTail(path), []
    while piece := tail.read(about_bytes):
        assert sum(len(json.dumps(event, separators=(",", ":"))) for event in piece[:-1]) <= about_bytes
        found += piece
    assert found == EventTail(path).read()
    assert len(found) == 20


def test_a_log_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"run","task":"long-name-of-a-first-run"}\n')
    tail = EventTail(path)
    assert len(tail.read()) == 1
    path.write_bytes(b'{"event":"run"}\n')
    assert tail.read() == [{"event": "run"}]
    assert tail.read() == []


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        threads = [
            threading.Thread(target=lambda n=n: [log.write("update", device=f"d{n}", round=r) for r in range(50)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = list(iterate_events(path))
    assert len(events) == path.read_bytes().count(b"\n") == 200
    for n in range(4):
        assert [event["round"] for event in events if event["device"] == f"d{n}"] == list(range(50))


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot be opened"):
        EventLog(tmp_path / "file" / "events.jsonl")
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    with pytest.raises(StoreError, match=r"cannot be written"):
        log.write("finished")


def test_many_events_in_one_line_are_read_one_after_the_other(tmp_path: Path) -> None:
    rows = [{"device": f"d{place}", "bytes": place, "epsilon_server": math.inf, "code": "inf"} for place in range(3)]
    with EventLog(tmp_path / "events.jsonl", clock=lambda: 5.0) as log:
        log.write("run", devices=3)
        log.write_many("update", rows)
        log.write_many("update", [])
    expected = [{"at": 5.0, "event": "update", **row} for row in rows]
    assert list(iterate_events(tmp_path / "events.jsonl"))[1:] == EventTail(log.path).read()[1:] == expected
    assert len(log.path.read_bytes().splitlines()) == 2
