"""What the fleet service hears of boards, and what is made of a fleet's folder."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from rich.console import Console

from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.page.render import render_parts
from hushfleet.aggregator.fleet.processes import LONGEST_WAIT_S, FleetProcess
from hushfleet.aggregator.fleet.service import FleetService
from hushfleet.aggregator.fleet.sightings import HEARTBEAT_S, Listener
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry, RefusedRequest
from hushfleet.aggregator.fleet.view import FleetView, PrivacyLeft
from hushfleet.aggregator.fleet.watching import columns
from hushfleet.aggregator.fleet.watching.columns import Circumstances, with_problems
from hushfleet.aggregator.fleet.watching.metrics import metrics
from hushfleet.aggregator.fleet.watching.table import table
from hushfleet.aggregator.fleet.watching.watch import LOST_HEARTBEATS, FleetWatch, view_now
from hushfleet.aggregator.report.readable import format_lifetime, number
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage import activity
from hushfleet.aggregator.storage.activity import ActivityStore, RefusedBirth
from hushfleet.aggregator.storage.board import Board
from hushfleet.errors import BadInput, BadSignature, Malformed
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.schema import pack, unpack
from hushfleet.secure.membership_list import SEEN_NEWER
from hushfleet.wire.format.health import SHOWN, Health
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, Message, ServerState, encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery
from support.desk import TASK
from support.fleet_views import HOSTILE, NOW, a_board, a_view

NAMES = ("board-1", "board-2", "board-3")


@dataclass
class Desk:
    """A fleet's folder, and the fleet service's ear."""

    folder: FleetFolder
    registry: FleetRegistry

    def __post_init__(self) -> None:
        self.now = NOW
        self.keys: dict[str, Identity] = {}
        for name in NAMES:
            self.new_key(name)
        self.topics = Topics("greenhouse")
        self.start()

    def new_key(self, name: str) -> None:
        self.keys[name] = Identity.generate()
        self.registry.expect_new_card(name)
        self.registry.approve(name, self.keys[name].public_key)

    def start(self) -> None:
        self.listener = Listener(self.registry, clock=lambda: self.now)

    def hear(self, name: str, message: Message, *, signed_by: Identity | None = None, topic: str = "") -> None:
        kind = {Birth: self.topics.state, Health: self.topics.health}[type(message)]
        frame = encode_message(message, signed_by or self.keys[name], federation="greenhouse")
        self.take(topic or kind(name), frame)

    def take(self, topic: str, frame: bytes) -> None:
        service = cast(FleetService, SimpleNamespace(topics=self.topics))
        self.listener.take(service, self.topics.parse(topic), Delivery(topic, frame, True))

    def birth(self, name: str, state: Any = "ready", *, session: int = 1) -> Birth:
        return Birth(name, session, state, "generic-x86", "0.3.0", self.keys[name].public_key, 512)

    def health(self, name: str, *, session: int = 1, uptime_s: int = 60, **changes: Any) -> Health:
        told = Health(name, session, "0.3.0", uptime_s, 30, 40, 55, False, None, None, 0, "good")
        return replace(told, **changes)

    def view(self) -> FleetView:
        self.now += 1
        self.listener.flush(self.now)
        return view_now(self.folder, self.now)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    (tmp_path / FILE_NAME).write_text('federation = "greenhouse"\n[broker]\nnames = ["localhost"]\n')
    (tmp_path / "task.toml").write_text('name = "t"')
    with FleetRegistry(tmp_path) as registry:
        registry.add(Board(name, "raspberry-pi-4-4gb", place=f"bench {name[-1]}") for name in NAMES)
        yield Desk(FleetFolder(tmp_path), registry)


def run_events(folder: FleetFolder) -> EventLog:
    log = EventLog(folder.run / "events.jsonl", clock=lambda: NOW)
    log.write("run", task="t-1", method="hush", unit="device", delta=1e-5, accountant="exact", rounds=3, devices=3)
    log.write("round_open", round=1, cohort=list(NAMES))
    log.write("update", round=1, device="board-1", bytes=100, code="accepted", epsilon_server=1.5)
    log.write("update", round=1, device="board-2", bytes=90, code="accepted", epsilon_server=1.25)
    log.write("decline", round=1, device="board-3", code="budget", reason="it would spend 9 of 8")
    log.write("round_close", round=1, participants=2, uplink_bytes=190, downlink_bytes=50, multiplier_release=2.0)
    return log


@pytest.mark.parametrize(
    ("freeze", "what", "shown"),
    [
        ("", [], "0.3.0"),
        ("unheard", ["has not been told the newest release for a week"], "0.3.0, hears of no newer one"),
        ("older", ["has run an older release than the newest for a week"], "0.3.0, not the newest"),
    ],
)
def test_a_board_that_is_kept_from_newer_releases_is_shown(
    desk: Desk, freeze: str, what: list[str], shown: str
) -> None:
    desk.hear("board-1", desk.birth("board-1"))
    desk.hear("board-1", desk.health("board-1", freeze=freeze))
    view = desk.view()
    first = view.boards[0]
    assert [problem.what for problem in first.problems] == what
    assert first.is_urgent == bool(freeze)
    assert columns.release(first) == shown
    assert f'hushfleet_board_frozen{{board="board-1"}} {float(bool(freeze))}' in metrics(view).decode()


def test_boards_are_as_they_say(desk: Desk) -> None:
    assert {board.state for board in desk.view().boards} == {"absent"}
    desk.hear("board-1", desk.birth("board-1"))
    desk.hear("board-1", desk.health("board-1", temperature_c=80, throttled=True, slot="returned", accelerator="cuda"))
    desk.hear("board-2", desk.birth("board-2", "training"))
    first, second, third = desk.view().boards
    assert first.health is not None
    assert (first.state, first.health.temperature_c, first.health.slot) == ("ready", 80, "returned")
    assert [problem.what for problem in first.problems] == [
        "is at 80 °C",
        "is slowed down, for heat or weak power",
        "has gone back to its former release",
    ]
    assert columns.health(first) == "disk 30 %, memory 40 %, 80 °C, slowed down, trains on the GPU"
    assert (second.state, second.health, third.state) == ("training", None, "absent")
    desk.hear("board-1", desk.birth("board-1", "lost"))
    desk.view()
    desk.start()  # after a restart the service knows what it knew
    desk.now += 3600
    first = desk.view().boards[0]
    assert (first.state, first.problems[0].what, first.problems[0].urgent) == ("lost", "was cut off", True)


def test_an_error_that_a_board_tells_is_shown_with_what_to_do(desk: Desk) -> None:
    desk.hear("board-1", desk.birth("board-1"))
    desk.hear("board-1", desk.health("board-1", last_error="other"))
    (problem,) = desk.view().boards[0].problems
    assert (problem.what, problem.urgent) == ("had an error since its client started: other", False)
    assert "journalctl -u hushfleet-client" in problem.advice
    desk.hear("board-1", desk.health("board-1", session=2))
    assert desk.view().boards[0].problems == ()


def test_the_budget_that_is_left_is_that_of_a_board_that_may_take_part(desk: Desk) -> None:
    """A board that has left the fleet, or is locked out, has spent its budget for good; the others have not."""
    charges = {"gone": 5.0, "board-1": 10.0, "board-2": 20.0}
    with ActivityStore(desk.folder.aggregator) as register:
        for name, noise in charges.items():
            register.note_charges("t-1", 1, {name: pack(GaussianMechanism(noise).charge())}, certain=True)
    desk.registry.block("board-1", "stolen")
    view = desk.view()
    assert view.privacy_left is not None
    assert view.privacy_left.device == "board-2"
    assert view.lifetime is not None
    assert view.lifetime.epsilon_server > 2 * view.privacy_left.spent, "the most of any board, as charged"


def test_what_was_read_before_is_not_read_again(desk: Desk) -> None:
    """The service looks at all boards each second, and a board tells its health once a minute."""
    for name in NAMES:
        desk.hear(name, desk.health(name))
    desk.listener.flush(1.0)
    first = {board.device: board for board in desk.registry.boards()}
    desk.hear("board-2", desk.health("board-2", uptime_s=120))
    desk.listener.flush(2.0)
    with patch("hushfleet.aggregator.fleet.trust.registry.unpack", side_effect=unpack) as unpacked:
        second = {board.device: board for board in desk.registry.boards()}
    assert unpacked.call_count == 1
    assert [second[name].health == first[name].health for name in NAMES] == [True, False, True]
    assert second["board-2"].health == desk.health("board-2", uptime_s=120)


def test_what_is_old_or_of_somebody_else_changes_nothing(desk: Desk) -> None:
    old_will = desk.birth("board-1", "lost", session=1)
    desk.hear("board-1", desk.birth("board-1", session=2))
    desk.hear("board-1", desk.health("board-1", session=2, uptime_s=600, disk_percent=50))
    desk.hear("board-1", old_will)
    desk.hear("board-1", desk.health("board-1", session=2, uptime_s=60, disk_percent=10))
    with pytest.raises(BadSignature):
        desk.hear("board-1", desk.birth("board-1", "lost", session=3), signed_by=desk.keys["board-2"])
    with pytest.raises(BadSignature):
        desk.hear("board-1", desk.health("board-1", session=3), topic=desk.topics.health("board-2"))
    with pytest.raises(Malformed):
        desk.hear("board-2", desk.health("board-1", session=3))
    with pytest.raises(BadSignature, match="no key"):
        desk.hear("board-1", desk.birth("board-1"), topic=desk.topics.state("stranger"))
    board = desk.view().boards[0]
    assert (board.state, board.health and board.health.disk_percent) == ("ready", 50)
    desk.new_key("board-1")  # its card was written anew: sessions begin again
    desk.hear("board-1", desk.birth("board-1", "training", session=1))
    board = desk.view().boards[0]
    assert (board.state, board.health) == ("training", None)


@pytest.mark.parametrize(
    ("state", "hours", "silent"), [("ready", 1, True), ("training", 1, False), ("training", 25, True)]
)
def test_a_board_that_says_nothing_is_told_also_where_it_was_training(state: Any, hours: int, silent: bool) -> None:
    """A broker that ends in the same power cut as a board forgets the board's will: nobody says that it is lost."""
    board = a_board(1, state=state, health_at=NOW - 3600 * hours)
    found = with_problems(board, Circumstances(NOW, 12, True)).problems
    assert [each.what for each in found] == ["is connected, but says nothing of itself"] * silent


