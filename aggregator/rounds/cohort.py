"""Who takes part in a round: all that are present, or a choice that only the task's seed and the round decide."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hushfleet.wire.format.messages import MAX_COHORT, MAX_MESSAGE_BYTES

_STREAM = 0x434F4852
_PLAN_FIXED_BYTES = 2048  # with the most controls and differences that a plan may have
_PLAN_ENTRY_BYTES = 20


def choose_cohort(present: Iterable[str], *, size: int, seed: int, round: int) -> list[str]:
    """The cohort, sorted; never larger than a round plan can name.

    :param size: how many; 0 for all that are present.

    The order in which devices appeared, and what was chosen in other rounds, play no part.
    """
    names = sorted(set(present))
    wanted = min(size or len(names), len(names), MAX_COHORT)
    key = np.random.SeedSequence(seed, spawn_key=(_STREAM, round))
    order = np.random.Generator(np.random.Philox(key)).permutation(len(names))
    chosen, room = [], MAX_MESSAGE_BYTES - _PLAN_FIXED_BYTES
    for index in order[:wanted]:
        room -= len(names[index]) + _PLAN_ENTRY_BYTES
        if room < 0:
            break
        chosen.append(names[index])
    return sorted(chosen)
