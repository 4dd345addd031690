"""What goes wrong in the life of a fleet, drawn from a seed: blank boards enrol, train, are updated, one is locked out.

The first trouble's step, and what it strikes, go round by the seed; all else is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Step = Literal[
    "powered on", "key made", "granted", "certificate kept", "token erased", "known to the aggregator", "round open",
    "renewed", "round closed", "offered", "fetching", "handed over", "installed", "on trial", "healthy", "blocked",
]  # fmt: skip
Part = Literal["board", "service", "aggregator", "broker", "enrolment broker"]
Kind = Literal["kill", "full-disk", "clock-jump"]

STEPS: tuple[Step, ...] = get_args(Step)
PARTS: tuple[Part, ...] = get_args(Part)
KINDS: tuple[Kind, ...] = get_args(Kind)
BOARDS = 3
_DAY_S = 86400.0


@dataclass(frozen=True)
class Trouble:
    """:param step: of the board with this number, from 0; :param delay_s: after that.
    :param targets: what is killed, `board` for that board; of the other kinds it is the board.
    :param lasts_s: until it is started again, or has room again.
    :param again_s: killed once more so long after its start; 0 for no.
    :param jump_s: of the board's clock.
    """

    kind: Kind
    step: Step
    board: int
    targets: tuple[Part, ...]
    delay_s: float
    lasts_s: float
    again_s: float = 0.0
    jump_s: float = 0.0


@dataclass(frozen=True)
class LifePlan:
    """:param is_good: whether the release of the roll-out is; a bad one crashes.
    :param blocked: number of the board that is locked out, while the release goes round or afterwards.
    :param desk_dies_s: when the command that locks it out is killed for the first time.
    """

    seed: int
    is_good: bool
    blocked: int
    blocked_early: bool
    desk_dies_s: float
    troubles: tuple[Trouble, ...]


def draw_life(seed: int, *, kinds: Sequence[Kind] = KINDS) -> LifePlan:
    """:param kinds: what this machine can do."""
    rng = random.Random(f"life {seed}")
    first = _trouble(rng, "kill", STEPS[seed % len(STEPS)], PARTS[seed % len(PARTS)])  # 16 and 5 have no common factor
    others = [_trouble(rng, rng.choice(("kill", *kinds)), rng.choice(STEPS)) for _ in range(rng.randint(3, 6))]
    return LifePlan(
        seed=seed,
        is_good=seed % 4 != 3,
        blocked=rng.randrange(BOARDS),
        blocked_early=rng.random() < 0.5,
        desk_dies_s=rng.uniform(0.0, 1.5),
        troubles=(first, *others),
    )


def _trouble(rng: random.Random, kind: Kind, step: Step, part: Part | None = None) -> Trouble:
    targets = {each for each in PARTS if rng.random() < 0.25} | {part or rng.choice(PARTS)}
    return Trouble(
        kind=kind,
        step=step,
        board=rng.randrange(BOARDS),
        targets=tuple(each for each in PARTS if each in targets) if kind == "kill" else ("board",),
        delay_s=rng.choice([0.0, rng.uniform(0.0, 0.5)]),
        lasts_s=rng.choice([0.0, rng.uniform(0.0, 1.5)]) if kind == "kill" else rng.uniform(0.5, 2.0),
        again_s=rng.choice([0.0, 0.0, rng.uniform(0.1, 2.0)]) if kind == "kill" else 0.0,
        jump_s=rng.choice([-1, 1]) * rng.uniform(0.1, 1.0) * _DAY_S if kind == "clock-jump" else 0.0,
    )