def test_an_old_copy_of_the_folder_is_told_by_the_boards_that_know_a_newer_membership_list(desk: Desk) -> None:
    """Boards declined, and the operator of the old copy saw nothing but "no-privacy" in the boards' own logs."""
    reason = (
        f"round 2: membership list 3 of today is older than membership list 5, {SEEN_NEWER}: it may name boards "
        "that were locked out"
    )
    with run_events(desk.folder) as log:
        log.write("round_open", round=2, cohort=list(NAMES))
        log.write("decline", round=2, device="board-1", code="no-privacy", reason="more noise is asked for")
        assert not [each for each in desk.view().problems if "old copy" in each.what]
        for name in ("board-2", "board-3"):
            log.write("decline", round=2, device=name, code="no-privacy", reason=reason)
        (problem,) = [each for each in desk.view().problems if "old copy" in each.what]
    assert problem.what == "2 boards know a newer membership list: this folder is an old copy of the fleet's"
    assert problem.urgent
    assert "fleet roster sign" in problem.advice


def test_a_finished_task_is_no_fault() -> None:
    run = a_view().run
    assert run is not None
    view = replace(a_view(), aggregator="stopped", run=replace(run, finished=True, rounds_closed=20, open_round=None))
    assert descriptions.summary(view) == (
        "8 of 12 boards are there, 4 need somebody (greenhouse-03, greenhouse-05, greenhouse-06, greenhouse-10), the "
        "task is finished"
    )
    assert descriptions.progress(run).startswith("greenhouse-hush-1a2b3c4d: round 12 of 20 is open")
    assert descriptions.progress(replace(run, finished=True)).endswith("hushfleet fleet task DIR TASK.toml")


