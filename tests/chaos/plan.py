"""What goes wrong in a run, drawn from a seed: the same seed gives the same plan for the same fleet.

The first trouble's kind goes round by the seed and comes early, so that it happens in any run; all else is drawn.
When a trouble comes is told by what has happened in the run, so that it meets the same step on any machine, and by
seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from chaos.proxy import SlowLink
from hushfleet.aggregator.broker.programs import BrokerKind

Kind = Literal["kill", "power-cut", "full-disk", "clock-jump", "cut-link", "flapping-link", "twin"]
What = Literal["update", "round_open", "round_close", "training", "committed", "sent", "seconds"]
Tampering = Literal["repeat", "reorder", "truncate", "forge"]

KINDS: tuple[Kind, ...] = get_args(Kind)
NEEDS_MACHINE = frozenset(("power-cut", "full-disk", "clock-jump"))
NEEDS_PROXY = frozenset(("cut-link", "flapping-link"))
AGGREGATOR, BROKER = "aggregator", "broker"
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Moment:
    """When the `count`th thing of this kind has happened; `training`, `committed` and `sent` are of the device `of`."""

    what: What
    count: int = 0
    of: str = ""


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong, `delay_s` after its moment.

    :param targets: devices, `aggregator` or `broker`.
    :param lasts_s: until they are started again, or have room or a network again.
    :param until: killed targets are started again as soon as this has happened; at the latest after `lasts_s`.
    :param again_s: the targets are killed again so long after they were started, that is, while they start.
    :param amount: of a power cut the share of unsynced data that stays; of a clock the seconds that it jumps; of a
        flapping link how often it breaks.
    """

    kind: Kind
    moment: Moment
    delay_s: float
    targets: tuple[str, ...]
    lasts_s: float
    again_s: tuple[float, ...] = ()
    amount: float = 0.0
    until: Moment | None = None


@dataclass(frozen=True)
class Plan:
    """All that goes wrong in one run.

    :param field_noise: the devices draw their noise as in the field: no model to compare, but two noisings of one
        round are two payloads.
    :param tampering: what a stranger on the broker does to copies of messages.
    :param hostile: the last device is played by somebody who sends bad updates.
    :param links: of devices whose network is slow.
    """

    seed: int
    broker: BrokerKind
    field_noise: bool
    tampering: tuple[Tampering, ...]
    hostile: str | None
    links: dict[str, SlowLink]
    troubles: tuple[Trouble, ...]

    @property
    def needs_proxy(self) -> bool:
        return bool(self.links) or any(trouble.kind in NEEDS_PROXY for trouble in self.troubles)


