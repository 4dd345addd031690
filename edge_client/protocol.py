"""The states of a device's round as a table: what is done at an event, and which state follows.

| state | the device |
|---|---|
| `rest` | has nothing to do for the plan: no round is open, it is not in it, or its part is done |
| `decide` | looks at an open round; its task, roster, model or the aggregator's answer may be missing |
| `train` | waits for its worker |
| `slot` | has an outcome, and announces the end of its training at the slot's end |
| `send` | sends an update, or a member's answer |
| `declined` | has declined the round |
| `head` | waits for its worker, which chooses its own head |

An action may return the next event, which is taken at once. An event without a row is ignored.
"""

from __future__ import annotations

from typing import Literal

RoundState = Literal["rest", "decide", "train", "slot", "send", "declined", "head"]

Event = Literal[
    # of the plan: the same one again; one that the work under way belongs to; an open round; no open round; a new task
    "again", "fits", "opens", "ends", "task",
    # of time: each step; the link or the aggregator is back; the client stops; the deadline; the slot's end
    "look", "resume", "stop", "late", "over",
    # of a look at an open round
    "begin", "ready", "skip", "decline", "choose",
    # of the worker
    "finished", "failed", "died", "retry",
    # of the aggregator's answer
    "acked", "refused", "wanted",
]  # fmt: skip

Row = tuple[str, RoundState]
"""The action, a method of `RoundHandler` (empty: none), and the state that follows."""

TABLE: dict[tuple[RoundState, Event], Row] = {
    ("rest", "again"): ("", "decide"),
    ("rest", "opens"): ("", "decide"),
    ("rest", "ends"): ("", "rest"),
    ("rest", "task"): ("", "decide"),
    ("rest", "look"): ("_look_for_head", "rest"),
    ("rest", "choose"): ("_begin_head", "head"),
    ("rest", "acked"): ("_conclude", "rest"),
    ("rest", "refused"): ("_conclude", "rest"),
    ("rest", "wanted"): ("_send_wanted", "send"),
    ("decide", "again"): ("", "decide"),
    ("decide", "opens"): ("", "decide"),
    ("decide", "ends"): ("", "rest"),
    ("decide", "task"): ("", "decide"),
    ("decide", "look"): ("_consider", "decide"),
    ("decide", "begin"): ("_begin_training", "train"),
    ("decide", "ready"): ("_begin_upload", "send"),
    ("decide", "skip"): ("", "rest"),
    ("decide", "decline"): ("_decline", "declined"),
    ("decide", "acked"): ("_conclude", "rest"),
    ("decide", "refused"): ("_conclude", "rest"),
    ("decide", "wanted"): ("_send_wanted", "send"),
    ("train", "again"): ("", "train"),
    ("train", "fits"): ("", "train"),
    ("train", "opens"): ("_give_up", "decide"),
    ("train", "ends"): ("_give_up", "rest"),
    ("train", "task"): ("_give_up", "decide"),
    ("train", "stop"): ("_give_up", "rest"),
    ("train", "look"): ("_poll", "train"),
    ("train", "late"): ("_too_late", "slot"),
    ("train", "finished"): ("_commit", "slot"),
    ("train", "failed"): ("_failed", "slot"),
    ("train", "retry"): ("_train_without_data", "train"),
    ("train", "died"): ("_died", "slot"),
    ("slot", "look"): ("_wait_for_slot", "slot"),
    ("slot", "stop"): ("_end_slot", "rest"),
    ("slot", "over"): ("_end_slot", "decide"),
    ("send", "again"): ("_offer_again", "send"),
    ("send", "fits"): ("", "send"),
    ("send", "opens"): ("_drop_upload", "decide"),
    ("send", "ends"): ("_drop_upload", "rest"),
    ("send", "task"): ("_drop_upload", "decide"),
    ("send", "resume"): ("_offer_again", "send"),
    ("send", "acked"): ("_conclude", "rest"),
    ("send", "refused"): ("_conclude", "rest"),
    ("send", "wanted"): ("_send_wanted", "send"),
    ("declined", "again"): ("_say_again", "declined"),
    ("declined", "opens"): ("_forget_decline", "decide"),
    ("declined", "ends"): ("_forget_decline", "rest"),
    ("declined", "task"): ("_forget_decline", "decide"),
    ("declined", "resume"): ("_say_again", "declined"),
    ("declined", "look"): ("_retry", "declined"),
    ("head", "again"): ("_give_up_head", "decide"),
    ("head", "opens"): ("_give_up_head", "decide"),
    ("head", "ends"): ("_give_up_head", "rest"),
    ("head", "task"): ("_give_up_head", "decide"),
    ("head", "stop"): ("_give_up_head", "rest"),
    ("head", "look"): ("_poll", "head"),
    ("head", "finished"): ("_keep_head", "rest"),
    ("head", "failed"): ("_head_failed", "rest"),
    ("head", "died"): ("_head_failed", "rest"),
}

VISITED: set[tuple[RoundState, Event]] = set()
"""The rows that this process has taken, so that storms can tell which were never visited."""