@pytest.mark.parametrize(("code", "level", "told"), [(0, "INFO", "all is done"), (2, "WARNING", "it has ended (2)")])
def test_a_process_that_has_done_its_work_is_no_fault(
    code: int, level: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    child = FleetProcess("it", ["sh", "-c", f"exit {code}"], None, when_done="all is done")
    child.start()
    assert child.process is not None
    child.process.wait()
    with caplog.at_level("INFO"):
        child.watch(0.0)
    assert [(record.levelname, record.message) for record in caplog.records] == [(level, told)]


@pytest.mark.parametrize("wrong", ["data = 5", "privacy = 5", "[data]\nwindow = 1", '[data]\nwindow = ["1d"]'])
def test_a_task_file_with_a_value_of_another_type_is_no_end_of_the_watch(desk: Desk, wrong: str) -> None:
    desk.folder.task.write_text(f'name = "t"\n{wrong}\n')
    assert len(desk.view().boards) == 3


def test_a_pause_that_ends_while_it_is_looked_at(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert desk.view().paused is None


@pytest.mark.parametrize(
    ("limits", "said"),
    [("delta = 2.0", "between 0 and 1"), ('epsilon_server = "8"', "positive"), ("epsilon_server = -1", "positive")],
)
def test_a_limit_that_no_board_would_take_is_refused(desk: Desk, limits: str, said: str) -> None:
    file = desk.folder.path / FILE_NAME
    file.write_text(f"{file.read_text()}[device.limits]\n{limits}\n")
    with pytest.raises(BadInput, match=rf"device\.limits\.{limits.partition(' ')[0]} = .* {said}"):
        FleetFolder(desk.folder.path)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("[device]\nlimits = 5", r"device\.limits = 5: must be a section"),
        ("[device.limits]\nepsilon_sever = 3.0", r"device\.limits: unknown .* \(did you mean 'epsilon_server'\?\)"),
        ("[device.limits]\nmemory_mib = -1", r"device\.limits\.memory_mib = -1"),
        (
            '[device.limits]\nepsilon_server = 3.0\nper = "90d"',
            r"device\.limits\.epsilon_lifetime = None: must be given",
        ),
        ("[device.broker]\nkeepalive_s = 1", r"device\.broker\.keepalive_s = 1: must be in"),
        ('[device]\nboard = "raspberry-pi-5-8gb"', r"device\.board = .*: must be left out"),
        ("[device.simulation]\nseed = 1", r"device\.simulation = .*: must be left out"),
    ],
)
def test_what_boards_would_refuse_or_never_read_is_refused_for_their_cards(desk: Desk, device: str, said: str) -> None:
    file = desk.folder.path / FILE_NAME
    file.write_text(f"{file.read_text()}{device}\n")
    with pytest.raises(BadInput, match=said):
        FleetFolder(desk.folder.path)


