"""What a board spends in any interval of true time, whatever its clock, its power and its fleet's statements do.

The board spends as much as it may at each step. Time is drawn so that periods begin and end around starts, statements
and jumps of the clock. The bound is that of `hushfleet.privacy.budget`.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hushfleet.edge_client.board.budget_clock import AGREE_S, BudgetClock
from hushfleet.errors import BudgetExceeded
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.ledger import Ledger, epsilon_server_of
from hushfleet.privacy.mechanism import GaussianMechanism
from support.stores import memory_ledger

HOUR, DAY = 3600, 86400
MOST = 2  # charges that a period pays for
CHARGE = GaussianMechanism(4.0).charge()
LIMIT = epsilon_server_of(MOST * [CHARGE], delta=1e-5)
BEGINS = 1_750_000_000


class World:
    """The true time, and what a board sees of it: all in whole seconds.

    :param has_fleet: whether anybody signs statements of the time.
    :param wrong_s: how far both the clock and a statement that agrees with it may be wrong; negative: behind.
    :ivar offset: of the board's clock from the true time. The clock is right where it would otherwise agree with a
        statement that is also further behind.
    """

    def __init__(self, ledger: Ledger, period_s: int, *, has_fleet: bool = True, wrong_s: int = 0) -> None:
        self.ledger, self.budget = ledger, Budget(1e-5, math.inf, LIMIT, period_s)
        self.true, self.offset, self.said, self.has_fleet = BEGINS, 0, 0, has_fleet
        self.ahead_s, self.behind_s = max(0, wrong_s), max(0, -wrong_s)
        self.ran = 0
        self.spent: list[int] = []  # true times
        self.clock = self.started()

    def started(self) -> BudgetClock:
        self.ran, self.heard = 0, False
        witness = (lambda: float(self.said)) if self.has_fleet else None
        return BudgetClock(self.ledger, wall=self.wall, monotonic=lambda: float(self.ran), witness=witness)

    def wall(self) -> float:
        shown = self.true + self.offset
        if self.heard and abs(shown - self.said) <= AGREE_S:
            shown = max(shown, self.true - self.behind_s)
        return float(shown)

    def run(self, seconds: int) -> None:
        """The client runs, and counts now and then."""
        for part in (seconds // 2, seconds - seconds // 2):
            self.true, self.ran = self.true + part, self.ran + part
            self.clock.tick()

    def off(self, seconds: int, *, killed: bool = False) -> None:
        if not killed:
            self.clock.save()
        self.true += seconds
        self.clock = self.started()

    def hear(self, ago: int) -> None:
        """A statement arrives that was signed so long ago; a board takes newer ones only."""
        if self.has_fleet and (said := self.true + self.ahead_s - ago) > self.said:
            self.said, self.heard = said, True

    def spend(self, training_s: int = 0, meanwhile: int | None = None) -> int:
        """Takes part in rounds until one is refused; returns in how many.

        :param meanwhile: age of a statement that arrives during a training.
        """
        for count in range(3 * MOST):
            try:
                self.budget.check(self.ledger, CHARGE, now=self.clock.now())
            except BudgetExceeded:
                return count
            self.run(training_s)
            if meanwhile is not None:
                self.hear(meanwhile)
            self.ledger._connection.execute("BEGIN")
            of = {"task": "t", "round": len(self.spent), "payload_digest": bytes(32)}
            self.ledger.charge(CHARGE, at=self.clock.now(), **of)
            self.ledger._connection.execute("COMMIT")
            self.spent.append(self.true)
        return 3 * MOST

    def most_in(self, seconds: int) -> int:
        """The most charges in a true interval of this length, without its end."""
        return max((sum(at <= each < at + seconds for each in self.spent) for at in self.spent), default=0)


Step = tuple[str, int, bool]


def steps(period_s: int) -> st.SearchStrategy[list[Step]]:
    """What happens to a board: a kind, seconds, and whether the board then spends what it may."""
    around = st.sampled_from([-2 * HOUR, -HOUR - 60, -60, 0, 60, HOUR + 60, 5 * HOUR])
    some = [60, 3000, HOUR, DAY, 3 * DAY, period_s // 7, period_s, 5 * period_s]
    duration = st.sampled_from(some) | st.integers(1, period_s)
    age = st.sampled_from([0, 0, 0, 600, DAY - 1]) | duration
    offset = st.sampled_from([0, 0, DAY, 400 * DAY, -DAY, -400 * DAY]) | duration.map(lambda by: -by)
    kinds = {
        **dict.fromkeys(("run", "off", "killed", "train"), duration),
        **dict.fromkeys(("to a true boundary", "off to a true boundary", "to a counted boundary"), around),
        **dict.fromkeys(("hear", "train and hear"), age),
        "set the clock": offset,
    }
    step = st.one_of(*(st.tuples(st.just(kind), amounts, st.booleans()) for kind, amounts in kinds.items()))
    return st.lists(step, min_size=4, max_size=24)


def play(world: World, story: list[Step]) -> None:
    period_s = int(world.budget.period_s)
    for kind, amount, spends in story:
        if kind == "run":
            world.run(amount)
        elif kind in ("off", "killed"):
            world.off(amount, killed=kind == "killed")
        elif kind == "hear":
            world.hear(amount)
        elif kind == "set the clock":
            world.offset = amount
        elif kind == "to a true boundary":
            world.run((amount - world.true) % period_s)
        elif kind == "off to a true boundary":
            world.off((amount - world.true) % period_s)
        elif kind == "to a counted boundary":
            world.run((amount - world.clock.now()) % period_s)
        elif kind == "train":
            world.spend(amount)
        else:
            world.spend(HOUR, amount)
        if spends:
            world.spend()


PERIODS = [HOUR, DAY, 90 * DAY]
STORIES = st.sampled_from(PERIODS).flatmap(lambda period_s: st.tuples(st.just(period_s), steps(period_s)))
LATE = [  # a board that was off spends around the beginning of a counted period, and then hears the time
    ("off to a true boundary", -60, True),
    ("off", 12 * DAY, True),
    ("to a true boundary", -60, False),
    ("train", 12 * DAY, False),
    ("to a true boundary", 0, False),
    ("hear", 0, True),
]
TOO_EARLY = [
    ("set the clock", -DAY, False),
    ("to a true boundary", 60, True),
    ("hear", 0, True),
    ("to a true boundary", 0, True),
]
OLD_STATEMENT = [
    ("off to a true boundary", 0, True),
    ("off to a true boundary", -60, False),
    ("hear", HOUR, False),
    ("to a counted boundary", 0, False),
    ("to a counted boundary", -60, True),
    ("hear", 0, True),
    ("to a true boundary", 0, True),
]
KNOWN_BEFORE = [
    ("hear", 0, False),
    ("off", HOUR, False),
    ("set the clock", -DAY, True),
    ("hear", 0, True),
    ("to a counted boundary", 0, True),
]


@settings(max_examples=200, deadline=None)
@given(STORIES)
@example((90 * DAY, LATE))
@example((90 * DAY, TOO_EARLY))
@example((90 * DAY, OLD_STATEMENT))
@example((HOUR, KNOWN_BEFORE))
def test_no_interval_of_a_periods_length_costs_more_than_two_limits(story: tuple[int, list[Step]]) -> None:
    period_s, what = story
    with memory_ledger() as ledger:
        world = World(ledger, period_s)
        play(world, what)
        assert world.most_in(period_s) <= 2 * MOST


@settings(max_examples=100, deadline=None)
@given(steps(90 * DAY), st.sampled_from([-AGREE_S, -DAY, -HOUR, HOUR, DAY, 30 * DAY]))
def test_where_clock_and_statement_are_wrong_in_the_same_direction_the_interval_is_shorter_by_that(
    story: list[Step], wrong_s: int
) -> None:
    with memory_ledger() as ledger:
        world = World(ledger, 90 * DAY, wrong_s=wrong_s)
        play(world, story)
        assert world.most_in(90 * DAY - abs(wrong_s)) <= 2 * MOST


@settings(max_examples=100, deadline=None)
@given(STORIES)
def test_a_board_that_nobody_tells_the_time_keeps_the_bound(story: tuple[int, list[Step]]) -> None:
    period_s, what = story
    with memory_ledger() as ledger:
        world = World(ledger, period_s, has_fleet=False)
        play(world, what)
        assert world.most_in(period_s) <= 2 * MOST


@pytest.mark.parametrize("off_s", [0, 20 * HOUR], ids=["always on", "on at night"])
def test_a_board_of_a_fleet_gets_its_whole_limit_in_each_period(off_s: int) -> None:
    with memory_ledger() as ledger:
        world = World(ledger, 30 * DAY)
        world.off(-world.true % (30 * DAY))
        for day in range(120):
            world.hear(10 * HOUR)
            if day % 10 == 5:
                world.spend()
            world.run(DAY - off_s)
            if off_s:
                world.off(off_s)
        assert len(world.spent) == 4 * MOST


def test_three_periods_in_five_hours_are_two() -> None:
    """A board that was off for a quarter starts some hours before a period begins; the statement comes later."""
    with memory_ledger() as ledger:
        world = World(ledger, 90 * DAY)
        world.off(80 * DAY - world.true % (90 * DAY))
        world.hear(0)
        assert world.spend() == MOST
        world.off(100 * DAY - 6 * HOUR)
        spent = [world.spend()]
        world.run(60)
        world.hear(0)
        spent.append(world.spend())
        world.run(7 * HOUR)
        spent.append(world.spend())
        assert spent == [0, MOST, MOST]
