"""Wanted: boards that go on with a release whose hole is known, and that look well.

Whoever is between a board and its fleet, or has the broker, can hold back what they like, and send again what was once
said. A thief of the daily key can say of the newest release what they like.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.fleet import newest as freshness
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.fleet.newest import FROZEN_AFTER_S, SAVE_EVERY_S, Freshness, News
from hushfleet.edge_client.status import format_status, status
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadSignature, WireError
from hushfleet.release.manifest import this_platform
from hushfleet.release.statements import Newest, Signed
from hushfleet.version import __version__
from hushfleet.wire.format.fleet_messages import ReleaseNews
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import encode_message
from hushfleet.wire.format.topics import Topics
from support.releases import DAILY, statement
from support.slots import KEY, ReleaseBoard

DAY_S = 86400.0
DAYS = int(FROZEN_AFTER_S / DAY_S)
TOPICS = Topics("greenhouse")
SERVICE = Identity.generate()
PLATFORM = "-".join(this_platform())
NEWER, HERE = "99.0", __version__


class Board(ReleaseBoard):
    """Hears what the attacker lets through; its client runs a day after the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, HERE)
        self.now = 0.0
        self.config = self.of_fleet("greenhouse-01", SERVICE)
        self.store = DeviceStore(self.config.store_path, device="greenhouse-01", durable=False)
        self.start()

    def start(self) -> None:
        self.news = News(self.config, clock=lambda: self.now)

    def kill(self) -> None:
        """Without the time to save anything."""
        self.start()

    def hear(self, said_at: int, version: str = HERE, *, key: Identity = DAILY, keys: str | None = None) -> None:
        """What the fleet service says each day, or what somebody has kept of it."""
        word = Signed(Newest(said_at, {PLATFORM: version})).with_signature(key).to_line()
        keys = keys or statement(KEY.public_key.hex()).to_line()
        frame = encode_message(ReleaseNews(keys.encode(), word.encode()), SERVICE, federation="greenhouse")
        self.news.take(TOPICS.parse(TOPICS.fleet("greenhouse-01")), frame)

    def run(self, days: float) -> None:
        end = self.now + days * DAY_S
        while self.now < end:
            self.now = min(end, self.now + SAVE_EVERY_S)
            self.news.lost()  # the link fails, or is cut, or the loop comes by: each time counts

    @property
    def says(self) -> str:
        """In `Health`, to the fleet."""
        return BoardHealth(self.config, now=self.now).message(self.now, session=1, hides_duration=True).freeze

    @property
    def words(self) -> list[str]:
        return [
            line
            for line in format_status(status(self.config, self.store), details=True)
            if "newest" in line or "releases " in line
        ]


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setattr(os, "fsync", lambda *_: None)  # weeks pass, and the machine lives on
    made = Board(tmp_path)
    yield made
    made.store.close()


def test_an_honest_fleet_is_never_called_frozen(board: Board) -> None:
    for day in range(3 * DAYS):
        board.hear(1000 + day)
        board.run(1)
        assert board.says == ""
    assert board.words[0].startswith(f"releases    the newest is {HERE}")


def test_without_a_count_of_silence_nobody_notices(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack, as it was: offers and words are held back for half a year, and the board looks well."""
    monkeypatch.setattr(freshness, "FROZEN_AFTER_S", math.inf)
    board.hear(1000)
    board.run(180)
    assert board.says == ""
    assert board.words[0].startswith("releases    the newest is")


def test_all_word_of_releases_is_held_back(board: Board) -> None:
    """Without the daily word a board cannot tell this from a fleet that has nothing new."""
    board.hear(1000)
    board.run(DAYS - 0.1)
    assert board.says == ""
    board.run(0.2)
    assert board.says == "unheard"
    assert board.words[0].startswith("attention   no new word of the newest release has come in 7 days")
    board.hear(1001)
    assert board.says == ""


def test_a_board_that_never_heard_a_word_says_so_too(board: Board) -> None:
    board.run(DAYS + 0.1)
    assert board.says == "unheard"


def test_the_word_of_an_earlier_day_is_sent_again_and_again(board: Board) -> None:
    """Attack on a rule without an order: any word that verifies would set the count back."""
    board.hear(1000)
    board.hear(1005)
    for _ in range(DAYS + 1):
        for said_at in (1000, 1005, 1004):
            board.hear(said_at)
        board.run(1)
    assert board.says == "unheard"


def test_words_come_and_offers_are_held_back(board: Board) -> None:
    for day in range(DAYS):
        board.hear(1000 + day, NEWER)
        assert board.says == ""
        board.run(1)
    assert board.says == "older"
    assert f"the newest is {NEWER}, and this board has run the older {HERE} for 7 days" in board.words[0]


def test_cutting_the_power_or_killing_the_client_does_not_set_the_count_back(board: Board) -> None:
    board.hear(1000, NEWER)
    for day in range(DAYS + 1):
        board.hear(1001 + day, NEWER)
        for _ in range(4):
            board.run(0.25)
            board.kill()
    assert board.says == "older"


def test_an_end_of_the_client_counts_what_it_has_run(board: Board) -> None:
    """A board that runs ten minutes at a time counts, too."""
    for _ in range(DAYS * 24 * 6 + 6):
        board.now += 600
        board.news.close()
        board.start()
    assert board.says == "unheard"


def test_a_thief_of_the_daily_key_makes_no_board_install_anything(board: Board) -> None:
    """They can say that there is something newer, or that there is not, and nothing else."""
    before = {path: path.read_bytes() for path in board.root.rglob("*") if path.is_file()}
    board.hear(10**9, "1000.0")
    assert not list((board.state / "incoming").iterdir())
    assert {path: path.read_bytes() for path in board.root.rglob("*") if path.is_file()} == before
    with pytest.raises(WireError):  # nor name other keys
        board.hear(10**9 + 1, keys=statement(DAILY.public_key.hex(), newest_key="cd" * 32, root=DAILY).to_line())
    assert Installed.of(board.config).trust().in_force().keys == (KEY.public_key.hex(),)


def test_a_thief_who_spoke_for_the_far_future_is_shut_out_by_another_daily_key(board: Board) -> None:
    board.hear(2**50)
    board.hear(1001)
    board.run(DAYS + 0.1)
    assert board.says == "unheard", "the fleet's own words are older than the thief's"
    fresh = Identity.generate()
    keys = statement(KEY.public_key.hex(), number=2, newest_key=fresh.public_key.hex()).to_line()
    board.hear(1002, key=fresh, keys=keys)
    assert board.says == ""
    with pytest.raises(BadSignature):
        board.hear(2**50 + 1)


def test_a_word_for_another_board_or_of_another_service_changes_nothing(board: Board) -> None:
    with pytest.raises(BadSignature):
        board.hear(1000, key=Identity.generate())
    word = Signed(Newest(1000)).with_signature(DAILY).to_line().encode()
    news = ReleaseNews(statement(KEY.public_key.hex()).to_line().encode(), word)
    for other, federation in ((Identity.generate(), "greenhouse"), (SERVICE, "another")):
        frame = encode_message(news, other, federation=federation)
        with pytest.raises(BadSignature):
            board.news.take(TOPICS.parse(TOPICS.fleet("greenhouse-01")), frame)
    for changed in (replace(news, newest=b"\xff"), replace(news, newest=b"{}"), replace(news, keys=b"no statement")):
        frame = encode_message(changed, SERVICE, federation="greenhouse")
        with pytest.raises(WireError):
            board.news.take(TOPICS.parse(TOPICS.fleet("greenhouse-01")), frame)
    assert Freshness(board.state).newest is None
