"""The calendar of seasons, for any period, start and time zone."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.planning.season import SeasonCalendar, learns_until, seasons_paid
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge

ZONES = st.sampled_from(["Europe/Berlin", "UTC", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"])
PERIODS = st.one_of(
    st.integers(1, 400).map(lambda days: timedelta(days=days)),
    st.integers(1, 5000).map(lambda minutes: timedelta(minutes=minutes)),
)


@given(first=st.floats(0, 4e9), period=PERIODS, zone=ZONES, number=st.integers(1, 60), share=st.floats(0, 0.999))
def test_each_moment_is_in_one_season(first: float, period: timedelta, zone: str, number: int, share: float) -> None:
    calendar = SeasonCalendar(first, period, zone)
    begins, ends = calendar.begins(number), calendar.begins(number + 1)
    assert begins < ends
    assert abs(ends - begins - period.total_seconds()) <= 26 * 3600, "Samoa left out a day in 2011"
    now = begins + share * (ends - begins)
    assert calendar.number(now) == number
    assert calendar.number(math.nextafter(ends, math.inf)) == number + 1
    assert calendar.number(first - 1e6) == 1


@given(first=st.floats(1e9, 4e9), days=st.integers(1, 400), zone=ZONES, number=st.integers(1, 60))
def test_seasons_of_whole_days_begin_at_the_same_time_of_day(first: float, days: int, zone: str, number: int) -> None:
    at = SeasonCalendar(first, timedelta(days=days), zone).begins(number)
    shown = [datetime.fromtimestamp(each, ZoneInfo(zone)).replace(tzinfo=None) for each in (first, at)]
    gap = abs(shown[1] - shown[0] - (number - 1) * timedelta(days=days))
    assert gap <= timedelta(hours=25), "a time of day that is missing on that day, or a day"
    if zone == "UTC":
        assert gap <= timedelta(milliseconds=1)


def test_the_calendar_ends_where_dates_end() -> None:
    assert math.isinf(SeasonCalendar(1.8e9, timedelta(weeks=9999), "UTC").begins(9999))
    assert SeasonCalendar(1.8e9, timedelta(days=90), "UTC").number(2.5e11) > 1


def test_a_fleet_says_until_when_it_learns() -> None:
    at = datetime(2028, 8, 14, 1, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    told = learns_until(at, now=at - 1, zone="Europe/Berlin")
    assert told == "learns until 14 August 2028; then each board goes on alone"
    assert learns_until(at, now=at, zone="Europe/Berlin").startswith("has learned until 14 August 2028; each board")
    for never in (None, math.inf):
        assert "no limit over everything" in learns_until(never, now=at, zone="UTC")


def test_a_lifetime_pays_for_more_seasons_than_a_sum_of_epsilons_would() -> None:
    season = Charge("device", DEVICE_ADJACENCY, "gaussian", 4.0, steps=4)
    paid = seasons_paid([], season, delta=1e-5, lifetime=8.0)
    assert paid is not None
    assert seasons_paid([season] * paid, season, delta=1e-5, lifetime=8.0) == 0
    assert seasons_paid([season] * (paid - 1), season, delta=1e-5, lifetime=8.0) == 1
    assert seasons_paid([], season, delta=1e-5, lifetime=math.inf) is None
    assert (
        seasons_paid([], Charge("device", DEVICE_ADJACENCY, "gaussian", 1e4, steps=1), delta=1e-5, lifetime=8.0) is None
    )


def test_values_without_noise_pay_for_no_season() -> None:
    season = Charge("device", DEVICE_ADJACENCY, "gaussian", 4.0, raw=("loss",))
    assert seasons_paid([], season, delta=1e-5, lifetime=8.0) == 0
