"""Says what remains of a board that has left a fleet: what it spent, which models it is in, and what that bounds.

All of it follows from the fleet's folder: the register of charges, the registry of boards, and the runs' event logs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.report import page
from hushfleet.aggregator.report.readable import epsilon_number, number
from hushfleet.aggregator.report.tables import Table
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.fleet_state import Event
from hushfleet.aggregator.storage.activity import ActivityStore, counted_charges
from hushfleet.durations import Period
from hushfleet.errors import BadInput
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.protection import guess_rate, noticed_rate, protection

ALARMS = 0.01
"""The rate of false alarms of the test that the page speaks of."""
NOT_BOUNDED = (
    "What its owner keeps: its samples, ledger, personalized models and last update stay on its card until the owner "
    "erases it.",
    "What was copied: the server drops each single update when its round closes, and keeps sums and models; but its "
    "database may keep freed blocks, and nobody can tell whether somebody has recorded the network.",
    "When it took part, how much it sent and why it declined: the runs' logs say it until a person deletes them.",
    "What the server does not know: the board's own ledger decides, and may have more, of other fleets too.",
    "Released models cannot be recalled.",
)


@dataclass
class Part:
    """A board's part in a run, by its log.

    :param continues: the task whose model it continues; empty if none, or if the log is of an earlier version.
    :param stated: the total of this task that the board has stated last.
    :param released: the steps of rounds that made a model and have an update of the board.
    """

    task: str = ""
    continues: str = ""
    accepted: int = 0
    stated: float | None = None
    released: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Departed:
    """A board that has left. Epsilons are at `delta`, over all tasks and cards of the id.

    :param how: `locked out: stolen`, or `forgotten`.
    :param tasks: for each task its facts in words; `periods`: likewise.
    :param raw: values that it has sent without noise.
    """

    device: str
    how: str
    unit: str
    delta: float
    server: float
    release: float
    tasks: Table
    periods: Table
    raw: tuple[str, ...]

    @property
    def sentences(self) -> list[str]:
        """The sentences that say how the board left, and how much its models and its updates reveal."""
        what = f"{self.device} has left: {self.how}"
        if not self.server:
            return [f"{what}. No charge of it was ever noted, and no model has an update of it"]
        unit = "it took part" if self.unit == "device" else "one record of it was there"
        readers, server = (self._bound(each, unit) for each in (self.release, self.server))
        known = f"Sent without noise, which no epsilon bounds: {'; '.join(self.raw)}." if self.raw else ""
        return [
            f"{what}. What its models reveal of it stays bounded, whatever is trained from them later.",
            f"Whoever has all of the models, and nothing else: {readers} (epsilon_release).",
            f"Whoever has also seen what it sent: {server} (epsilon_server).",
            *([known] if known else ()),
        ]

    def _bound(self, epsilon: float, unit: str) -> str:
        guessed, noticed = (
            f"{math.floor(1000 * each + 0.999) / 10:.1f} %"
            for each in (guess_rate(epsilon, self.delta), noticed_rate(epsilon, self.delta, alarms=ALARMS))
        )
        return (
            f"epsilon {epsilon_number(epsilon)} at delta {number(self.delta)}, {protection(epsilon)}: whether {unit} "
            f"is guessed right at most {guessed} of the time; a test with {ALARMS:.0%} false alarms notices it at most "
            f"{noticed} of the time"
        )

    @property
    def parts(self) -> list[tuple[str, Table]]:
        return [("By task", self.tasks), ("By period", self.periods)]

    def html(self) -> str:
        tables = [page.Section(title[3:], title, "", [table]) for title, table in self.parts]
        rest = page.Section("not", "What this does not bound", "", [page.Prose(NOT_BOUNDED)])
        return page.page(f"What remains of {self.device}", [*tables, rest], answer=self.sentences)


def departed(folder: FleetFolder, device: str) -> Departed:
    """Returns what remains of a board. Raises `BadInput` for one that was never there, or has not left."""
    with FleetRegistry(folder.path) as registry, ActivityStore(folder.aggregator) as register:
        board, reason = registry.board(device), register.blocked().get(device)
        rows = register.dated_charges(device)
    if board is None and not rows:
        raise BadInput(f"{device} was never in {folder.path}, or nothing of it was noted")
    if board is not None and not board.is_blocked and reason is None:
        raise BadInput(
            f"{device} is in the fleet ({board.standing}); first: hushfleet fleet block {folder.path} {device}, or "
            "fleet forget"
        )
    reason = board.reason if board is not None and board.is_blocked else reason
    spending = Spending(folder.config.device.get("limits", {}))
    charges = counted_charges(Counter(packed for _, _, packed, _ in rows).items())
    server = epsilon_server_of(charges, delta=spending.delta)
    runs = [_part(log, device) for log in sorted(folder.path.glob("runs/*/events.jsonl"))]
    by_record = any(each.unit == "record" for each in charges)
    raw = dict.fromkeys(value for each in charges for value in each.raw)
    steps = [step for run in runs for step in run.released]
    alone = by_record or bool(raw and steps)  # no other board's noise hides records, or covers raw values
    return Departed(
        device,
        "forgotten" if reason is None else f"locked out: {reason}",
        "record" if by_record else "device",
        spending.delta,
        server,
        server if alone else epsilon(steps, delta=spending.delta),
        Table(
            ("task", "rounds charged", "updates in models", "epsilon", "stated by it", "its models"),
            [*_tasks(rows, runs, _present(folder, runs), spending.delta)],
        ),
        Table(("from", "to", "rounds charged", "epsilon"), [*_periods(rows, spending)]),
        tuple(raw),
    )


def _part(log: Path, device: str) -> Part:
    part, rounds = Part(), set[int]()
    for event in iterate_events(log):
        if event["event"] == "run":
            part.task, part.continues = event.get("task", ""), event.get("continues") or ""
        elif event["event"] == "update" and event.get("device") == device and event.get("code") == "accepted":
            part.stated = event.get("epsilon_server") or part.stated
            rounds.add(event["round"])
        elif event["event"] == "round_close" and event["round"] in rounds and _made_model(event):
            part.accepted += 1
            part.released += (Step(event["multiplier_release"], event.get("sample_rate", 1.0), event.get("steps", 1)),)
    return part


def _made_model(event: Event) -> bool:
    return event.get("multiplier_release") is not None  # 0 without noise


def _present(folder: FleetFolder, runs: list[Part]) -> list[str]:
    """Returns the fleet's present task, and those whose models it continues, the newest first."""
    continues, chain = {run.task: run.continues for run in runs}, list[str]()
    log = folder.run / "events.jsonl"
    task = _part(log, "").task if log.exists() else ""
    while task and task not in chain:
        chain.append(task)
        task = continues.get(task, "")
    return chain


