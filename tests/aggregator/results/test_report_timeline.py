"""The report's timeline: what is drawn adds up to what happened, stays small, and says in words what it left out."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.fleet_timeline import ACTIVITIES, OUTCOMES, FleetRound, FleetTimeline, TimelineMark
from hushfleet.aggregator.results.report import render_report
from hushfleet.aggregator.results.report.page import Plot, Section, plotly_script
from hushfleet.aggregator.results.report.timeline import (
    MOST_BARS,
    MOST_ROWS,
    WORDS,
    accepted_share,
    binned_letters,
    gantt,
    matrix,
    mean_round,
    rows_by_board,
    time_by_board,
    time_unit,
    timeline_section,
)
from hushfleet.aggregator.results.report.timeline_text import (
    OUTCOME_STATES,
    describe_timeline,
    describe_worst,
    is_long_away,
    worst_round,
)
from hushfleet.aggregator.results.result import Result
from hushfleet.aggregator.results.timeline import make_timeline
from support import timeline_samples
from support.report_samples import sample
from support.tools import find

samples = vars(timeline_samples)


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


def section_of(timeline: FleetTimeline, boards: dict[str, str] | None = None) -> Section:
    section = timeline_section(with_timeline(timeline, boards))
    assert section is not None
    return section


def titles(timeline: FleetTimeline, boards: dict[str, str] | None = None) -> list[str]:
    return [part.title for part in section_of(timeline, boards).parts if isinstance(part, Plot)]


def bars(plot: Plot) -> dict[str, Any]:
    return {trace.name: trace for trace in plot.figure.data if trace.type == "bar"}


DID, CAME, WHERE = (
    "What each device did",
    "What came of each round, device by device",
    "Where the time of a round goes",
)


def test_a_small_fleet_is_a_gantt_chart_and_a_large_one_or_a_long_run_a_matrix() -> None:
    small, boards = made(8, 6, outage_round=3)
    assert titles(small, boards) == [DID, WHERE]
    axis = gantt(small, boards).figure.layout
    assert set(axis.yaxis.ticktext) == {*small.devices, "round", "broker"}
    assert {words.text.rpartition(" ")[0] for words in axis.annotations} == set(samples["BOARDS"])
    assert titles(*made(8, 60)) == [CAME, DID, WHERE]
    assert "around the worst of the run" in gantt(*made(8, 60)).note
    assert titles(*made(60, 8)) == [CAME, WHERE]


def test_bars_are_as_long_as_their_states_lasted() -> None:
    timeline, boards = made(30, 6, outage_round=3)
    drawn = bars(gantt(timeline, boards))
    for state in ACTIVITIES:
        lasted = sum(end - start for spans in timeline.spans for start, end, own in spans if own == state)
        if state == "absent" or not lasted:
            assert WORDS[state] not in drawn
        else:
            assert sum(drawn[WORDS[state]].x) == pytest.approx(lasted), state
            assert drawn[WORDS[state]].marker.color == f"var(--{state})"
    late = drawn["its round closed without it"]
    assert len(late.x) == sum(letters.count("l") for letters in timeline.outcomes) > 0
    (place,) = [n for n, tip in enumerate(drawn["training"].hovertext) if "device-000, round 1: training" in tip]
    begin, end, _ = next(span for span in timeline.spans[0] if span[2] == "training")
    assert drawn["training"].base[place] == begin
    assert drawn["training"].x[place] == pytest.approx(end - begin)
    rows = rows_by_board(timeline, boards).devices
    assert rows[drawn["training"].y[place]] == 0


def test_a_long_run_opens_at_its_worst_rounds() -> None:
    timeline, boards = made(8, 60)
    first = max(0, worst_round(timeline) - 4)
    left, right = gantt(timeline, boards).figure.layout.xaxis.range
    start_s, end_s = timeline.rounds[first].opened_s, timeline.rounds[first + 8].opened_s
    assert (left, right) == pytest.approx((start_s, end_s), abs=0.011 * (end_s - start_s))
    assert (left < start_s, right > end_s) == (True, True)


def test_many_spans_are_few_bars_and_that_is_said() -> None:
    spans = [(n / 100, (n + 1 - n % 2 / 2) / 100, "training" if n % 2 else "sending") for n in range(300)]
    timeline = plain(["a" * 3] * 40, timed=True).model_copy(
        update={"end_s": 3.0, "spans": [spans] * 40, "seconds": [{"training": 2.0, "sending": 1.0}] * 40}
    )
    plot = gantt(timeline, {})
    drawn = bars(plot)
    assert sum(len(trace.x) for trace in drawn.values()) == MOST_BARS
    assert len(drawn["sending"].x) > 4_900, "the longest ones"
    assert "the longest of the 12,000 bars" in plot.note


def test_crashes_are_columns_and_what_the_scenario_did_to_a_device_is_a_mark_in_its_row() -> None:
    timeline, boards = made(8, 6, outage_round=3, away=0.2)
    assert {mark.target for mark in timeline.marks} > {"broker"}
    figure = gantt(timeline, boards).figure
    (column,) = figure.layout.shapes
    crash = next(mark for mark in timeline.marks if mark.target == "broker")
    assert (column.x0, column.x1) == (crash.start_s, crash.end_s)
    (triangles,) = [trace for trace in figure.data if trace.name == "cut off or switched"]
    rows = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    drawn = [(x, rows[y]) for x, y in zip(triangles.x, triangles.y, strict=True)]
    assert drawn == [(mark.start_s, mark.target) for mark in timeline.marks]
    tips = dict(zip((mark.target for mark in timeline.marks), triangles.hovertext, strict=True))
    assert tips.pop("broker").startswith("broker: crash at ")
    assert all("power cut" in tip for tip in tips.values())


@pytest.mark.parametrize(("devices", "rounds"), [(12, 30), (90, 25)])
def test_the_cells_of_the_matrix_are_the_outcomes(devices: int, rounds: int) -> None:
    timeline, boards = made(devices, rounds, away=0.05)
    heat, *rest = matrix(timeline, boards).figure.data
    letter_of = {words: letter for letter, (_, words) in OUTCOME_STATES.items()}
    rows = ["".join(letter_of[words] for words in line) for line in heat.text if line[0] is not None]
    assert Counter(rows) == Counter(timeline.outcomes)
    legend = [trace.name for trace in rest if trace.marker.symbol == "square"]
    assert {letter_of[words] for words in legend} == set("".join(timeline.outcomes))
    for line, words in zip(heat.z, heat.text, strict=True):
        assert all(word is None or legend[value] == word for value, word in zip(line, words, strict=True))
    colors = [color for _, color in heat.colorscale[::2]]
    assert colors == [f"var(--{OUTCOME_STATES[letter_of[words]][0]})" for words in legend]
    heads = matrix(timeline, boards).figure.layout.annotations
    assert len(heads) == 4, "one for each board"


def test_crashes_are_marked_above_the_round_in_which_they_were() -> None:
    timeline, boards = made(60, 8, outage_round=5)
    figure = matrix(timeline, boards).figure
    (triangle,) = [trace for trace in figure.data if trace.name == "cut off or switched"]
    assert list(triangle.x) == [5]
    assert "broker: crash" in triangle.hovertext[0]
    assert "broker" in [words.text for words in figure.layout.annotations]


def test_the_last_column_of_a_long_run_is_as_narrow_as_its_rounds() -> None:
    heat = matrix(plain(["a" * 398 + "lll", "a" * 401]), {}).figure.data[0]
    assert len(heat.z[0]) == 134
    assert list(heat.x[-3:]) == [396.5, 399.5, 401.5], "133 columns of 3 rounds, and one of 2"


def test_rows_are_by_board_and_by_how_often_their_updates_came() -> None:
    timeline = plain(["la", "aa", "--", ".."])
    boards = dict(zip(timeline.devices, "bbaa", strict=True))
    tips = [list(line) for line in matrix(timeline, boards).figure.data[0].text if line[0]]
    assert tips == [["not asked"] * 2, ["away"] * 2, ["accepted"] * 2, ["late", "accepted"]]
    assert rows_by_board(timeline, boards).devices == [None, 2, 3, None, 0, 1]
    assert accepted_share("aald-.") == 0.4


def test_a_huge_fleet_and_a_long_run_stay_small_and_no_board_vanishes() -> None:
    devices, rounds = 10_000, 1_000
    letters = ["al" * (rounds // 2), "a" * rounds, "x-" * (rounds // 2), "aaad" * (rounds // 4)]
    timeline = plain([letters[n % 4] for n in range(devices)])
    boards = dict.fromkeys(timeline.devices, "common")
    boards[timeline.devices[77]] = "rare"
    plot = matrix(timeline, boards)
    assert len(plot.json()) < 2_500_000
    assert sum(line[0] is not None for line in plot.figure.data[0].z) <= MOST_ROWS + 1
    names = [words.text for words in plot.figure.layout.annotations]
    assert names == ["common (9,999)", "rare (1)"]
    assert "A cell is 5 rounds" in plot.note
    assert "Of 10,000 devices in this order, one in 20 is drawn." in plot.note


def test_a_cell_of_several_rounds_has_the_commonest_outcome_and_of_two_the_worse() -> None:
    assert binned_letters("aalxxaa", 3) == "axa"
    assert binned_letters("alaa", 2) == "la"
    assert binned_letters("alx", 1) == "alx"


def test_the_time_of_a_round_by_board() -> None:
    timeline = plain(["aa", "aa", "aa"], timed=True).model_copy(
        update={"seconds": [{"training": 8.0}, {"training": 4.0, "lost": 4.0}, {"sending": 2.0, "training": 6.0}]}
    )
    assert mean_round(timeline, [0, 1])["training"] == 3.0
    plot = time_by_board(timeline, dict(zip(timeline.devices, ("fast-board", "fast-board", "slow-board"), strict=True)))
    assert plot.figure.layout.yaxis.ticktext == ("all devices (3)", "fast-board (2)", "slow-board (1)")
    assert {name: list(trace.x) for name, trace in bars(plot).items()} == {
        "training": [3.0, 3.0, 3.0],
        "sending": [pytest.approx(1 / 3), 0.0, 1.0],
        "lost": [pytest.approx(2 / 3), 1.0, 0.0],
    }  # fmt: skip


def test_in_words() -> None:
    timeline = plain(["aala", "ax-a", "d..r", "----"], timed=True)
    assert describe_timeline(timeline) == (
        "Of 9 updates that were asked for, 1 came too late, 1 was declined, 1 was refused and 1 was lost with its "
        "device; 1 device was away for more than a round."
    )
    assert describe_timeline(plain(["aa", "aa"])) == "All 4 updates that were asked for came in time."
    paced = [
        row.model_copy(update={"median_s": 2.0, "slowest_tenth_s": slow})
        for row, slow in zip(timeline.rounds, (4.0, 6.0, 8.0, 40.0), strict=True)
    ]
    told = describe_timeline(timeline.model_copy(update={"rounds": paced}))
    assert told.startswith(
        "In the median round the slowest device needed 3 times as long as the median device (6 s against 2 s). Of 9 "
    )
    assert worst_round(plain(["aala", "axla"])) == 2
    longer = plain(["aala", "alaa"])
    slow = longer.rounds[1].model_copy(update={"closed_s": 9.0})
    assert worst_round(longer.model_copy(update={"rounds": [longer.rounds[0], slow, *longer.rounds[2:]]})) == 1
    away = ("aa", "--aa", "ax", "axa", "a-a", "..x-", "ax-", "a--a", "-x-")
    assert [letters for letters in away if is_long_away(letters)] == ["..x-", "ax-", "a--a", "-x-"]


def test_the_worst_round_is_named_and_why() -> None:
    timeline = plain(["aala", "ax-a", "d..r", "----"], timed=True)
    assert describe_worst(timeline, {}) == "Round 1 went worst: of 3 that were asked, 1 declined."
    declined = plain(["adaa", "ada."])
    told = describe_worst(declined, {"budget": "8.1 of 8"})
    assert told == "Round 2 went worst: of 2 that were asked, 2 declined (reasons in this run: budget)."
    assert describe_worst(plain(["aa", "aa"]), {}) == ""
    assert describe_worst(plain(["aa", "aa"], timed=True), {}).startswith("Round 1 took longest, 0.9 s")
    assert told in section_of_details(declined, decline_reasons={"budget": "8.1 of 8"}).lead


def section_of_details(timeline: FleetTimeline, **details: Any) -> Section:
    result = with_timeline(timeline)
    section = timeline_section(result.model_copy(update={"details": result.details.model_copy(update=details)}))
    assert section is not None
    return section


def test_where_nothing_is_to_be_seen_there_is_no_section() -> None:
    assert timeline_section(with_timeline(None)) is None
    assert timeline_section(with_timeline(plain(["aaa", "aaa"]))) is None
    assert 'id="timeline"' not in render_report(with_timeline(plain(["aaa"])))
    assert titles(plain(["aa.", "a.a"])) == [CAME], "without times, the matrix only"


def test_names_from_outside_are_words_and_no_markup() -> None:
    timeline, _ = made(8, 6, outage_round=3)
    evil = "</script><script>alert(1)</script>"
    marks = [*timeline.marks, TimelineMark(start_s=1.0, end_s=2.0, what=evil, target=evil)]
    timeline = timeline.model_copy(update={"marks": marks, "devices": [evil, *timeline.devices[1:]]})
    html = render_report(with_timeline(timeline, dict.fromkeys(timeline.devices, evil)))
    rest = html.replace(plotly_script(), "")
    assert '<section id="timeline">' in rest
    assert "<script>alert" not in rest
    assert not re.search(r"://|url\(|@import|<img", rest)
    assert all(rest.count(f"--{state}:") == 2 for state in WORDS), "light and dark"


def test_every_state_and_outcome_has_words_and_a_colour() -> None:
    assert tuple(WORDS) == ACTIVITIES
    assert OUTCOME_STATES.keys() == OUTCOMES.keys()
    assert {state for state, _ in OUTCOME_STATES.values()} <= set(WORDS)


def test_long_runs_count_in_minutes_or_hours() -> None:
    assert [time_unit(seconds)[1].split()[0] for seconds in (600, 601, 3 * 3600, 3 * 3600 + 1)] == [
        "seconds", "minutes", "minutes", "hours",
    ]  # fmt: skip
    timeline, boards = made(8, 6, outage_round=3)
    assert sum(bars(gantt(timeline, boards))["training"].x) > 1
    longer = timeline.model_copy(update={"end_s": 7200.0})
    assert gantt(longer, boards).figure.layout.xaxis.range == pytest.approx((-1.2, 121.2))


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_every_chart_is_whole_on_a_telephone(tmp_path: Path) -> None:
    """Those of a long run, too, which were wider than the screen and had to be pushed aside."""
    (tmp_path / "report.html").write_text(render_report(with_timeline(*made(24, 40))), encoding="utf-8")
    words = "--headless --no-sandbox --disable-gpu --window-size=390,900 --virtual-time-budget=10000 --dump-dom"
    done = subprocess.run(
        [find("chromium") or "", *words.split(), f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/report.html"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    widths = [float(width) for width in re.findall(r'<svg class="main-svg"[^>]* width="([\d.]+)"', done.stdout)]
    assert len(widths) > 10
    assert max(widths) < 390
