"""What the owner of a board asks, in four sentences, from the report of `hushfleet-edge status`.

Is the board well; how many of its photographs are used; is the fleet's model better here than its own; how much privacy
is left, and for how many rounds.
"""

from __future__ import annotations

import time
from typing import Any

from hushfleet.privacy.protection import protection

SHOWN_CLASSES = 6
WELL = ("round", "nothing")
"""Kinds of `board.waiting.Waiting` with which nothing is missing."""


def sentences(report: dict[str, Any]) -> dict[str, str]:
    """By name: `client`, `photographs` (or `samples`), `model` and `privacy`."""
    what = "photographs" if report["data_kind"] == "folder" else "samples"
    return {
        "client": client(report),
        what: data(report, what),
        "model": model(report["model"], what),
        "privacy": privacy(report),
    }


def client(report: dict[str, Any]) -> str:
    if report["stopped_because"] is not None:
        return f"has stopped for good: {report['stopped_because']}"
    if not report["running"]:
        return "does not run; start it: systemctl start hushfleet-client"
    waits = report["waits_for"]
    if waits is None:
        return "runs"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(waits["since"]))
    words = waits["words"] if waits["who"] == "nothing" else f"waiting for {waits['words']}"
    return f"{'well, ' if waits['who'] in WELL else ''}{words}, since {since}"


def data(report: dict[str, Any], what: str) -> str:
    use = report["data"]
    if use is None:
        return f"not counted yet: {what} are counted in the first round of a task"
    told = f"{use['used']} {what} are used, {use['left_out'] or 'none'} left out"
    if not use["used"]:
        told = f"none of its {use['left_out']} {what} can be used" if use["left_out"] else f"there are no {what}"
        told += ", and it takes part with noise alone" * use["noise_alone"]
    if not use["why"]:
        return told
    return f"{told} ({use['why']}). {_cure(report)} These figures stay here"


def _cure(report: dict[str, Any]) -> str:
    names = report["classes"]
    if report["data_kind"] != "folder":
        return "Correct the file that data.path names."
    shown = ", ".join(names[:SHOWN_CLASSES]) + (" and so on" if len(names) > SHOWN_CLASSES else "")
    return f"Put each into the sub-folder of data.path with the name of its class ({shown}), or replace it."


def model_words(kind: str) -> str:
    """:param kind: as in `OwnModel`."""
    return {"global": "the fleet's model", "personalised": "the board's own model"}.get(kind, kind)


def model(found: dict[str, Any] | None, what: str) -> str:
    if found is None:
        return "none yet: it comes with the first round"
    name = model_words(found["model"])
    if found["right"] is None:
        return (
            f"{name}, of {found['task']}. Whether the fleet's is better here than the board's own is not measured: put "
            f"{what} that are never to be trained on into a place of their own, and name it in data.held_out"
        )
    fleet, own = found["fleet_right"], found["alone_right"]
    whose = "one that was trained on this board alone"
    if own is None and found["model"] != "global":
        own, whose = found["right"], "the board's own"
    told = f"{name}, of {found['task']}: right on {found['right']} of {found['images']} {found['which']}"
    if fleet is None or own is None:
        return f"{told}; that stays here"
    verdict = "better here than" if fleet > own else "worse here than" if fleet < own else "as good here as"
    return f"{told}. The fleet's is {verdict} {whose}: {fleet} against {own}; that stays here"


def privacy(report: dict[str, Any]) -> str:
    spent, limit, rounds = report["epsilon_server"], report["epsilon_limit"], report["rounds_left"]
    if isinstance(spent, str):
        return "no limit holds any more: values without noise have left this board"
    told = f"{spent:.3g} is spent (epsilon; {protection(spent)})"
    if isinstance(limit, str):
        return f"{told}, and its owner has set no limit"
    told = f"{spent:.3g} of {limit:.3g} is spent (epsilon; {protection(spent)})"
    if rounds is None:
        return f"{told}; for how many rounds the rest is enough shows after the first one"
    task = report["task_rounds_left"]
    of_task = "" if task is None else f"; this task has {task} more" if task else "; this task is over"
    if not rounds:
        return f"{told}; the rest is not enough for another round{of_task}"
    return f"{told}; the rest is enough for {rounds} more rounds like the last{of_task}"
