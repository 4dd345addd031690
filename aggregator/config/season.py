"""`[season]` of the task file: the fleet repeats the task in each period, and goes on with what it has learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.aggregator.config import rules
from hushfleet.aggregator.config.schedule import Every, period_of
from hushfleet.schema import Checked, PositiveOrInf


@dataclass(frozen=True, kw_only=True)
class SeasonSection(Checked):
    """`[season]`: the fleet service starts the task again in each period, as a new season with a run of its own, named
    NAME-2, NAME-3 and so on. The first season begins with its first round, and each other one `every` later.

    :param every: length of a season, such as `"90d"`. Whole days are calendar days. It should be `limits.per` of the
        boards.
    :param epsilon: of each season; it is `privacy.epsilon` of the task, and may be written in either place.
    :param lifetime: epsilon over all seasons together, at the boards' delta. A season that would exceed it does not
        begin. `inf`: `limits.epsilon_lifetime` of the boards alone ends the seasons.
    :param start: the model with which a season begins: `last`, that of the season before; or `anew`, as the first
        began.
    :param classes: a file with the names of classes, one a line, which is read when a season begins. Names that are new
        are added after `data.class_names`. A relative path starts at the task file's folder.
    :param number: of the season; written by the fleet service.
    :param first: when the first season began, unix seconds; written by the fleet service.
    """

    every: Every
    epsilon: Annotated[float, Meta(ge=1e-6, le=10_000)] | None = None
    lifetime: PositiveOrInf = math.inf
    start: Literal["last", "anew"] = "last"
    classes: str | None = None
    number: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    first: Annotated[float, Meta(ge=0, le=1e11, description="unix seconds")] | None = None

    rules = rules.SEASON

    @property
    def period(self) -> timedelta:
        """`every` as a duration."""
        return period_of(self.every)

    def base(self, name: str) -> str:
        """Returns the name of the first season's task, from the name of this season's."""
        return name.removesuffix(f"-{self.number}") if self.number > 1 else name

    @staticmethod
    def name(base: str, number: int) -> str:
        """Returns the name of a season's task, from the name of the first one's."""
        return base if number == 1 else f"{base}-{number}"
