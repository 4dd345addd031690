"""The schedule against a slow oracle that watches the clock on the wall, minute by minute, over all its changes."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.calendar import Schedule, moment_text
from hushfleet.aggregator.config.schedule import ScheduleSection

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
# hours, half an hour (Lord Howe), none, and whole days that are left out (Apia, 2011)
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC", "Pacific/Apia")
MINUTE = timedelta(minutes=1)


def at(text: str, zone: str = "Europe/Berlin", *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def schedule(**keys: Any) -> Schedule:
    return Schedule(ScheduleSection(**{"timezone": "Europe/Berlin", **keys}))


class Oracle:
    """Watches the clock on the wall from two days before the beginning, each minute, for ten days."""

    def __init__(self, zone: str, begin: datetime, *, first: time, last: time, days: tuple[str, ...]) -> None:
        start = begin - timedelta(days=2)
        moments = [start + n * MINUTE for n in range(10 * 1440)]
        shown = [moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0) for moment in moments]
        self.open = set[datetime]()
        for day in sorted({each.date() for each in shown}):
            end = day if last > first else day + timedelta(days=1)
            begins, ends = datetime.combine(day, first), datetime.combine(end, last)
            if DAYS[day.weekday()] in (days or DAYS) and shown[0] < begins:
                after = next((n for n, each in enumerate(shown) if each >= begins), len(shown))
                until = next((n for n, each in enumerate(shown) if each >= ends), len(shown))
                self.open.update(moments[after:until])

    def next_open(self, moment: datetime) -> datetime | None:
        return min((each for each in self.open if each >= moment), default=None)


@settings(max_examples=12, deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    begin=st.sampled_from(
        [datetime(2026, 3, 28), datetime(2026, 10, 24), datetime(2026, 4, 4), datetime(2026, 11, 1)]
    ).flatmap(lambda day: st.integers(0, 2 * 1440).map(lambda n: day.replace(tzinfo=UTC) + n * MINUTE)),
    first=st.times(min_value=time(0)).map(lambda each: each.replace(second=0, microsecond=0)),
    last=st.times(min_value=time(0)).map(lambda each: each.replace(second=0, microsecond=0)),
    days=st.sets(st.sampled_from(DAYS), min_size=3).map(lambda each: tuple(sorted(each))),
)
@example("Europe/Berlin", datetime(2026, 3, 28, 12, tzinfo=UTC), time(2, 10), time(2, 50), ())  # in the missing hour
@example("Europe/Berlin", datetime(2026, 3, 28, 12, tzinfo=UTC), time(2, 30), time(3, 15), ())
@example("Europe/Berlin", datetime(2026, 10, 24, 12, tzinfo=UTC), time(2, 10), time(2, 50), ())  # in the double one
@example("Europe/Berlin", datetime(2026, 10, 24, 12, tzinfo=UTC), time(22, 0), time(2, 30), ())
@example("Australia/Lord_Howe", datetime(2026, 10, 3, 12, tzinfo=UTC), time(2, 10), time(2, 40), ())
@example("Pacific/Apia", datetime(2011, 12, 29, 12, tzinfo=UTC), time(22, 0), time(4, 0), ())
def test_windows_are_those_of_the_clock_on_the_wall(
    zone: str, begin: datetime, first: time, last: time, days: tuple[str, ...]
) -> None:
    oracle = Oracle(zone, begin, first=first, last=last, days=days)
    found = schedule(timezone=zone, between=f"{first:%H:%M}-{last:%H:%M}", days=days)
    expected = oracle.next_open(begin)
    assert found.opens(begin.timestamp(), last=None) == (expected or begin).timestamp()
    end = begin
    while end in oracle.open and end - begin < timedelta(days=7):
        end += MINUTE
    if end - begin < timedelta(days=7):
        assert found.ends(begin.timestamp()) == end.timestamp()


def test_once_a_day_is_once_in_each_window_however_late_the_last_round_opened() -> None:
    nightly = schedule(every="24h", between="01:00-05:00")
    late = at("2026-11-26T04:59")
    assert nightly.opens(late + 60, last=late) == at("2026-11-27T01:00")
    assert nightly.opens(at("2026-11-27T03:00"), last=late) == at("2026-11-27T03:00")
    assert nightly.opens(at("2026-11-30T06:00"), last=late) == at("2026-12-01T01:00")


@pytest.mark.parametrize(("night", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-11-26", 24)])
def test_once_a_day_is_at_the_same_time_by_the_clock_on_the_wall(night: str, hours: int) -> None:
    before = at(f"{date.fromisoformat(night) - timedelta(days=1)}T20:30")
    assert schedule(every="24h").opens(before, last=before) == before + hours * 3600
    assert schedule(every="6h").opens(before, last=before) == before + 6 * 3600


def test_a_window_past_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    found = schedule(every="1d", between="22:00-04:00", days=("fri", "sun"))
    friday_night = at("2026-11-28T02:00")
    assert found.opens(at("2026-11-26T12:00"), last=None) == at("2026-11-27T22:00")
    assert found.opens(friday_night, last=friday_night) == at("2026-11-29T22:00")
    assert found.ends(friday_night) == at("2026-11-28T04:00")


def test_whole_days_follow_each_other_without_a_gap() -> None:
    found = schedule(days=("mon", "tue", "wed"))
    assert found.ends(at("2026-11-23T23:50")) == at("2026-11-26T00:00")
    assert found.ends(at("2026-11-26T12:00")) == at("2026-11-26T12:00")


def test_until_is_the_last_day_on_which_a_round_opens() -> None:
    found = schedule(every="7d", until="2026-11-30")
    assert found.opens(at("2026-11-23T12:00"), last=None) == at("2026-11-23T12:00")
    assert found.opens(at("2026-11-23T12:01"), last=at("2026-11-23T12:00")) == at("2026-11-30T12:00")
    assert found.opens(at("2026-11-30T12:01"), last=at("2026-11-30T12:00")) == math.inf


@settings(max_examples=60, deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    start=st.integers(1_600_000_000, 1_800_000_000),
    every=st.sampled_from(["30min", "5h", "24h", "36h", "2d", "1w"]),
    between=st.sampled_from([None, "01:00-05:00", "23:30-00:30"]),
)
def test_openings_never_come_closer_than_a_window_allows(
    zone: str, start: int, every: str, between: str | None
) -> None:
    found = schedule(timezone=zone, every=every, between=between)
    period = ScheduleSection(every=every).period.total_seconds()
    window = 0 if between is None else 4 * 3600
    last, now = None, float(start)
    for _ in range(8):
        opened = found.opens(now, last=last)
        assert opened >= now
        assert found.ends(opened) > opened
        if last is not None:
            assert opened - last >= period - window - 2 * 3600  # clocks change by an hour, and windows have a length
            assert opened - last <= max(period, 86400) + 86400 + 2 * 3600
        last, now = opened, opened + 600


def test_a_moment_in_words() -> None:
    now = at("2026-11-26T18:00")
    said = [
        moment_text(at(when), now=now, zone="Europe/Berlin")
        for when in ("2026-11-26T23:00", "2026-11-27T01:00", "2026-12-02T01:00", "2027-01-03T01:00")
    ]
    assert said == [
        "today 23:00 (Europe/Berlin)",
        "tomorrow 01:00 (Europe/Berlin)",
        "Wed 2 Dec 01:00 (Europe/Berlin)",
        "Sun 3 Jan 2027 01:00 (Europe/Berlin)",
    ]
