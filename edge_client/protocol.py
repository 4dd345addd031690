"""The states of a device's round as a table: what is done at an event, and which state follows.

| state | the device |
|---|---|
| `rest` | has nothing to do for the plan: no round is open, it is not in it, or its part is done |
| `decide` | looks at an open round; its task, membership list, model or the aggregator's answer may be missing |
| `train` | waits for its worker |
| `slot` | has an outcome, and announces the end of its training at the slot's end |
| `send` | sends an update, or a member's answer |
| `declined` | has declined the round |
| `head` | waits for its worker, which chooses its personalized head |

An action may return the next event, which is taken at once. An event without a row is ignored.
"""

from __future__ import annotations

from typing import Literal

from hushfleet.state_table import StateTable, Transition

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

ROUND = StateTable(
    Transition(*row)
    for row in (
        ("rest", "again", "", "decide"),
        ("rest", "opens", "", "decide"),
        ("rest", "ends", "", "rest"),
        ("rest", "task", "", "decide"),
        ("rest", "look", "look_for_head", "rest"),
        ("rest", "choose", "begin_head", "head"),
        ("rest", "acked", "conclude", "rest"),
        ("rest", "refused", "conclude", "rest"),
        ("rest", "wanted", "send_wanted", "send"),
        ("decide", "again", "", "decide"),
        ("decide", "opens", "", "decide"),
        ("decide", "ends", "", "rest"),
        ("decide", "task", "", "decide"),
        ("decide", "look", "consider", "decide"),
        ("decide", "begin", "begin_training", "train"),
        ("decide", "ready", "begin_upload", "send"),
        ("decide", "skip", "", "rest"),
        ("decide", "decline", "decline", "declined"),
        ("decide", "acked", "conclude", "rest"),
        ("decide", "refused", "conclude", "rest"),
        ("decide", "wanted", "send_wanted", "send"),
        ("train", "again", "", "train"),
        ("train", "fits", "", "train"),
        ("train", "opens", "give_up", "decide"),
        ("train", "ends", "give_up", "rest"),
        ("train", "task", "give_up", "decide"),
        ("train", "stop", "give_up", "rest"),
        ("train", "look", "poll", "train"),
        ("train", "late", "too_late", "slot"),
        ("train", "finished", "commit", "slot"),
        ("train", "failed", "failed", "slot"),
        ("train", "retry", "train_without_data", "train"),
        ("train", "died", "died", "slot"),
        ("slot", "look", "wait_for_slot", "slot"),
        ("slot", "stop", "end_slot", "rest"),
        ("slot", "over", "end_slot", "decide"),
        ("send", "again", "offer_again", "send"),
        ("send", "fits", "", "send"),
        ("send", "opens", "drop_upload", "decide"),
        ("send", "ends", "drop_upload", "rest"),
        ("send", "task", "drop_upload", "decide"),
        ("send", "resume", "offer_again", "send"),
        ("send", "acked", "conclude", "rest"),
        ("send", "refused", "conclude", "rest"),
        ("send", "wanted", "send_wanted", "send"),
        ("declined", "again", "say_again", "declined"),
        ("declined", "opens", "forget_decline", "decide"),
        ("declined", "ends", "forget_decline", "rest"),
        ("declined", "task", "forget_decline", "decide"),
        ("declined", "resume", "say_again", "declined"),
        ("declined", "look", "retry", "declined"),
        ("head", "again", "give_up_head", "decide"),
        ("head", "opens", "give_up_head", "decide"),
        ("head", "ends", "give_up_head", "rest"),
        ("head", "task", "give_up_head", "decide"),
        ("head", "stop", "give_up_head", "rest"),
        ("head", "look", "poll", "head"),
        ("head", "finished", "keep_head", "rest"),
        ("head", "failed", "head_failed", "rest"),
        ("head", "died", "head_failed", "rest"),
    )
)
