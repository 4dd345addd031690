"""The life of a fleet through the storm of its plan: real brokers, fleet service and aggregator, emulated boards."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from chaos.life_plan import BOARDS, LifePlan, Part, Step, Trouble
from chaos.machine import Machine
from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.processes import FleetProcess, brokers_of, started
from hushfleet.aggregator.fleet.software.releases import add_release, trust
from hushfleet.aggregator.fleet.software.rollout import begin, board_rollouts, current
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.errors import HushfleetError
from hushfleet.wire.format.identity import Identity
from support.desk import TASK, Board, adopt, make_folder
from support.releases import build_release, crashes
from support.systemd import EmulatedBoard

ROUNDS = 2
PATIENCE_S = 150.0  # of a chapter
OLD, NEW = "1.0", "2.0"
_COMMANDS = (sys.executable, "-c", "from hushfleet.aggregator.commands.main import main; main()")
# The certificate of a board begins an hour early: of so short a one two thirds are over at once, so each start renews.
_CERTIFICATE_DAYS = 1500 / 86400
_TURN_S = 0.02


class Releases:
    """Built once for all lives."""

    def __init__(self, folder: Path) -> None:
        self.key = key = Identity.generate()
        self.old = build_release(folder / "old.hfr", OLD, key=key)
        self.good = build_release(folder / "good.hfr", NEW, key=key)
        self.bad = build_release(folder / "bad.hfr", NEW, key=key, change=crashes)


@dataclass
class _Due:
    at: float
    act: Callable[[], None]


@dataclass
class Life:
    """:param library: of `build_library`; None: no full disks and wrong clocks.
    :param played: trouble -> how often it happened; :param wrong: what did not hold while it ran.
    """

    plan: LifePlan
    home: Path
    releases: Releases
    library: Path | None = None
    played: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        task = TASK.replace("devices = 2", f"devices = {BOARDS}").replace("rounds = 2", f"rounds = {ROUNDS}")
        self.folder: FleetFolder = make_folder(
            self.home / "greenhouse", boards=BOARDS, task=task, certificate_days=_CERTIFICATE_DAYS
        )
        adopt(self.folder, self.releases.key)
        file = self.folder.path / "fleet.toml"
        text = file.read_text().replace("soak_minutes = 10.0", "soak_minutes = 0.0")
        text = text.replace("epsilon_server = 8.0", "epsilon_server = inf")  # with which the aggregator counts, too
        file.write_text(text.replace("kib_per_second = 1024.0", "kib_per_second = 300.0"))
        self.devices = [f"greenhouse-{number + 1:02d}" for number in range(BOARDS)]
        self.tokens: list[bytes] = []
        self.cards: list[Board] = []
        self.machines: list[Machine] = []
        self.boards = [self._board(device) for device in self.devices]
        self._due: list[_Due] = []
        self._pending = list(self.plan.troubles)
        self._children: dict[str, FleetProcess] = {}
        self._dead: set[int] = set()

    def _board(self, device: str) -> EmulatedBoard:
        home = self.home / device
        card = Board(self.folder, home, device)
        card.store.close()
        self.cards.append(card)
        self.tokens.append(card.token_file.read_bytes())
        rng = np.random.default_rng(len(self.cards))
        images = rng.integers(0, 256, (30, 1, 8, 8), dtype=np.uint8)
        np.savez(home / "images.npz", images=images, labels=rng.integers(0, 10, 30, dtype=np.int64))
        text = card.file.read_text().replace('"folder"', '"arrays"').replace("/var/lib/hushfleet-images", "images.npz")
        text = text.replace("epsilon_server = 8.0", "epsilon_server = inf")
        card.file.write_text(text.replace("[fleet]\n", f'[fleet]\nreleases = "{home / "opt"}"\n'))
        environment = {}
        if self.library is not None:
            self.machines.append(Machine(home / "state", home / "machine", library=self.library))
            environment = self.machines[-1].environment
        board = EmulatedBoard(home, preloaded=environment)
        board.install(self.releases.old, trust=trust(self.folder))
        return board

    # the chapters

    def live(self) -> None:
        """Blank boards, roll-out, lock-out. Raises `HushfleetError` where one of them does not come to its end."""
        service = self.child("service", "fleet", "serve", str(self.folder.path))
        aggregator = self.child("aggregator", "aggregator", "--fleet", str(self.folder.path))
        with contextlib.ExitStack() as stack:
            brokers = stack.enter_context(started(self.folder, brokers_of(self.folder)))
            names = ("broker", "enrolment broker", "service", "aggregator")
            children = stack.enter_context(started(self.folder, (service, aggregator)))
            self._children = dict(zip(names, (*brokers, *children), strict=True))
            for board in self.boards:
                stack.callback(board.cut_power)
                board.__enter__()
            self._registry = stack.enter_context(FleetRegistry(self.folder.path))
            self._register = stack.enter_context(members_of(self.folder))
            self._until("every board is enrolled", self._all_enrolled)
            self._until("every round is closed", lambda: self._rounds("round_close") == ROUNDS)
            release = self.releases.good if self.plan.is_good else self.releases.bad
            add_release(self.folder, self._registry, release)
            begin(self._registry, NEW, now=time.time())
            if self.plan.blocked_early:
                self._lock_out()
            self._until("the roll-out has ended", self._roll_out_ended)
            if not self.plan.blocked_early:
                self._lock_out()
            self._until("all that was struck is back", lambda: not self._due)
            self._until("the lock-out is known to all", self._is_out)

    def child(self, name: str, *arguments: str) -> FleetProcess:
        return FleetProcess(name, [*_COMMANDS, *arguments], self.folder.logs / f"{name}.log")

    def _all_enrolled(self) -> bool:
        return all(
            row.standing == "enrolled" and not card.token_file.exists() and row.health is not None
            for row, card in zip(self._registry.boards(), self.cards, strict=True)
        )  # fmt: skip

    def _roll_out_ended(self) -> bool:
        rollout = current(self._registry)
        assert rollout is not None
        found = board_rollouts(self._registry, rollout, now=time.time())
        return rollout.state == "stopped" or all(board.outcome == "good" for board in found)

    def _lock_out(self) -> None:
        """By the command, which is killed and typed again."""
        device = self.devices[self.plan.blocked]
        desk = self.child("desk", "fleet", "block", str(self.folder.path), device, "--reason", "lost")
        for patience_s in (self.plan.desk_dies_s, PATIENCE_S):
            desk.start()
            over = partial(self._is_over, desk, time.monotonic() + patience_s)
            self._until("the command is over", over)
            _kill(desk)

    def _is_over(self, child: FleetProcess, gives_up_at: float) -> bool:
        assert child.process is not None
        return child.process.poll() is not None or time.monotonic() >= gives_up_at

    def _is_out(self) -> bool:
        row = self._register.device(self.devices[self.plan.blocked])
        return row is not None and row.is_blocked

    def _rounds(self, event: str) -> int:
        file = self.folder.run / "events.jsonl"
        return sum(each["event"] == event for each in iterate_events(file)) if file.exists() else 0

    # the storm

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """Strikes what is due until the condition holds."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            now = time.monotonic()
            if now > give_up:
                raise HushfleetError(f"it has not come so far that {what}")
            for trouble in [each for each in self._pending if self._has_reached(each.step, each.board)]:
                self._pending.remove(trouble)
                self._due.append(_Due(now + trouble.delay_s, lambda trouble=trouble: self._strike(trouble)))
            for due in [each for each in self._due if each.at <= now]:
                self._due.remove(due)
                due.act()
            self._look_at_releases()
            time.sleep(_TURN_S)

    def _strike(self, trouble: Trouble) -> None:
        back_at, board = time.monotonic() + trouble.lasts_s, trouble.board
        for part in trouble.targets:
            self.played[f"{trouble.kind} of {part} at {trouble.step}"] += 1
            if trouble.kind == "kill":
                self._kill(part, board)
                self._due.append(_Due(back_at, lambda part=part: self._start(part, board)))
                if trouble.again_s:
                    self._due.append(_Due(back_at + trouble.again_s, lambda part=part: self._kill(part, board)))
                    self._due.append(_Due(back_at + trouble.again_s + 0.01, lambda part=part: self._start(part, board)))
            elif self.machines and trouble.kind == "full-disk":
                self.machines[board].fill_disk(True)
                self._due.append(_Due(back_at, lambda: self.machines[board].fill_disk(False)))
            elif self.machines:
                self.machines[board].move_clock(trouble.jump_s)

    def _kill(self, part: Part, board: int) -> None:
        if part == "board":
            self.boards[board].cut_power()
            self._dead.add(board)
        else:
            _kill(self._children[part])

    def _start(self, part: Part, board: int) -> None:
        if part == "board" and board in self._dead:
            self._dead.remove(board)
            self.boards[board].__enter__()
        elif part != "board":
            child = self._children[part]
            if child.process is None or child.process.poll() is not None:
                child.start()

    def _has_reached(self, step: Step, number: int) -> bool:
        """It, or a later one: none is missed because it was short."""
        return self._reached()[step](number)

    def _reached(self) -> dict[Step, Callable[[int], bool]]:
        def file(name: str) -> Callable[[int], bool]:
            return lambda number: any(self.boards[number].state_dir.glob(name))

        def count(table: str) -> Callable[[int], int]:
            query = f"SELECT count(*) FROM {table} WHERE id = ?"
            return lambda number: int((self._registry.row(query, (self.devices[number],)) or (0,))[0])

        def slots(number: int) -> dict[str, object]:
            return dict(json.loads((self.boards[number].opt / "slots.json").read_text()))

        handed_over = file("update.json")
        return {
            "powered on": lambda _: True,
            "key made": file("tls.key"),
            "granted": lambda number: count("certificates")(number) >= 1,
            "certificate kept": file("tls.pem"),
            "token erased": lambda number: not self.cards[number].token_file.exists(),
            "known to the aggregator": lambda number: self._register.device(self.devices[number]) is not None,
            "round open": lambda _: self._rounds("round_open") >= 1,
            "renewed": lambda number: count("certificates")(number) >= 2,
            "round closed": lambda _: self._rounds("round_close") >= 1,
            "offered": lambda number: count("offered")(number) >= 1,
            "fetching": lambda number: file("incoming/*.part")(number) or handed_over(number),
            "handed over": handed_over,
            "installed": lambda number: NEW in (slots(number)["trial"], slots(number)["last"]),
            "on trial": lambda number: bool(slots(number)["starts"]) or slots(number)["last"] == NEW,
            "healthy": lambda number: bool(slots(number)["steady"]) or slots(number)["last"] == NEW,
            "blocked": lambda number: self._registry.board(self.devices[number]).standing == "blocked",
        }

    def _look_at_releases(self) -> None:
        """Each board has the old release or the new one at any moment."""
        for board in self.boards:
            running = (board.opt / "current").resolve()
            if running.name not in (OLD, NEW) or not (running / "__main__.py").exists():
                self.wrong.append(f"{board.home.name} has no release")


def _kill(child: FleetProcess) -> None:
    if child.process is not None:
        child.process.kill()
        child.process.wait()


@contextlib.contextmanager
def after(life: Life) -> Iterator[None]:
    """Brokers and service again, for those who look at what is left."""
    service = life.child("service", "fleet", "serve", str(life.folder.path))
    with started(life.folder, brokers_of(life.folder)), started(life.folder, (service,)):
        yield