def test_a_key_that_a_card_gets_from_elsewhere_may_be_missing(desk: Desk) -> None:
    file = desk.folder.path / FILE_NAME
    file.write_text(f"{file.read_text()}[device.broker]\nkeepalive_s = 10\n[device.limits]\nmemory_mib = 64\n")
    assert FleetFolder(desk.folder.path).config.device["broker"] == {"keepalive_s": 10}


def test_a_release_on_trial_is_heard(desk: Desk) -> None:
    """Its client takes no session of its own, since a trial leaves the store as it is."""
    desk.hear("board-1", desk.health("board-1", session=2, uptime_s=90_000))
    desk.hear("board-1", desk.health("board-1", session=2, uptime_s=0, version="0.4.0", slot="trial"))
    desk.hear("board-1", desk.health("board-1", session=2, uptime_s=90_060))
    assert columns.release(desk.view().boards[0]) == "0.4.0, on trial"
    desk.hear("board-1", desk.health("board-1", session=3, uptime_s=0, version="0.4.0"))
    assert columns.release(desk.view().boards[0]) == "0.4.0"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature_c", 500, "Health.temperature_c = 500: "),
        ("last_error", "moth", "must be one of 'disk', 'link'"),
        ("freeze", "solid", "must be one of '', 'unheard', 'older'"),
    ],
)
def test_a_health_that_cannot_be_is_malformed(desk: Desk, field: str, value: object, said: str) -> None:
    """A hostile board sends it, or a newer one: each was a traceback in the service's log."""
    told = desk.health("board-1")
    object.__setattr__(told, field, value)
    with pytest.raises(Malformed, match=said):
        desk.hear("board-1", told)


