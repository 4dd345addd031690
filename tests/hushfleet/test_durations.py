from __future__ import annotations

import pytest

from hushfleet.durations import describe_duration, duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90d", 7776000), ("24h", 86400), ("30min", 1800), ("1.5 h", 5400), ("10s", 10), ("2w", 1209600)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["90", "d", "-1d", "0d", "1 month", "90D", "1d 2h", "", "infd", "1e3s", "٣d", "9" * 400 + "d"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration: write a number above 0 and one of s, min, h, d, w"):
        duration_s(text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (90 * 86400, "90 days"),
        (86400, "1 day"),
        (5400, "1.5 hours"),
        (61, "1.02 minutes"),
        (1, "1 second"),
        (2000 * 86400, "2000 days"),
    ],
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert describe_duration(seconds) == words
