"""The live display: the state behind it, its panel in narrow and wide terminals, plain lines without one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.report.summary import summary_table
from hushfleet.aggregator.results.fleet_state import RunState
from hushfleet.privacy.accountant import Step, epsilon
from support import report_samples

samples = vars(report_samples)
sample, bare = samples["sample"], samples["bare"]


def console(width: int, *, terminal: bool = True, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(file=text, width=width, force_terminal=terminal, color_system=None, legacy_windows=False), raw


def events(devices: int, *, rounds: int = 3, closed: int = 1) -> list[dict[str, Any]]:
    """A run that has closed `closed` rounds and stands in the middle of the next."""
    ids = [f"pi-{n:03d}" for n in range(devices)]
    told: list[dict[str, Any]] = [
        {"event": "run", "at": 0, "task": "t-1", "method": "fedglp-adp", "engine": "live", "devices": devices,
         "rounds": rounds, "layers": [["fc", 10]], "delta": 0.1},
        *({"event": "presence", "at": 0, "device": device, "state": "ready", "board": "pi-4"} for device in ids),
    ]  # fmt: skip
    for number in range(1, closed + 2):
        told.append({"event": "round_open", "at": 10.0 * number, "round": number, "cohort": ids})
        answering = ids if number <= closed else ids[: devices // 2]
        told += [
            {"event": "update", "round": number, "device": device, "bytes": 1000, "code": "accepted",
             "epsilon_server": 5.0 * number}
            for device in answering
        ]  # fmt: skip
        if number <= closed:
            told.append(
                {"event": "round_close", "at": 10.0 * number + 8, "round": number, "participants": devices,
                 "uplink_bytes": 1000 * devices, "downlink_bytes": 4000 * devices, "snr_db": -20.0, "wall_s": 8.0,
                 "accuracy_global": 0.61, "loss": 0.9, "multiplier_release": 3.975}
            )  # fmt: skip
    return told


def fed(told: list[dict[str, Any]]) -> RunState:
    state = RunState()
    for event in told:
        state.apply(event)
    return state


def test_the_state_counts_rounds_bytes_and_devices() -> None:
    state = fed(events(8))
    assert (state.rounds_closed, state.round, state.rounds) == (1, 2, 3)
    assert list(state.states().values()) == ["accepted"] * 4 + ["training"] * 4
    assert state.progress == 1.5
    assert (state.uplink_bytes, state.round_bytes, state.downlink_bytes) == (8000, 4000, 32000)
    assert state.epsilon_server == 10.0
    assert state.epsilon_release == epsilon([Step(3.975, 1.0, 1)], delta=0.1)


def test_an_epsilon_that_is_stated_is_not_computed() -> None:
    state = RunState(delta=0.1)
    state.apply({"event": "round_close", "round": 1, "multiplier_release": 1.0, "epsilon_release": 7.5})
    assert state.epsilon_release == 7.5


def test_the_rounds_of_a_long_log_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(steps: Any, **how: Any) -> float:
        asked.append(how)
        return epsilon(steps, **how)

    monkeypatch.setattr("hushfleet.aggregator.results.fleet_state.epsilon", counted)
    state = RunState(delta=0.1)
    for number in range(1, 301):
        state.apply({"event": "round_close", "round": number, "multiplier_release": 20.0 + number % 2})
    assert (
        state.epsilon_release
        == state.epsilon_release
        == epsilon([Step(20.0, 1.0, 150), Step(21.0, 1.0, 150)], delta=0.1)
    )
    assert len(asked) == 1


def test_answers_end_with_the_round_and_duplicates_count_once() -> None:
    state = fed(events(4))
    state.apply({"event": "update", "round": 2, "device": "pi-000", "bytes": 1000, "code": "duplicate"})
    state.apply({"event": "update", "round": 2, "device": "pi-000", "bytes": 9, "code": "late", "reason": "closed"})
    state.apply({"event": "decline", "round": 2, "device": "pi-003", "code": "budget", "reason": "spent"})
    state.apply({"event": "presence", "device": "pi-002", "state": "lost"})
    assert list(state.states().values()) == ["accepted", "accepted", "lost", "declined"]
    assert state.round_bytes == 2000
    assert dict(state.counted) == {"refused": 1, "declined": 1, "lost": 1}
    assert state.warnings[-2] == "round 2: pi-003 declined: budget (spent)"
    state.apply({"event": "round_open", "at": 30.0, "round": 3, "cohort": ["pi-000", "pi-003"]})
    assert list(state.states().values()) == ["training", "ready", "lost", "training"]


def test_a_pipe_says_why_devices_declined_also_in_a_round_that_never_closes() -> None:
    shown, raw = console(200, terminal=False)
    display = FleetDisplay(console=shown)
    for event in events(3, closed=0):
        display.apply(event)
    for device in ("pi-001", "pi-002"):
        display.apply({"event": "decline", "round": 1, "device": device, "code": "budget", "reason": "8.1 of 8"})
    display.apply({"event": "round_extended", "round": 1, "accepted": 1})
    lines = raw.getvalue().decode().splitlines()[1:]
    assert lines == [
        "round 1: pi-001 declined: budget (8.1 of 8)",
        "round 1: too few updates (1) at the deadline, which is set anew",
    ]


def test_what_happens_to_many_devices_in_a_round_is_one_calm_line() -> None:
    state = fed(events(40))
    for number in range(20):
        state.apply({"event": "presence", "device": f"pi-{number:03d}", "state": "lost"})
        state.apply({"event": "decline", "round": 2, "device": f"pi-{number + 20:03d}", "code": "busy"})
    state.apply({"event": "decline", "round": 2, "device": "pi-001", "code": "memory"})
    assert state.warnings == [
        "round 2: pi-000 lost its connection, and 19 more",
        "round 2: pi-020 declined: busy, and 19 more",
        "round 2: pi-001 declined: memory",
    ]
    for number in range(3, 9):
        state.apply({"event": "round_open", "round": number, "cohort": []})
        state.apply({"event": "refused", "device": "x", "code": "late"})
    assert state.warnings == [f"round {number}: refused x: late" for number in range(4, 9)]
    assert dict(state.counted) == {"lost": 20, "declined": 21, "refused": 6}


def test_a_device_that_is_away_when_the_run_begins_is_not_reported_as_lost() -> None:
    state = RunState()
    state.apply({"event": "presence", "device": "a", "state": "lost"})
    state.apply({"event": "presence", "device": "b", "state": "ready"})
    state.apply({"event": "presence", "device": "b", "state": "lost"})
    assert state.states() == {"a": "lost", "b": "lost"}
    assert state.warnings == ["b lost its connection"]


def test_unknown_events_and_missing_fields_are_passed_over() -> None:
    state = RunState()
    for kind in ("run", "presence", "round_open", "update", "decline", "refused", "round_close", "finished", "new"):
        state.apply({"event": kind})
    state.apply({})
    assert state.finished
    assert state.rounds_closed == 1


def test_means_over_devices_use_each_ones_newest_values() -> None:
    state = RunState()
    state.apply_metrics("a", {"round": 1, "accuracy_own_common": 0.1})
    state.apply_metrics("a", {"round": 2, "accuracy_own_common": 0.5, "epsilon_server": 3.0})
    state.apply_metrics("b", {"round": 1, "accuracy_own_common": 0.7, "loss": None})
    assert state.mean_metric("accuracy_own_common") == pytest.approx(0.6)
    assert state.mean_metric("loss") is None
    assert state.epsilon_server == 3.0


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("devices", [0, 2, 8, 200, 500, 5000])
def test_the_panel_fits_the_terminal(width: int, devices: int) -> None:
    screen, raw = console(width)
    display = FleetDisplay(console=screen)
    for event in events(devices):
        display.apply(event)
    display.apply_metrics("pi-000", {"accuracy_own_common": 0.713, "accuracy_own_local": 0.82})
    screen.print(display)
    lines = raw.getvalue().decode().splitlines()
    text = "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 22
    for words in ("fedglp-adp", "1/3", "71.3 %", "82.0 %", "61.0 %", "epsilon_server", "t-1"):
        assert words in text
    assert ("pi-001" in text) == (devices in {2, 8})


def test_devices_are_counted_by_state_and_named_in_a_small_fleet() -> None:
    for devices, named in ((16, True), (17, False), (10_000, False)):
        screen, raw = console(80)
        display = FleetDisplay(console=screen)
        for event in events(devices):
            display.apply(event)
        display.apply_metrics("pi-000", {"accuracy_own_common": 0.82})
        screen.print(display)
        text = raw.getvalue().decode().replace("\N{NO-BREAK SPACE}", " ")
        half = devices // 2
        assert f"{devices} of {devices} present, {half} accepted, {devices - half} training" in text
        assert ("pi-000 accepted 82 %" in text, "pi-015 training" in text) == (named, named)


def test_a_device_that_sleeps_or_was_not_seen_is_not_present() -> None:
    screen, raw = console(80)
    display = FleetDisplay(console=screen)
    for event in events(6, closed=0)[:7]:  # the run, and six that are ready
        display.apply(event)
    for device, state in (("pi-000", "sleeping"), ("pi-001", "lost")):
        display.apply({"event": "presence", "device": device, "state": state})
    display.state._device("pi-006")
    screen.print(display)
    assert "4 of 7 present" in raw.getvalue().decode().replace("\N{NO-BREAK SPACE}", " ")


def test_the_time_left_follows_the_rounds() -> None:
    screen, raw = console(80)
    display, now = FleetDisplay(console=screen), 0.0
    display._progress.get_time = lambda: now
    for event in events(4, rounds=5, closed=4):
        display.apply(event)
        if event["event"] == "round_close":
            now += 10.0
            screen.print(display)
    assert "4/5" in raw.getvalue().decode()
    assert "0:00:10" in raw.getvalue().decode()


def test_a_warning_of_an_earlier_start_is_not_said_again() -> None:
    shown, raw = console(200, terminal=False)
    display, (run, *earlier) = FleetDisplay(console=shown), events(3, closed=0)
    display.replay([run, *earlier, {"event": "decline", "round": 1, "device": "pi-001", "code": "budget"}])
    display.apply(run)
    display.apply({"event": "presence", "device": "pi-000", "state": "ready"})
    assert "declined" not in raw.getvalue().decode()


def test_the_rounds_of_an_earlier_part_say_nothing_of_the_time_left() -> None:
    """They come at once when a run goes on: at their speed the others would end in no time."""
    screen, raw = console(80)
    display, now = FleetDisplay(console=screen), 0.0
    display._progress.get_time = lambda: now
    begun, *rounds = events(4, rounds=8, closed=6)
    closed = 0
    display.apply(begun)
    screen.print(display)
    for event in rounds:
        if event["event"] == "round_close":
            closed += 1
            now += 0.01 if closed <= 4 else 10.0
        display.apply(event)
        if closed == 4 and event["event"] == "round_close":
            display.apply(begun)
        screen.print(display)
    assert "6/8" in raw.getvalue().decode()
    assert "0:00:20" in raw.getvalue().decode()


def test_negligible_protection_is_said_while_the_run_goes_on() -> None:
    for value, told in ((7.9, False), (8.1, True)):
        screen, raw = console(80)
        display = FleetDisplay(console=screen)
        display.apply_metrics("a", {"epsilon_server": value})
        screen.print(display)
        assert ("negligible protection" in raw.getvalue().decode()) == told


def test_without_a_terminal_there_is_one_line_a_round() -> None:
    screen, raw = console(80, terminal=False)
    with FleetDisplay(console=screen) as display:
        for event in events(500, closed=2):
            display.apply(event)
    lines = raw.getvalue().decode().replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert len(lines) == 3
    assert lines[0] == "t-1: fedglp-adp, 500 devices, 3 rounds, engine live"
    assert lines[1].startswith("round 1/3 | 500 devices | accuracy global ")
    assert "epsilon_server 5, epsilon_release" in lines[1]
    assert lines[2].endswith("up 500 kB, down 2 MB | 8.0 s")


def test_the_live_display_starts_and_stops() -> None:
    screen, raw = console(100)
    with FleetDisplay(console=screen) as display:
        for event in [*events(8, closed=3), {"event": "finished"}]:
            display.apply(event)
    assert "finished" in raw.getvalue().decode()


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_has_the_comparison_and_both_epsilons(width: int) -> None:
    screen, raw = console(width)
    screen.print(summary_table(sample()))
    screen.print(summary_table(bare(sample())))
    text = raw.getvalue().decode().replace("\N{NO-BREAK SPACE}", " ")
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (
        "75.0 %",
        "70.0 %",
        "+5.0 ± 0.0 points",
        "epsilon_server 12.2, epsilon_release 2",
        "beats training alone",
    ):
        assert words in " ".join(text.split())
    assert "cannot say whether" in " ".join(text.split())