def test_a_process_that_has_died_all_night_is_started_again() -> None:
    """A minute each time: 1024 deaths take 17 hours. What was raised then ended the brokers, too."""
    child = FleetProcess("it", ["sh", "-c", "exit 1"], None, failures=1024)
    child.start()
    assert child.process is not None
    child.process.wait()
    child.watch(100.0)
    assert child.again_at == 100.0 + LONGEST_WAIT_S


def test_the_run_as_its_log_tells_it(desk: Desk) -> None:
    for name in NAMES:
        desk.hear(name, desk.birth(name))
    with run_events(desk.folder) as log:
        view = desk.view()
        run = view.run
        assert run is not None
        assert (run.rounds_closed, run.rounds, run.open_round, run.finished) == (1, 3, None, False)
        assert (run.epsilon, run.delta, run.uplink_bytes, run.declines) == (1.5, 1e-5, 190, (("budget", 1),))
        assert run.epsilon_release is not None
        assert math.isfinite(run.epsilon_release)
        assert [(board.state, board.rounds, board.epsilon) for board in view.boards] == [
            ("accepted", 1, 1.5),
            ("accepted", 1, 1.25),
            ("declined", 0, None),
        ]
        declined = view.boards[2]
        assert declined.decline is not None
        assert (declined.decline.reason, declined.is_urgent) == ("it would spend 9 of 8", False)
        log.write("round_open", round=2, cohort_size=3)  # of secure aggregation
        log.write("update", round=2, device="board-1", bytes=10, code="accepted", epsilon_server=2.0)
        log.write("update", round=2, device="board-2", bytes=10, code="late")
        run = desk.view().run
        assert run is not None
        assert (run.open_round, run.asked, run.answered, run.accepted) == (2, 3, 1, 1)
        assert run.uplink_bytes == 200
        desk.hear("board-1", desk.birth("board-1", "lost"))
        assert desk.view().boards[0].state == "lost", "the broker's word on presence is the newer one"
    json.dumps(desk.view().to_json(), allow_nan=False)


def test_a_run_that_is_begun_anew_is_read_from_its_start(desk: Desk) -> None:
    watch = FleetWatch(desk.folder)
    with run_events(desk.folder):
        run = watch.view(NOW).run
        assert run is not None
        assert run.task == "t-1"
    (desk.folder.run / "events.jsonl").unlink()
    with EventLog(desk.folder.run / "events.jsonl") as log:
        log.write("run", task="t-2", method="hush", unit="device", rounds=5, devices=3)
    run = watch.view(NOW).run
    assert run is not None
    assert (run.task, run.rounds_closed, run.epsilon) == ("t-2", 0, None)
    watch.close()


def test_the_log_of_a_long_run_is_not_held_in_memory(desk: Desk) -> None:
    """A thousand boards in a thousand rounds would be gigabytes."""
    log = run_events(desk.folder)
    for round in range(2, 12_000):
        log.write("update", round=round, device="board-1", bytes=100, code="accepted", epsilon_server=1.5)
    size = log.path.stat().st_size
    watch = FleetWatch(desk.folder)
    tracemalloc.start()
    board = next(board for board in watch.view(desk.now).boards if board.device == "board-1")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    watch.close()
    assert board.rounds == 11_999
    assert most < 5 * size, "all of its events at once take ten times as much as the log"


def test_who_is_locked_out_waits_or_is_a_stranger(desk: Desk) -> None:
    with ActivityStore(desk.folder.aggregator) as register:
        register.block("board-1", "stolen")
        refused = [RefusedBirth("board-2", b"3" * 32, 1, NOW), RefusedBirth("who", b"4" * 32, 5, NOW)]
        register.put_refused_births(refused)
    desk.registry.add_refused_request(RefusedRequest("board-2", b"3" * 32, True, "waits for its operator", NOW))
    view = desk.view()
    standing = {board.device: (board.standing, board.reason) for board in view.boards}
    assert standing["board-1"] == ("blocked", "stolen")
    assert standing["board-2"] == ("pending", "waits for its operator")
    assert [each.device for each in view.refused_devices] == ["who"]
    assert [board.device for board in view.pending] == ["board-2"]
    assert [board.device for board in view.boards if board.is_urgent] == ["board-2"]


