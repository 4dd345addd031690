"""The report's timeline: what is drawn adds up to what happened, stays small, and says in words what it left out."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest

from hushfleet.aggregator.observe.timeline import make_timeline
from hushfleet.aggregator.results.report import render_report
from hushfleet.aggregator.results.report.timeline_axes import LEFT, RIGHT, WIDE, time_unit
from hushfleet.aggregator.results.report.timeline_gantt import MOST_BARS, gantt, rows_by_board
from hushfleet.aggregator.results.report.timeline_matrix import MOST_ROWS, accepted_share, matrix, matrix_rows
from hushfleet.aggregator.results.report.timeline_section import (
    in_words,
    is_long_away,
    mean_round,
    timeline_section,
    worst_round,
)
from hushfleet.aggregator.results.report.timeline_stacks import states_over_rounds, states_over_time
from hushfleet.aggregator.results.report.timeline_style import OUTCOME_STATES, WORDS
from hushfleet.aggregator.results.result import DEVICE_STATES, OUTCOMES, FleetRound, FleetTimeline, Result, TimelineMark
from support import timeline_samples
from support.report_samples import sample

samples = vars(timeline_samples)
SPAN = (WIDE - RIGHT) - LEFT


@cache
def made(devices: int, rounds: int, **more: Any) -> tuple[FleetTimeline, dict[str, str]]:
    """A timeline and the boards of its devices."""
    events, scenario = samples["fleet_log"](devices, rounds, **more)
    timeline = make_timeline(events, scenario=scenario)
    assert timeline is not None
    return timeline, {event["device"]: event["board"] for event in events if event["event"] == "presence"}


def plain(outcomes: list[str], *, timed: bool = False, rounds: int | None = None) -> FleetTimeline:
    """Outcomes only: rounds of one second each."""
    count = len(outcomes[0]) if rounds is None else rounds
    return FleetTimeline(
        timed=timed,
        end_s=float(count),
        devices=[f"device-{n:05d}" for n in range(len(outcomes))],
        rounds=[FleetRound(round=n + 1, opened_s=n, closed_s=n + 0.9) for n in range(count)],
        outcomes=outcomes,
    )


def with_timeline(timeline: FleetTimeline | None, boards: dict[str, str] | None = None) -> Result:
    result = sample(2, 3)
    details = result.details.model_copy(update={"fleet_timeline": timeline})
    return result.model_copy(update={"details": details, "boards": boards or {}})


def section_of(timeline: FleetTimeline, boards: dict[str, str] | None = None) -> str:
    section = timeline_section(with_timeline(timeline, boards))
    assert section is not None
    return section.lead + section.body


def charts(html: str) -> list[ElementTree.Element]:
    """Every SVG, parsed: so it is well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def rects(chart: ElementTree.Element, css: str) -> list[ElementTree.Element]:
    return [rect for rect in chart.iter("rect") if rect.get("class") == css]


def test_a_small_fleet_is_a_gantt_chart_and_a_large_one_or_a_long_run_a_matrix() -> None:
    small, boards = made(8, 6, outage_round=3)
    body = section_of(small, boards)
    assert "What each device did" in body
    assert "What came of each round" not in body
    for device in small.devices:
        assert device in body
    for board in samples["BOARDS"]:
        assert board in body
    long = section_of(*made(8, 60))
    assert "What came of each round" in long
    assert "around the worst of the run" in long
    large = section_of(*made(60, 8))
    assert "What came of each round" in large
    assert "What each device did" not in large


def test_bars_are_as_long_as_their_states_lasted() -> None:
    timeline, boards = made(30, 6, outage_round=3)
    rows = rows_by_board(timeline, boards)
    svg, merged = gantt(timeline, rows, start_s=0.0, end_s=timeline.end_s, label="all")
    (chart,) = charts(svg)
    tips = [tip.text or "" for tip in chart.iter("title")]
    per_second = SPAN / timeline.end_s
    late = sum(letters.count("l") for letters in timeline.outcomes)
    assert sum("late in round" in tip for tip in tips) == late > 0
    for state in DEVICE_STATES:
        lasted = sum(end - start for spans in timeline.spans for start, end, own in spans if own == state)
        drawn = [r for r in rects(chart, f"sf s-{state}") if "late in round" not in (r.findtext("title") or "")]
        width = sum(float(rect.get("width", 0)) for rect in drawn) / per_second
        if state == "absent":
            assert not drawn
        else:
            assert width == pytest.approx(lasted, abs=0.1 * len(drawn) / per_second + merged / per_second), state
    assert any("device-000, round 1: training" in tip for tip in tips)