def _tasks(
    rows: list[tuple[str, int, bytes, int]], runs: list[Part], present: list[str], delta: float
) -> Iterator[tuple[str, ...]]:
    parts = {run.task: run for run in runs}
    for task in sorted({task for task, _, _, _ in rows}):
        part, (rounds, spent) = parts.get(task), _spent([row for row in rows if row[0] == task], delta)
        if part is None:
            use = "the run's folder is gone"
        elif not part.accepted:
            use = "none has an update of it"
        elif task in present:
            use = "in use: the fleet's present task" if task == present[0] else f"in use: {present[0]} continues them"
        else:
            use = "not in use; kept in the run's folder"
        said = ("", "") if part is None else (f"{part.accepted}", number(part.stated))
        yield task, rounds, said[0], spent, said[1], use


def _periods(rows: list[tuple[str, int, bytes, int]], spending: Spending) -> Iterator[tuple[str, ...]]:
    length = 0 if spending.budget is None else spending.budget.period_s
    for period in sorted({Period.of(at, length or 90 * 86400) for _, _, _, at in rows}):
        days = (time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (period.start, period.stop - 1))
        yield *days, *_spent([row for row in rows if period.holds(row[3])], spending.delta)


def _spent(rows: list[tuple[str, int, bytes, int]], delta: float) -> tuple[str, str]:
    charges: list[Charge] = counted_charges(Counter(packed for _, _, packed, _ in rows).items())
    return f"{len(rows)}", epsilon_number(epsilon_server_of(charges, delta=delta))
