"""The names of clips that `hushfleet-edge listen` keeps, in the inbox, and of alarms, in a folder for each class."""

from __future__ import annotations

import re
import time
from pathlib import PurePath

ALARMS = "alarms"
"""The folder in the inbox for clips that the board took for a class."""
PREFIX = "heard-"
_PROBABILITY = re.compile(r"-p(\d{1,3})\b")


def heard_name(at: float, probability: float | None = None) -> str:
    """Returns the name of a new clip's file.

    :param at: unix seconds.
    :param probability: of the class that the board took it for.
    """
    when = time.strftime("%Y%m%dT%H%M%S", time.localtime(at))
    taken = "" if probability is None else f"-p{100 * probability:.0f}"
    return f"{PREFIX}{when}.{int(at % 1 * 1000):03d}{taken}.wav"


def taken_for(name: str) -> tuple[str, float]:
    """Returns the class that the board took an alarm for, and its probability, as `heard_name` was given it.

    :param name: below the folder of alarms. A file that somebody else has put there has the probability 1.

    >>> taken_for("dog/heard-20260102T030405.250-p87.wav")
    ('dog', 0.87)
    """
    found = _PROBABILITY.search(PurePath(name).name)
    return PurePath(name).parent.as_posix(), int(found[1]) / 100 if found else 1.0
