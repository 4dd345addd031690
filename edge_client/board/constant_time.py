"""Hides how long a board trains: the time at which it announces the end does not reveal how many records it has.

The training time depends on the number of records. Therefore the end is announced at the end of a slot, whose length
depends only on the task and the board: the time of a round with the task's batch size, rounded up to a power of two
seconds. A device that needs longer takes two slots, then four: this reveals the power of two by which it is above the
task's own number. A device near such a limit may reveal it in some rounds and not in others.

A slot never takes more than a part of the round's time, because the update must still arrive.
"""

from __future__ import annotations

import math

LEAST_SLOT_S = 1.0
ROOM = 1.5
"""A slot is at least this many times the measured work, which excludes release, coding and the store's sync."""
MOST_OF_DEADLINE = 0.5
ANSWER_S = 4.0
"""The work of a round that asks: an answer takes a board about one second, and gets a slot of eight seconds."""


def announced_at(*, began: float, ended: float, nominal_s: float, deadline: float, deadline_s: float) -> float:
    """Returns when the end of a training that ran from `began` to `ended` is announced, on one monotonic clock.

    :param nominal_s: the result of `nominal_seconds`.
    :param deadline: end of the round, which is `deadline_s` after it became known.
    """
    slot = max(LEAST_SLOT_S, 2.0 ** math.ceil(math.log2(ROOM * nominal_s))) if nominal_s > 0 else LEAST_SLOT_S
    while began + slot < ended:
        slot *= 2
    latest = deadline - (1 - MOST_OF_DEADLINE) * deadline_s
    return max(ended, min(began + slot, latest))
