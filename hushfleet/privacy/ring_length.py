"""The number of integers in a ring (`hushfleet.privacy.ring`): lengths with a large prime factor are slow to rotate."""

from __future__ import annotations

from functools import lru_cache

_LARGE, _FACTOR = 1 << 14, 100


@lru_cache(maxsize=64)
def smooth_length(size: int) -> int:
    """Returns the least number of at least `size` whose prime factors are 2, 3, 5 and 7.

    >>> smooth_length(582_026), smooth_length(1)
    (583200, 1)
    """
    odd = [1]
    for factor in (3, 5, 7):
        powers = [factor**k for k in range(1, size.bit_length())]
        odd += [each * power for each in odd for power in powers if each * power < factor * size]
    return min(each << (-(-size // each) - 1).bit_length() for each in odd)


def is_slow(size: int) -> bool:
    """Returns whether the rotation of `size` values takes 2.7 times as long as that of `smooth_length`, or more.

    >>> is_slow(582_026), is_slow(583_200), is_slow(5_129)
    (True, False, False)
    """
    left = size
    for factor in range(2, _FACTOR):
        while left % factor == 0:
            left //= factor
    return size >= _LARGE and left > 1


def chosen_length(size: int) -> int:
    """Returns the length that an aggregator chooses for `size` values."""
    return smooth_length(size) if is_slow(size) else size