def test_what_was_spent_is_what_was_charged(desk: Desk) -> None:
    with (desk.folder.path / FILE_NAME).open("a") as file:
        file.write("[device.limits]\nepsilon_server = 8.0\ndelta = 1e-4\n")
    desk.folder = FleetFolder(desk.folder.path)
    charge = Charge("device", "add-or-remove", "gaussian", 2.0)
    with ActivityStore(desk.folder.aggregator) as register:
        for task, round in (("t-0", 1), ("t-0", 2), ("t-1", 1)):
            register.note_charges(task, round, {"board-1": pack(charge)}, certain=True)
        register.note_charges("t-1", 1, {"board-2": pack(replace(charge, raw=("norms",)))}, certain=True)
    first, second, third = desk.view().boards
    assert (first.spent, first.limit) == (epsilon([Step(2.0, 1.0, 3)], delta=1e-4), 8.0)
    assert (second.spent, third.spent) == (math.inf, None)


def test_terminal_and_json_say_first_what_was_spent_in_all(desk: Desk) -> None:
    charge = pack(Charge("device", "add-or-remove", "gaussian", 2.0))
    with ActivityStore(desk.folder.aggregator) as register:
        for round in (1, 2):
            register.note_charges("t-0", round, {"board-1": charge, "board-2": charge}, certain=True)
        register.note_charges("t-1", 2, {"board-2": charge}, certain=False)
    with run_events(desk.folder) as log:
        log.write("round_open", round=2, cohort=["board-1", "board-2"])
        log.write("decline", round=2, device="board-1", code="budget", reason="it would spend 9 of 8")
        view = desk.view()
    most = epsilon([Step(2.0, 1.0, 3)], delta=1e-5)
    assert [(board.spent, board.undecided) for board in view.boards[:2]] == [
        (epsilon([Step(2.0, 1.0, 2)], delta=1e-5), False),
        (most, True),
    ]
    assert columns.spent(view.boards[1]).startswith(f"up to {number(most)}")
    assert view.lifetime is not None
    exchange = epsilon([Step(2.0, 1.0, 3)], delta=1e-5, adjacency="replace-one")
    assert (view.lifetime.epsilon_server, view.lifetime.exchange_server) == (most, exchange)
    told = view.to_json()["lifetime"]
    assert told.pop("since") == view.lifetime.since
    assert told == {"epsilon_server": most, "exchange_server": exchange, "delta": 1e-5, "period": "", "window": ""}
    shown = io.StringIO()
    Console(file=shown, width=400).print(table(view, details=True))
    said = format_lifetime(view.lifetime)
    assert shown.getvalue().index(said) < shown.getvalue().index("in this task, per device")


