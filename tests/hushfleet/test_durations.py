from __future__ import annotations

import pytest

from hushfleet.durations import duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90d", 7776000), ("24h", 86400), ("30min", 1800), ("1.5 h", 5400), ("10s", 10), ("2w", 1209600)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["90", "d", "-1d", "0d", "1 month", "90D", "1d 2h", "", "infd", "1e3s", "٣d"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration: write a number above 0 and one of s, min, h, d, w"):
        duration_s(text)