def test_a_part_of_the_run_is_drawn_to_its_edges() -> None:
    timeline, boards = made(8, 60)
    first, last = timeline.rounds[20].opened_s, timeline.rounds[24].opened_s
    svg, _ = gantt(timeline, rows_by_board(timeline, boards), start_s=first, end_s=last, label="some")
    (chart,) = charts(svg)
    bars = [rect for rect in chart.iter("rect") if (rect.get("class") or "").startswith("sf")]
    assert min(float(bar.get("x", 0)) for bar in bars) == pytest.approx(LEFT, abs=0.1)
    ends = [float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars]
    assert max(ends) == pytest.approx(WIDE - RIGHT, abs=0.2)
    numbers = [text.text for text in chart.iter("text")]
    assert [number for number in numbers if number in ("20", "21", "22", "23", "24", "25")] == ["21", "22", "23", "24"]


def test_many_short_spans_become_few_bars_and_that_is_said() -> None:
    spans = [(n / 100, (n + 1) / 100, "training" if n % 3 else "sending") for n in range(3_000)]
    timeline = plain(["a" * 3] * 40, timed=True).model_copy(
        update={"end_s": 30.0, "spans": [spans] * 40, "seconds": [{"training": 20.0, "sending": 10.0}] * 40}
    )
    svg, merged = gantt(timeline, rows_by_board(timeline, {}), start_s=0.0, end_s=30.0, label="dense")
    (chart,) = charts(svg)
    assert len(list(chart.iter("rect"))) <= MOST_BARS
    assert merged == 40 * 3_000
    assert "120,000 spans too short to be drawn" in section_of(timeline)
    assert {rect.get("class") for rect in chart.iter("rect")} == {"sf s-training"}, "two thirds of the time"


def test_crashes_are_columns_and_what_the_scenario_did_to_a_device_is_a_mark_in_its_row() -> None:
    timeline, boards = made(8, 6, outage_round=3, away=0.2)
    assert {mark.target for mark in timeline.marks} > {"broker"}
    (chart, *_) = charts(section_of(timeline, boards))
    (column,) = rects(chart, "down")
    crash = next(mark for mark in timeline.marks if mark.target == "broker")
    lasted = (crash.end_s - crash.start_s) * SPAN / timeline.end_s
    assert float(column.get("width", 0)) == pytest.approx(lasted, abs=0.1)
    assert "broker: crash" in (column.findtext("title") or "")
    triangles = [p for p in chart.iter("polygon") if p.get("class") == "event"]
    assert len(triangles) == len(timeline.marks) - 1
    assert len([line for line in chart.iter("line") if line.get("class") == "undone"]) == len(triangles)
    assert all("power cut" in (triangle.findtext("title") or "") for triangle in triangles)


@pytest.mark.parametrize(("devices", "rounds"), [(12, 30), (90, 25)])
def test_the_strokes_of_the_matrix_are_the_outcomes(devices: int, rounds: int) -> None:
    timeline, boards = made(devices, rounds, away=0.05)
    drawn = matrix(timeline, boards, label="matrix")
    (chart,) = charts(drawn.svg)
    counts = Counter("".join(timeline.outcomes))
    ground = counts.most_common(1)[0][0]
    seen = {}
    for path in chart.iter("path"):
        css = path.get("class") or ""
        letter = "-" if css == "hole" else next(k for k, (s, _) in OUTCOME_STATES.items() if css == f"ss s-{s}")
        seen[letter] = sum(int(part) for part in re.findall(r"h([0-9]+)", path.get("d") or ""))
    assert seen.keys() == counts.keys() - {ground}
    for letter, cells in seen.items():
        assert cells == counts[letter], letter
    grounds = rects(chart, f"sf s-{OUTCOME_STATES[ground][0]}")
    assert len(grounds) == 4, "one for each board"


def test_crashes_are_marked_above_the_round_in_which_they_were() -> None:
    timeline, boards = made(60, 8, outage_round=5)
    (chart,) = charts(matrix(timeline, boards, label="matrix").svg)
    (triangle,) = [p for p in chart.iter("polygon") if p.get("class") == "event"]
    assert "broker: crash" in (triangle.findtext("title") or "")
    x = float((triangle.get("points") or "").split(",")[0])
    assert (x - LEFT) / (SPAN / 8) == pytest.approx(4.5, abs=0.01), "in the middle of the fifth of eight columns"
    assert "Triangles above" in section_of(timeline, boards)