def test_an_owner_reads_four_sentences(desk: Desk) -> None:
    assert descriptions.sentences(desk.view()) == {
        "boards": "0 of 3 boards are there",
        "samples": "How many a board uses or leaves out, and why, is private and stays on it; read it there: "
        "sudo -u hushfleet hushfleet-edge status /etc/hushfleet/device.toml",
        "model": "Whether the fleet's is better on a board than the board's own is private, too, and told by the same "
        "command there",
        "privacy": "Nothing is spent yet",
    }
    charge = pack(Charge("device", "add-or-remove", "gaussian", 2.0))
    limits = "[device.limits]\nepsilon_server = 8.0\n"
    (desk.folder.path / FILE_NAME).write_text((desk.folder.path / FILE_NAME).read_text() + limits)
    desk.folder = FleetFolder(desk.folder.path)
    with ActivityStore(desk.folder.aggregator) as register:
        for round in (1, 2):
            register.note_charges("t-1", round, {"board-1": charge, "board-2": charge}, certain=True)
        register.note_charges("t-0", 1, {"board-2": charge}, certain=True)
    with run_events(desk.folder) as log:
        log.write("round_open", round=2, cohort=list(NAMES))
        log.write("decline", round=2, device="board-3", code="no-data", reason="this device has no data that fit")
        log.write("round_close", round=2, participants=2, uplink_bytes=1, downlink_bytes=1, accuracy_global=0.741)
        view = desk.view()
    spent, rounds = epsilon([Step(2.0, 1.0, 3)], delta=1e-5), view.privacy_left and view.privacy_left.rounds
    assert rounds is not None
    assert epsilon([Step(2.0, 1.0, 3 + rounds)], delta=1e-5) <= 8.0 < epsilon([Step(2.0, 1.0, 4 + rounds)], delta=1e-5)
    found = descriptions.sentences(view)
    assert found["samples"].startswith("1 board has none that fit the task: board-3; look at data.path there")
    assert found["model"].startswith("The fleet's model is right on 74.1")
    assert found["privacy"] == (
        f"board-2, which has spent most, stands at {number(spent)} of the 8 that its card allows (epsilon; weak "
        "protection); the rest is enough for the round that this task has to come"
    )
    left = replace(view, privacy_left=PrivacyLeft("board-2", 7.9, 8.0, 0))
    assert "the rest is not enough for another round of this task" in descriptions.privacy_left(left)
    left = replace(view, privacy_left=PrivacyLeft("board-2", 28.4, 8.0, 0))
    assert descriptions.privacy_left(left).endswith(
        "at 28.4, above the 8 that its card allows (epsilon; negligible protection); its owner alone can allow more"
    )
    shown = io.StringIO()
    Console(file=shown, width=400).print(table(view))
    assert all(said in shown.getvalue() for said in found.values())
    assert "replace-one" not in shown.getvalue()


def test_what_was_spent_changes_with_the_charges_and_not_with_their_number_alone(desk: Desk) -> None:
    def charges(multiplier: float) -> dict[str, bytes]:
        return {"board-1": pack(Charge("device", "add-or-remove", "gaussian", multiplier))}

    watch = FleetWatch(desk.folder)
    with ActivityStore(desk.folder.aggregator) as register:
        register.note_charges("t-0", 1, charges(4.0), certain=False)
        assert watch.view().boards[0].spent == epsilon([Step(4.0, 1.0, 1)], delta=1e-5)
        register.note_charges("t-0", 1, charges(1.0), certain=True)
        assert watch.view().boards[0].spent == epsilon([Step(1.0, 1.0, 1)], delta=1e-5)
        register.drop_charges("t-0", 1, ["board-1"])
        assert watch.view().boards[0].spent is None
    watch.close()


