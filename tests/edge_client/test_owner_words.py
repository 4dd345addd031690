"""What an owner reads on a board."""

from __future__ import annotations

from typing import Any

import pytest

from hushfleet.edge_client.status import _describe_windows, sentences

REPORT: dict[str, Any] = {
    "data_kind": "folder",
    "stopped_because": None,
    "running": True,
    "waits_for": {"who": "round", "words": "round 3 of 20 of small", "since": 0.0},
    "classes": ["cat", "dog"],
    "data": {"used": 340, "left_out": 12, "why": "12: its folder is not a class of this task, as new/1.jpg"},
    "held_out": [],
    "model": {
        "task": "small",
        "model": "the fleet's model",
        "right": 33,
        "images": 36,
        "which": "own samples, cross-validated",
        "fleet_right": 33,
        "alone_right": 29,
    },
    "epsilon_server": 6.5731,
    "epsilon_limit": 8.0,
    "rounds_left": 3,
    "task_rounds_left": 18,
}


def test_the_four_sentences() -> None:
    found = sentences(REPORT)
    assert list(found) == ["client", "photographs", "model", "privacy"]
    assert found["client"].startswith("well, waiting for round 3 of 20 of small, since ")
    assert found["photographs"] == (
        "340 photographs are used, 12 left out (12: its folder is not a class of this task, as new/1.jpg). Put each "
        "into the sub-folder of data.path with the name of its class (cat, dog), or replace it. These figures stay here"
    )
    assert found["model"] == (
        "the fleet's model, of small: right on 33 of 36 own samples, cross-validated. The fleet's is better here than "
        "one that was trained on this board alone: 33 against 29; that stays here. Whether the fleet pays on average "
        "is told where it is run: hushfleet fleet status"
    )
    assert found["privacy"] == (
        "6.57 of 8 is spent (epsilon; weak protection); the rest is enough for 3 more rounds; this task has 18 more"
    )


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("client", {"running": False}, "does not run; start it: systemctl start hushfleet-client"),
        ("client", {"stopped_because": "a copy"}, "has stopped for good: a copy"),
        ("client", {"waits_for": {"who": "broker", "words": "the broker", "since": 0.0}}, "waiting for the broker, "),
        ("photographs", {"data": None}, "not counted yet: photographs are counted in the first round of a task"),
        (
            "photographs",
            {"data": None, "tasks": [{}]},
            "not counted: no round so far has left a count of photographs; ",
        ),
        ("photographs", {"data": {"used": 9, "left_out": 0, "why": ""}}, "9 photographs are used, none left out"),
        (
            "photographs",
            {"data": {"used": 20, "left_out": 0, "why": "", "held_out": 4}},
            "20 photographs are used, 4 are kept for evaluations, none left out",
        ),
        (
            "photographs",
            {"data": {"used": 0, "left_out": 2, "why": "2: it is a pipe, as a", "noise_alone": True}},
            "none of its 2 photographs can be used, and it takes part with noise alone (2: it is a pipe",
        ),
        ("samples", {"data_kind": "csv"}, "340 samples are used, 12 left out (12: its folder"),
        ("model", {"model": None}, "none yet: it comes with the first round"),
        ("model", {"model": None, "awaited": "the task b is not here yet"}, "none yet: the task b is not here yet"),
        (
            "model",
            {
                "model": {**REPORT["model"], "task": "autumn", "model": "30 % trained alone", "round": 6},
                "awaited": "the task winter has no closed round yet",
            },
            "the board's personalized head (30 % trained alone), of autumn, round 6; the task winter has no closed "
            "round yet: right on 33 of 36",
        ),
        (
            "model",
            {"model": {**REPORT["model"], "model": "global", "right": None}},
            "the fleet's model, of small. Whether the fleet's is better here than the board's own is not measured",
        ),
        (
            "model",
            {"model": {**REPORT["model"], "model": "personalised", "alone_right": None, "fleet_right": 30}},
            "the board's personalized model, of small: right on 33 of 36 own samples, cross-validated. The fleet's is "
            "worse here than the board's own: 30 against 33",
        ),
        ("privacy", {"rounds_left": 0}, "6.57 of 8 is spent (epsilon; weak protection); the rest is not enough for"),
        (
            "privacy",
            {"epsilon_limit": "Infinity"},
            "6.57 is spent (epsilon; weak protection), and its owner has set",
        ),
        (
            "privacy",
            {"period": {"words": "1.2 of 2 in these 90 days, which end in 31 days"}, "since": 1_746_100_000},
            "1.2 of 2 in these 90 days, which end in 31 days; 6.57 of 8 in all since May 2025 (epsilon; ",
        ),
        ("privacy", {"epsilon_server": "Infinity"}, "no limit holds any more"),
        ("privacy", {"epsilon_server": 0.0, "rounds_left": None}, "0 of 8 is spent (epsilon; strong protection); for"),
    ],
)
def test_each_is_true_of_other_boards(name: str, changes: dict[str, Any], said: str) -> None:
    assert sentences({**REPORT, **changes})[name].startswith(said)


def test_both_numbers_of_windows_are_said_and_whose_they_are() -> None:
    windows = [
        {"start": 0, "stop": 30 * 86400, "rounds": 2, "epsilon_server": 1.2},
        {"start": 30 * 86400, "stop": 60 * 86400, "rounds": 3, "epsilon_server": 1.5},
    ]
    said = _describe_windows({"windows": windows, "epsilon_server": 2.1})
    assert "one window alone has spent epsilon_server 1.500 at most (1970-01-31 to 1970-03-02)" in said
    assert said.endswith("whoever appears in all of them, 2.100")


def test_samples_of_other_windows_are_counted() -> None:
    use = {"used": 9, "left_out": 0, "why": "", "other_windows": 120}
    said = sentences({**REPORT, "data": use})["photographs"]
    assert said == "9 photographs are used, none left out, 120 came in another window of time than the task's"
