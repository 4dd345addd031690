"""Describes the protection of an epsilon by one word, the same in every command, page and report.

An (epsilon, delta) guarantee bounds an observer who must guess, from even odds, whether a unit took part: the guess is
right at most `(e^epsilon + delta) / (e^epsilon + 1)` of the time. The words follow this bound: at epsilon 1 it is 73 %,
at 3 it is 95 %, at 8 it is 99.97 %. It is an upper bound; a real attack may be much less successful.
"""

from __future__ import annotations

import math
import sys

from hushfleet.privacy.terms import Unit

NEGLIGIBLE_ABOVE = 8.0
LARGEST_EPSILON = {
    "strong": 1.0,
    "moderate": 3.0,
    "weak": NEGLIGIBLE_ABOVE,
    "negligible": sys.float_info.max,
    "no": math.inf,
}
"""The largest epsilon of each word, in rising order."""
QUESTIONS: dict[Unit, str] = {
    "device": "is this device in, or nothing?",
    "record": "is this record in, or nothing?",
}
"""The question that an observer should not be able to answer: was a unit added or removed?"""


def protection(epsilon: float) -> str:
    """Returns words such as `weak protection` for any epsilon of 0 or more.

    Example:

        >>> protection(2.0), protection(8.0), protection(math.inf)
        ('moderate protection', 'weak protection', 'no protection')
    """
    return next(f"{word} protection" for word, largest in LARGEST_EPSILON.items() if epsilon <= largest)


def guess_rate(epsilon: float, delta: float) -> float:
    """Returns the largest success rate of a guess, from even odds, whether a unit took part: [0.5, 1].

    >>> round(guess_rate(2.0, 0.0), 3)
    0.881
    """
    return 1.0 if epsilon > 700 else (math.exp(epsilon) + delta) / (math.exp(epsilon) + 1)


def noticed_rate(epsilon: float, delta: float, *, alarms: float) -> float:
    """Returns the largest rate at which a test notices a unit that took part, if its false alarms have this rate.

    >>> round(noticed_rate(2.0, 0.0, alarms=0.01), 3)
    0.074
    """
    if epsilon > 700:
        return 1.0
    return min(1.0, math.exp(epsilon) * alarms + delta, 1 - math.exp(-epsilon) * (1 - delta - alarms))


def worth(epsilon: float, delta: float, question: str) -> str:
    """Returns the protection word, and how often a guess at `question` may be right; never rounded down.

    >>> worth(2.0, 0.0, "in?")
    'moderate protection: a guess at "in?" is right at most 88.1 % of the time (a coin: 50 %)'
    """
    right = math.ceil(1000 * guess_rate(epsilon, delta)) / 10
    if right > 99.9:
        return f'{protection(epsilon)}: a guess at "{question}" may be right more than 99.9 % of the time'
    return f'{protection(epsilon)}: a guess at "{question}" is right at most {right} % of the time (a coin: 50 %)'