def test_charges_are_read_only_after_a_change_of_the_register(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two thousand boards with four hundred rounds each take half a second."""
    reads, charged = list[int](), ActivityStore.charged_devices
    monkeypatch.setattr(ActivityStore, "charged_devices", lambda self: (reads.append(1), charged(self))[1])
    watch = FleetWatch(desk.folder)
    with ActivityStore(desk.folder.aggregator) as register:
        for changes, reason in enumerate(("stolen", "lost"), 1):
            register.block("board-1", reason)
            for _ in range(3):
                watch.view()
            assert len(reads) == changes
    watch.close()


def test_rounds_that_cost_the_same_are_read_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand boards with four hundred rounds each took seven seconds after each round."""
    read = list[bytes]()

    def counted(kind: type[Charge], packed: bytes, **how: str) -> Charge:
        read.append(packed)
        return unpack(kind, packed, **how)

    monkeypatch.setattr(activity, "unpack", counted)
    charges = [Charge("device", "add-or-remove", "gaussian", multiplier) for multiplier in (2.0, 3.0)]
    with ActivityStore(desk.folder.aggregator) as register:
        for round in range(1, 41):
            register.note_charges("t-0", round, {"board-1": pack(charges[round % 2])}, certain=True)
    watch = FleetWatch(desk.folder)
    for _ in range(2):
        assert watch.view().boards[0].spent == epsilon([Step(2.0, 1.0, 20), Step(3.0, 1.0, 20)], delta=1e-5)
    assert len(read) == 2 * 2, "once for itself, once as the board that has spent most"
    watch.close()


def test_a_clock_that_is_set_back_does_not_end_listening(desk: Desk) -> None:
    desk.view()
    for second in range(1, 3 * int(HEARTBEAT_S)):
        desk.now = NOW - 365 * 86400 + second
        desk.listener.advance(cast(FleetService, None), NOW + second)  # monotonic seconds, which go on
    desk.hear("board-1", desk.birth("board-1"))
    desk.listener.advance(cast(FleetService, None), NOW + 3 * HEARTBEAT_S)
    view = view_now(desk.folder, desk.now)
    assert (view.boards[0].seen, view.service) == (desk.now, "running")
    assert max(at for _, at in desk.registry.processes().values()) <= desk.now


def test_processes_that_do_not_run_are_told(desk: Desk) -> None:
    with run_events(desk.folder):
        server = Identity.generate()
        for state, expected in (("ready", "running"), ("lost", "stopped")):
            frame = encode_message(ServerState(1, state, server.public_key), server, federation="greenhouse")
            desk.take(desk.topics.server, frame)
            view = desk.view()
            assert (view.service, view.aggregator) == ("running", expected)
        assert [problem.what for problem in view.problems] == [
            "the aggregator does not run: boards wait, and nothing is lost"
        ]
        view = view_now(desk.folder, desk.now + LOST_HEARTBEATS * HEARTBEAT_S + 1)
        assert (view.service, view.aggregator) == ("stopped", "unknown")
        assert view.problems[0].urgent


def test_the_terminal_shows_it_and_no_text_is_markup() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    view = a_view()
    bold = a_board(13, version="[/b] [red]9.9")
    console.print(table(replace(view, boards=(*view.boards, bold))))
    text = console.export_text()
    assert "[/b] [red]9.9" in text
    for said in (
        "9 of 13 boards are there",
        "round 12 of 20 is open, 5 of 10 have answered",
        "7.9 of 8",
    ):
        assert said in text
    assert "greenhouse-03 was cut off" in text
    assert HOSTILE not in text, "the place of a board is for the page"


def test_a_health_field_is_shown_as_its_metadata_say() -> None:
    values = {"disk_percent": 90, "memory_percent": 70, "temperature_c": 85, "throttled": True, "last_error": "disk"}
    values |= {"slot": "returned", "accelerator": "cuda", "freeze": "older", "volatile": True}
    (board,) = (each for each in a_view(a_board(1, **values)).boards)
    assert board.health is not None
    page, told = render_parts(a_view(board))["boards"], metrics(a_view(board)).decode()
    for name, shown in SHOWN.items():
        if (value := getattr(board.health, name)) is None:
            continue
        text = shown.text.format(value) if isinstance(shown.text, str) else shown.text.get(value, "")
        assert text in page
        if shown.metric:
            number = float(bool(value)) if shown.flag else float(value) / shown.per
            assert f'hushfleet_board_{shown.metric}{{board="greenhouse-01"}} {number}\n' in told
        alarm = shown.alarm if shown.limit is not None else shown.alarms.get(str(value))
        assert alarm is None or alarm.what.format(value) in [problem.what for problem in board.problems]


def test_an_evaluation_is_said_on_status_and_page_and_in_the_json(desk: Desk) -> None:
    desk.folder.task.write_text(TASK.replace('"small"', '"t"'))
    with run_events(desk.folder) as log:
        log.write("round_open", round=2, cohort_size=40)
        log.write(
            "round_close", round=2, participants=40, uplink_bytes=1, downlink_bytes=1, asked="evaluation",
            answer=[0.86, 0.112, 0.09, 0.8, 0.02], answer_stds=[0.02, 0.01, 0.02, 0.05, 0.001],
        )  # fmt: skip
        view = desk.view()
    said = descriptions.sentences(view)["model"]
    told = "+7.7 to +14.7 points over staying alone, by noised answers of 40 boards after round 2"
    assert said.startswith(f"It pays: {told}")
    shown = io.StringIO()
    Console(file=shown, width=1200).print(table(view))
    assert said in shown.getvalue()
    assert told in render_parts(view)["summary"]
    gain = view.to_json()["run"]["evaluation"]["gain"]
    assert gain["value"] == pytest.approx(0.112)