def draw_plan(seed: int, names: Sequence[str], *, rounds: int, kinds: Sequence[Kind] = KINDS) -> Plan:
    """:param names: of all devices; :param kinds: what this machine can do."""
    rng = random.Random(f"chaos {seed}")
    hostile = names[-1] if seed % 3 == 1 else None
    honest = [name for name in names if name != hostile]
    field_noise = seed % 5 == 3
    troubles: list[Trouble] = []
    if field_noise:
        troubles += tempting(rng, rng.choice(honest))
    first = kinds[seed % len(kinds)]
    troubles.append(_trouble(rng, first, honest, rounds, early=True, victim=seed // len(kinds) % 3))
    while rng.random() < 0.7 and len(troubles) < 5:
        troubles.append(_trouble(rng, rng.choice(kinds), honest, rounds))
    return Plan(
        seed=seed,
        broker="amqtt" if seed % 8 == 7 else "auto",
        field_noise=field_noise,
        tampering=_tampering(rng) if seed % 4 == 2 else (),
        hostile=hostile,
        links={name: _slow_link(rng) for name in honest if rng.random() < 0.5} if seed % 6 == 5 else {},
        troubles=tuple(troubles),
    )


def tempting(rng: random.Random, device: str) -> tuple[Trouble, Trouble]:
    """What tempts a device to noise again: its update is committed, or has left, nobody hears it, and it dies."""
    is_sent = rng.random() < 0.5
    deaf = (AGGREGATOR,) if is_sent else (BROKER, AGGREGATOR)
    moment = Moment("sent" if is_sent else "committed", 1, device)
    return (
        Trouble("kill", Moment("training", 1, device), 0.0, deaf, 2.0),
        Trouble("kill", moment, rng.uniform(0.0, 0.5), (device,), 0.0),
    )


def _trouble(
    rng: random.Random, kind: Kind, names: list[str], rounds: int, *, early: bool = False, victim: int | None = None
) -> Trouble:
    device = rng.choice(names)
    moment = _moment(rng, device, len(names), 1 if early else rounds)
    longest_s = 0.4 if early else 4.0  # a quick machine has a run behind it in two seconds
    delay_s = rng.uniform(0.0, longest_s) if moment.what == "seconds" else rng.choice([0.0, rng.uniform(0.0, 0.3)])
    lasts_s = rng.choice([0.0, rng.uniform(0.0, 1.5)])
    again_s: tuple[float, ...] = ()
    amount = 0.0
    targets: tuple[str, ...] = (device,)
    if kind in ("kill", "power-cut"):
        processes = [AGGREGATOR, BROKER] if kind == "kill" else [AGGREGATOR]
        parts = ["device", *processes]
        chosen = {part for part in parts if rng.random() < 0.3} or {rng.choice(parts)}
        if victim is not None:  # of the first trouble of a run, each in turn
            chosen.add(parts[victim % len(parts)])
        others = [name for name in names if name != device]
        devices = (device, *rng.sample(others, rng.choice([0, 0, 1, 3]))) if "device" in chosen else ()
        targets = (*(part for part in processes if part in chosen), *devices)
        again_s = tuple(rng.uniform(0.0, 2.0) for _ in range(rng.choice([0, 0, 1, 2])))
        amount = rng.choice([0.0, 0.5, 1.0]) if kind == "power-cut" else 0.0
    elif kind == "full-disk":
        targets = (rng.choice([device, AGGREGATOR]),)
        lasts_s = rng.uniform(0.5, 3.0)
    elif kind == "clock-jump":
        targets = tuple(name for name in (AGGREGATOR, *names) if rng.random() < 0.5) or (device,)
        amount = rng.choice([-1, 1]) * rng.uniform(0.01, 30) * _HOUR_S
    elif kind == "cut-link":
        targets = tuple(rng.sample(names, rng.choice([1, 2, len(names)])))
        lasts_s = rng.uniform(0.5, 3.0)
    elif kind == "flapping-link":
        targets = tuple(rng.sample(names, rng.choice([1, 2])))
        amount, lasts_s = rng.randint(3, 8), rng.uniform(1.0, 3.0)
    elif kind == "twin":
        lasts_s = rng.uniform(2.0, 4.0)
    return Trouble(kind, moment, delay_s, targets, lasts_s, again_s, amount)


def _moment(rng: random.Random, device: str, devices: int, rounds: int) -> Moment:
    """:param rounds: it comes in one of so many first rounds."""
    return rng.choice(
        [
            Moment("update", rng.randint(1, devices * rounds - 1)),
            Moment("update", rng.choice([devices - 1, devices])),  # around the close of a round
            Moment("round_open", rng.randint(1, rounds)),
            Moment("round_close", rng.randint(1, max(1, rounds - 1))),
            Moment("training", rng.randint(1, rounds), device),
            Moment("committed", rng.randint(1, rounds), device),
            Moment("sent", rng.randint(1, rounds), device),
            Moment("seconds"),
        ]
    )


def _tampering(rng: random.Random) -> tuple[Tampering, ...]:
    return tuple(rng.sample(get_args(Tampering), rng.randint(1, 4)))


def _slow_link(rng: random.Random) -> SlowLink:
    return SlowLink(
        bytes_per_s=rng.uniform(1e5, 1e6),
        latency_s=rng.uniform(0.001, 0.06),
        jitter_s=rng.uniform(0.0, 0.03),
        stall=rng.uniform(0.0, 0.1),
        stall_s=rng.uniform(0.0, 0.5),
    )