def test_the_last_column_of_a_long_run_is_as_narrow_as_its_rounds() -> None:
    drawn = matrix(plain(["a" * 398 + "lll", "a" * 401]), {}, label="odd")
    assert drawn.rounds_a_column == 3
    (path,) = [path.get("d") for path in charts(drawn.svg)[0].iter("path")]
    assert path is not None
    assert path.endswith("h2"), "133 columns of 3 rounds, and one of 2"


def test_rows_are_by_board_and_by_how_often_their_updates_came() -> None:
    timeline = plain(["la", "aa", "--", ".."])
    rows = matrix_rows(timeline, dict(zip(timeline.devices, "bbaa", strict=True)))
    assert [(row.board, row.index, row.share) for row in rows] == [
        ("a", 3, 1.0), ("a", 2, 0.0), ("b", 1, 1.0), ("b", 0, 0.5),
    ]  # fmt: skip
    assert accepted_share("aald-.") == 0.4


def test_a_huge_fleet_and_a_long_run_stay_small_and_no_board_vanishes() -> None:
    devices, rounds = 10_000, 1_000
    letters = ["al" * (rounds // 2), "a" * rounds, "x-" * (rounds // 2), "aaad" * (rounds // 4)]
    timeline = plain([letters[n % 4] for n in range(devices)])
    boards = dict.fromkeys(timeline.devices, "common")
    boards[timeline.devices[77]] = "rare"
    drawn = matrix(timeline, boards, label="huge")
    (chart,) = charts(drawn.svg)
    assert len(drawn.svg) < 450_000
    assert len(rects(chart, "hit")) <= MOST_ROWS + 1
    assert (drawn.rounds_a_column, drawn.devices_a_row) == (5, 20)
    names = [text.text for text in chart.iter("text")]
    assert "common (9,999)" in names
    assert "rare (1)" in names
    body = section_of(timeline, boards)
    assert "A cell is 5 rounds" in body
    assert "Of 10,000 devices in this order, one in 20 is drawn." in body


def test_a_cell_of_several_rounds_has_the_commonest_outcome_and_of_two_the_worse() -> None:
    drawn = matrix(plain(["aal" * 67 + "aaa" * 67, "xxa" * 67 + "aaa" * 67]), {}, label="binned")
    assert (drawn.rounds_a_column, drawn.letters) == (3, "ax")
    tie = matrix(plain(["al" * 150 + "aa" * 50]), {}, label="tie")
    assert (tie.rounds_a_column, tie.letters) == (2, "al")


def stack_heights(svg: str, *, height: float) -> dict[str, list[float]]:
    """How high each state's area is in each step, as a share of the chart's height."""
    (chart,) = charts(svg)
    found = {}
    for path in chart.iter("path"):
        numbers = [float(n) for n in re.findall(r"[0-9.]+", path.get("d") or "")]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        there, back = points[: len(points) // 2], points[len(points) // 2 :][::-1]
        assert [x for x, _ in there] == [x for x, _ in back] == sorted(x for x, _ in there), "no area crosses itself"
        state = (path.get("class") or "").removeprefix("sf s-")
        found[state] = [(low[1] - high[1]) / height for high, low in zip(there[::2], back[::2], strict=True)]
    return found


def test_stacks_over_rounds_and_over_time_show_the_share_of_the_devices() -> None:
    rounds = [
        FleetRound(round=1, opened_s=0.0, closed_s=9.0, device_seconds={"training": 30.0, "lost": 10.0}),
        FleetRound(round=2, opened_s=10.0, closed_s=19.0, device_seconds={"training": 10.0, "accepted": 30.0}),
    ]
    timeline = plain(["aa"] * 4, timed=True).model_copy(
        update={
            "end_s": 20.0,
            "rounds": rounds,
            "spans": [[(0.0, 10.05, "training"), (10.05, 20.0, "accepted")]] * 3
            + [[(0.0, 10.05, "lost"), (10.05, 20.0, "training")]],
        }
    )
    svg, binned = states_over_rounds(timeline, label="rounds")
    assert binned == 1
    by_round = stack_heights(svg, height=204.0)
    assert {state: [round(h, 2) for h in heights] for state, heights in by_round.items()} == {
        "training": [0.75, 0.25], "accepted": [0.0, 0.75], "lost": [0.25, 0.0],
    }  # fmt: skip
    by_time = stack_heights(states_over_time(timeline, label="time"), height=204.0)
    for state, heights in by_time.items():
        assert len(heights) == 200
        first, second = by_round[state]
        assert heights[50] == pytest.approx(first, abs=0.01)
        assert heights[150] == pytest.approx(second, abs=0.01)
        assert heights[100] == pytest.approx((first + second) / 2, abs=0.01), (
            "a step of 0.1 s, half before and half after"
        )


def test_steps_of_a_long_run_hold_several_rounds() -> None:
    rounds = [
        FleetRound(round=n + 1, opened_s=n, closed_s=n, device_seconds={"training": 1.0 + n % 2, "lost": 1.0 - n % 2})
        for n in range(400)
    ]
    svg, binned = states_over_rounds(plain(["a" * 400] * 2).model_copy(update={"rounds": rounds}), label="long")
    assert binned == 2
    assert stack_heights(svg, height=204.0)["training"] == pytest.approx([0.75] * 200, abs=0.01)


def test_the_time_of_a_round_by_board() -> None:
    timeline = plain(["aa", "aa", "aa"], timed=True).model_copy(
        update={"seconds": [{"training": 8.0}, {"training": 4.0, "lost": 4.0}, {"sending": 2.0, "training": 6.0}]}
    )
    assert mean_round(timeline, [0, 1])["training"] == 3.0
    boards = dict(zip(timeline.devices, ("fast-board", "fast-board", "slow-board"), strict=True))
    body = section_of(timeline, boards)
    assert "fast-board (2): training 3 s of a mean round (75 %)" in body
    assert "fast-board (2): lost 1 s of a mean round (25 %)" in body
    assert "slow-board (1): sending 1 s of a mean round (25 %)" in body
    assert "all devices (3): training 3 s of a mean round (75 %)" in body


def test_in_words() -> None:
    timeline = plain(["aala", "ax-a", "d..r", "----"], timed=True)
    assert in_words(timeline) == (
        "Of 9 updates that were asked for, 1 came too late, 1 was declined, 1 was refused and 1 was lost with its "
        "device; 1 device was away for more than a round."
    )
    assert in_words(plain(["aa", "aa"])) == "All 4 updates that were asked for came in time."
    paced = [
        row.model_copy(update={"median_s": 2.0, "slowest_tenth_s": slow})
        for row, slow in zip(timeline.rounds, (4.0, 6.0, 8.0, 40.0), strict=True)
    ]
    told = in_words(timeline.model_copy(update={"rounds": paced}))
    assert told.startswith(
        "In the median round the slowest device needed 3 times as long as the median device (6 s against 2 s). Of 9 "
    )
    assert worst_round(plain(["aala", "axla"])) == 2
    longer = plain(["aala", "alaa"])
    slow = longer.rounds[1].model_copy(update={"closed_s": 9.0})
    assert worst_round(longer.model_copy(update={"rounds": [longer.rounds[0], slow, *longer.rounds[2:]]})) == 1
    away = ("aa", "--aa", "ax", "axa", "a-a", "..x-", "ax-", "a--a", "-x-")
    assert [letters for letters in away if is_long_away(letters)] == ["..x-", "ax-", "a--a", "-x-"]


def test_where_nothing_is_to_be_seen_there_is_no_section() -> None:
    assert timeline_section(with_timeline(None)) is None
    assert timeline_section(with_timeline(plain(["aaa", "aaa"]))) is None
    assert 'id="timeline"' not in render_report(with_timeline(plain(["aaa"])))
    body = section_of(plain(["aa.", "a.a"]))
    assert "What came of each round" in body
    assert len(charts(body)) == 1, "without times, the matrix only"


def test_the_whole_report_still_needs_nothing_from_outside() -> None:
    timeline, _ = made(8, 6, outage_round=3)
    evil = "<script>alert(1)</script>"
    marks = [*timeline.marks, TimelineMark(start_s=1.0, end_s=2.0, what=evil, target=evil)]
    timeline = timeline.model_copy(update={"marks": marks, "devices": [evil, *timeline.devices[1:]]})
    html = render_report(with_timeline(timeline, dict.fromkeys(timeline.devices, evil)))
    assert '<section id="timeline">' in html
    assert not re.search(r"<script|url\(|://|@import|<img", html)
    charts(html)
    for state in WORDS:
        assert f".s-{state} {{" in html
        assert html.count(f"--s-{state}:") == 3, "light, dark and paper"


def test_every_state_and_outcome_has_words_and_a_colour() -> None:
    assert tuple(WORDS) == DEVICE_STATES
    assert OUTCOME_STATES.keys() == OUTCOMES.keys()
    assert {state for state, _ in OUTCOME_STATES.values()} <= set(WORDS)


def test_long_runs_count_in_minutes_or_hours() -> None:
    assert [time_unit(seconds).name for seconds in (600, 601, 3 * 3600, 3 * 3600 + 1)] == [
        "seconds", "minutes", "minutes", "hours",
    ]  # fmt: skip
