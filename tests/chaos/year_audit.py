"""What happens in a year of `chaos.year`, and what must be true afterwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaos.year import DAY_S, LIMITS, TASKS, ZONE, Card, Year
from hushfleet.aggregator.fleet.software.releases import add_release
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.durations import Period
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerEntry, epsilon_server_of
from hushfleet.schema import unpack
from hushfleet.wire.format.identity import Identity
from support.desk import adopt
from support.slots import packed

STOLEN, REFLASHED = 1, 2
"""Places of boards in the list of names."""
RELEASE_KEY = Identity.generate()


def play(year: Year, folder: Path) -> None:
    """All that happens in the year."""
    outage_due = True
    adopt(year.desk.folder, RELEASE_KEY)
    stolen, reflashed = year.names[STOLEN], year.names[REFLASHED]
    for day in range(365):
        for task in TASKS[1:]:
            if task.begins == day:
                year.begin_task(task)
        if day == 100:
            year.lock_out(stolen)
        elif day == 150:
            year.flash_anew(reflashed)
        elif day in (170, 310):
            release(year, folder, "0.4.0" if day == 170 else "0.5.0")
        elif day == 200:
            before = year.hub.retained[year.topics.round]
            year.move(folder / "machine-2")
        if day % 30 == 0:
            year.renew_certificates()
        ran = year.night(day, outage=outage_due and day > 40)
        outage_due = outage_due and not (ran and day > 40)
        if ran and 200 < day < 240:
            refused = year.refusals_of(before)
            assert year.heard <= refused.keys(), "a plan of the old machine"
            assert all("came again" in said for said in refused.values())


def release(year: Year, folder: Path, version: str) -> None:
    """The operator offers a release; how boards install it is another test (`test_rollout_whole`)."""
    out = folder / f"{version}.hfr"
    out.write_bytes(packed(version, RELEASE_KEY))
    add_release(year.desk.folder, year.desk.registry, out)


def oracle(charges: Sequence[Charge]) -> float:
    """Returns epsilon of Gaussian charges by the formula of Balle and Wang (2018), solved by halving."""
    mu = math.sqrt(sum(charge.steps / charge.noise_multiplier**2 for charge in charges))
    if not mu:
        return 0.0

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def delta(epsilon: float) -> float:
        return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)

    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > LIMITS["delta"] else (low, middle)
    return high


def check_ledger(card: Card, entries: Sequence[LedgerEntry]) -> None:
    """Checks that the ledger has what the card has spent, and that its owner's limits were kept."""
    own = entries[card.carried :]
    assert [(entry.task, entry.round) for entry in own] == list(dict.fromkeys(card.committed))
    charges = [entry.charge for entry in entries]
    assert epsilon_server_of(charges, delta=LIMITS["delta"]) == pytest.approx(oracle(charges), rel=1e-4)
    assert oracle(charges) <= LIMITS["epsilon_lifetime"]
    # what earlier cards spent counts as of the new card's first day, and may hold it back for a period
    for period in {Period.of(entry.at, 90 * DAY_S) for entry in own}:
        assert oracle([entry.charge for entry in entries if period.holds(entry.at)]) <= LIMITS["epsilon_server"]
    for entry in own:
        assert (entry.window is not None) == (entry.task == "autumn")
        assert entry.window is None or entry.window.holds(entry.at)


def check_book(year: Year, name: str, cards: Sequence[Card], accepted: Container[tuple[str, str, int]]) -> None:
    """Checks that the aggregator has noted as many charges as each card of this id has, and not too little.

    :param accepted: device, task and round of each update that arrived. Of rounds whose update was lost the aggregator
        learns only how many the board has trained in.
    """
    rows = year.server.register.charges(name)
    book = {(task, round): unpack(Charge, packed, what="a charge") for task, round, packed in rows}
    for card in cards:
        entries = card.entries
        for entry in entries:
            if (name, entry.task, entry.round) in accepted:
                assert book[entry.task, entry.round].noise_multiplier <= entry.charge.noise_multiplier
        rounds = Counter(task for task, _ in book)
        assert Counter(entry.task for entry in entries) <= rounds
        spent = epsilon_server_of([entry.charge for entry in entries], delta=LIMITS["delta"])
        assert epsilon_server_of([*book.values()], delta=LIMITS["delta"]) >= spent - 1e-9


def all_events(year: Year, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the events of this kind, each with its task."""
    logs = {task.name: year.desk.folder.path / "runs" / task.name / "events.jsonl" for task in TASKS}
    return [(task, event) for task, log in logs.items() for event in iterate_events(log) if event["event"] == kind]


def check_rhythm(year: Year) -> None:
    """Checks that rounds opened at night, so many days apart, in summer time as well."""
    opened: list[datetime] = []
    for task in TASKS:
        events = [*iterate_events(year.desk.folder.path / "runs" / task.name / "events.jsonl")]
        at = {e["round"]: datetime.fromtimestamp(e["at"], ZONE) for e in events if e["event"] == "round_open"}
        waited = {e["round"] for e in events if e["event"] == "waits" and e["spent"]}  # too few could pay on its day
        days = {number: (at[number].date() - at[before].date()).days for before, number in pairwise(at)}
        assert {each for number, each in days.items() if number not in waited} == {year.every_days}
        assert all(each >= year.every_days for each in days.values())
        opened += at.values()
        prompt = {moment.hour for number, moment in at.items() if number not in waited}
        assert prompt <= {1, 3}, "2 o'clock is missing in the night in which summer time begins"
    assert {at.hour for at in opened} <= {1, 2, 3, 4}, "a board can pay again when its period begins, in this night"
    assert len({at.utcoffset() for at in opened}) == 2


def check_year(year: Year) -> None:
    cards: dict[str, list[Card]] = {name: [] for name in year.names}
    for card in [*year.lost_cards, *year.cards.values()]:
        cards[card.name].append(card)
    updates = [(task, event) for task, event in all_events(year, "update") if event["code"] == "accepted"]
    accepted = {(event["device"], task, event["round"]) for task, event in updates}
    for name, all_cards in cards.items():
        for card in all_cards:
            check_ledger(card, card.entries)
        check_book(year, name, all_cards, accepted)
    declined = [event["reason"] for _, event in all_events(year, "decline")]
    assert "in 90 days" in " ".join(declined), "the limit of a quarter was reached"
    stolen, reflashed = year.names[STOLEN], year.names[REFLASHED]
    assert {task for task, _ in year.cards[stolen].committed} == {"spring"}, "nothing after it was locked out"
    old, new = cards[reflashed]
    assert old.asker.identity.public_key != new.asker.identity.public_key
    spent, inherited = (Counter(entry.task for entry in card.entries) for card in (old, new))
    assert spent <= inherited, "a new card inherits"
    assert all(card.certificates >= 3 for card in year.cards.values() if card.name not in (stolen, reflashed))
    check_rhythm(year)
