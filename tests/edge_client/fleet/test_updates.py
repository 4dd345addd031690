"""A board and offers of releases: whom it believes, what it fetches when, and what it hands over."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.edge_client.fleet import release_file as release_file_module
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.fleet.release_file import WINDOW, ReleaseFile
from hushfleet.edge_client.fleet.slot_state import State
from hushfleet.edge_client.fleet.updates import PATIENCE_S, ReleaseDuty, RestartForRelease
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadSignature, Malformed, StoreError, StoreFull
from hushfleet.release.archive import read_head
from hushfleet.release.manifest import SignedManifest
from hushfleet.wire.format.chunks import chunk_count, expand, split
from hushfleet.wire.format.fleet_messages import RELEASE_CHUNK_BYTES, ReleaseOffer
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Want, decode_message, encode_message
from hushfleet.wire.format.topics import Topics
from support.releases import statement
from support.slots import KEY, ReleaseBoard, pack_files

DEVICE, TOPICS = "greenhouse-01", Topics("greenhouse")
OPERATOR = Identity.generate()


def release(out: Path, version: str, *, key: Any = KEY, kib: int = 1, **changes: Any) -> bytes:
    content = out.with_suffix(".content")
    content.mkdir(exist_ok=True)
    (content / "noise").write_bytes(os.urandom(1024 * kib))  # nothing that xz makes smaller
    return pack_files(content, out, version, key, **changes).read_bytes()


class RecordingLink:
    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.topics: set[str] = set()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.sent.append((topic, payload))

    def subscribe(self, topic: str) -> None:
        self.topics.add(topic)

    def unsubscribe(self, topic: str) -> None:
        self.topics.discard(topic)


class Bench(ReleaseBoard):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.tmp_path, self.state_dir = tmp_path, self.state
        self.service, self.now, self.link = Identity.generate(), 1000.0, RecordingLink()
        self.config = self.of_fleet(DEVICE, OPERATOR, service_key=self.service.public_key.hex())
        self.store = DeviceStore(self.config.store_path, device=DEVICE, durable=False)
        self.installed = Installed.of(self.config)
        self.restart()

    def restart(self) -> None:
        self.updates = ReleaseDuty(self.config, self.store, now=self.now)
        self.link.topics.clear()

    def offer(self, data: bytes, *, signer: Identity | None = None, **changes: Any) -> ReleaseOffer:
        path = self.tmp_path / "offered"
        path.write_bytes(data)
        with path.open("rb") as file:
            head = read_head(file)
        digest = hashlib.sha256(data).digest()
        offer = replace(ReleaseOffer(DEVICE, head.manifest.version, head.to_bytes(), digest, len(data), 1), **changes)
        frame = encode_message(offer, signer or self.service, federation="greenhouse")
        self.updates.take(TOPICS.parse(TOPICS.fleet(DEVICE)), frame)
        return offer

    def wants(self, *, busy: bool = False) -> list[Want]:
        """What is asked for now."""
        before = len(self.link.sent)
        self.updates.advance(self.link, self.now, busy=busy)
        return [self.decoded(*each) for each in self.link.sent[before:]]

    def decoded(self, topic: str, payload: bytes) -> Want:
        assert topic == TOPICS.wants(DEVICE)
        key = self.store.identity.public_key
        want = decode_message(payload, federation="greenhouse", public_key=key)
        assert isinstance(want, Want)
        return want

    def serve(self, data: bytes, want: Want, *, lose: Callable[[int], bool] = lambda _: False) -> None:
        topic = TOPICS.release(want.digest)
        assert topic in self.link.topics
        for index in expand(want.missing, chunk_count(len(data), RELEASE_CHUNK_BYTES)):
            if not lose(index):
                (frame,) = split(data, RELEASE_CHUNK_BYTES, (index,))
                self.updates.take(TOPICS.parse(topic), frame)

    def fetch(self, data: bytes) -> int:
        """Until nothing more is asked for; how many asks it took."""
        asks = 0
        for _ in range(1000):
            self.now = max(self.now, self.updates.due_at)
            wanted = self.wants()
            for want in wanted:
                self.serve(data, want)
            asks += len(wanted)
            if self.installed.waits:
                return asks
        raise AssertionError("it was not fetched")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.updates.close()
    made.store.close()


def test_a_release_is_fetched_handed_over_and_the_client_ends_between_rounds(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0", kib=5000)
    bench.offer(data)
    chunks = chunk_count(len(data), RELEASE_CHUNK_BYTES)
    assert bench.fetch(data) == -(-chunks // WINDOW)
    assert (bench.installed.incoming / "2.0.hfr").read_bytes() == data
    assert bench.wants() == []
    assert not bench.link.topics, "it listens no longer"
    assert bench.slots.install().trial == "2.0"
    bench.wants(busy=True)
    with pytest.raises(RestartForRelease, match=r"release 2\.0"):
        bench.wants()
    bench.wants(busy=True)
    bench.now += PATIENCE_S
    with pytest.raises(RestartForRelease):
        bench.wants(busy=True)


def test_nothing_is_asked_for_while_a_round_is_under_way(bench: Bench) -> None:
    bench.offer(release(bench.tmp_path / "a", "2.0", kib=200))
    assert bench.wants(busy=True) == []
    assert bench.updates.due_at > bench.now
    bench.now = bench.updates.due_at
    assert len(bench.wants()) == 1
    assert bench.wants() == [], "it waits for what it has asked for"


def test_what_was_lost_is_asked_for_again_and_what_came_survives_a_restart(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0", kib=1200)
    offer = bench.offer(data)
    (want,) = bench.wants()
    bench.serve(data, want, lose=lambda index: index % 2 == 1)
    bench.updates.close()
    bench.restart()
    bench.offer(data)
    (want,) = bench.wants()
    assert want.missing[0] == (1, 2)
    bench.fetch(data)
    assert not list(bench.installed.incoming.glob("*.part"))
    assert bench.installed.was_answered(offer.attempt)


def test_marks_that_a_power_cut_has_spoilt_cost_no_more_than_time(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0", kib=400)
    bench.offer(data)
    (want,) = bench.wants()
    bench.serve(data, want, lose=lambda index: index == 3)
    bench.updates.close()
    (part,) = bench.installed.incoming.glob("*.part")
    spoilt = bytearray(part.read_bytes())
    spoilt[100] ^= 1
    part.write_bytes(spoilt)
    bench.restart()
    bench.offer(data)
    with pytest.raises(Malformed, match="not the release"):
        bench.fetch(data)
    bench.fetch(data)
    for torn in (b"", b"\1", b"\2" * 7):
        file = ReleaseFile(bench.tmp_path / "torn", hashlib.sha256(data).digest(), len(data))
        file.close()
        next((bench.tmp_path / "torn").glob("*.have")).write_bytes(torn)
        file = ReleaseFile(bench.tmp_path / "torn", hashlib.sha256(data).digest(), len(data))
        assert file.received == 0
        file.drop()


def test_a_release_that_was_whole_when_the_client_ended_is_handed_over_with_the_next_offer(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0", kib=400)
    digest = hashlib.sha256(data).digest()
    file = ReleaseFile(bench.installed.incoming, digest, len(data))
    for frame in split(data, RELEASE_CHUNK_BYTES):
        file.add(frame)
    file.close()  # as a kill leaves it between the last chunk's mark and the hash of all
    offer = bench.offer(data)
    assert bench.wants() == []
    assert (bench.installed.incoming / "2.0.hfr").read_bytes() == data
    assert bench.installed.was_answered(offer.attempt)


def test_a_release_that_is_whole_and_spoilt_after_a_restart_is_fetched_anew(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0", kib=400)
    file = ReleaseFile(bench.installed.incoming, hashlib.sha256(data).digest(), len(data))
    for frame in split(data, RELEASE_CHUNK_BYTES):
        file.add(frame)
    file.close()
    (part,) = bench.installed.incoming.glob("*.part")
    spoilt = bytearray(part.read_bytes())
    spoilt[100] ^= 1
    part.write_bytes(spoilt)
    bench.offer(data)
    bench.fetch(data)
    assert (bench.installed.incoming / "2.0.hfr").read_bytes() == data


class Map(mmap.mmap):
    """One whose methods can be replaced."""


@pytest.mark.parametrize(
    ("where", "step"),
    [(Map, "flush"), (os, "replace"), (release_file_module, "sync_folder"), (Path, "unlink")],
    ids=["at the chunks", "before the rename", "after it", "at the marks"],
)
def test_a_hand_over_that_fails_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: object, step: str
) -> None:
    monkeypatch.setattr(release_file_module.mmap, "mmap", Map)
    data = release(bench.tmp_path / "a", "2.0", kib=40)
    offer = bench.offer(data)
    (want,) = bench.wants()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(where, step, fail)
        with pytest.raises(StoreError):
            bench.serve(data, want)
        bench.now += 5
        assert bench.wants() == []
    bench.now += 600
    assert bench.wants() == []
    assert (bench.installed.incoming / "2.0.hfr").read_bytes() == data
    assert [each.name for each in bench.installed.incoming.iterdir()] == ["2.0.hfr"]
    assert bench.installed.was_answered(offer.attempt)


def test_what_has_come_of_an_earlier_release_does_not_stay_for_ever(bench: Bench) -> None:
    first, second = (release(bench.tmp_path / name, name, kib=400) for name in ("2.0", "2.1"))
    bench.offer(first)
    (want,) = bench.wants()
    bench.serve(first, want, lose=lambda index: index == 3)
    bench.updates.close()
    bench.restart()
    other = bench.installed.incoming / "3.0.hfr.part"
    other.write_bytes(b"no part of a release that was offered")
    bench.offer(second)
    bench.fetch(second)
    assert sorted(each.name for each in bench.installed.incoming.iterdir()) == ["2.1.hfr", other.name]


def test_an_offer_is_believed_of_the_fleet_service_alone_and_for_this_board(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0")
    for other in (Identity.generate(), OPERATOR):
        with pytest.raises(BadSignature):
            bench.offer(data, signer=other)
    with pytest.raises(Malformed, match="greenhouse-02"):
        bench.offer(data, device="greenhouse-02")
    assert bench.wants() == []


def test_a_board_of_an_earlier_version_believes_its_operators_key(bench: Bench) -> None:
    """Its DEVICE.toml names no other key."""
    assert bench.config.fleet is not None
    bench.config = replace(bench.config, fleet=replace(bench.config.fleet, service_key=None))
    bench.restart()
    data = release(bench.tmp_path / "a", "2.0")
    with pytest.raises(BadSignature):
        bench.offer(data)
    bench.offer(data, signer=OPERATOR)
    assert bench.wants() != []


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.9"},
        {"python": "cp27"},
        {"oldest_store": 9, "store": 9},
        {"store": 1},
    ],
)
def test_a_release_that_cannot_be_installed_is_refused_once_before_it_is_fetched(
    bench: Bench, changes: dict[str, Any]
) -> None:
    data = release(bench.tmp_path / "a", **{"version": "2.0", **changes})
    offer = bench.offer(data)
    assert bench.wants() == []
    standing = bench.installed.standing()
    assert (standing.slot, standing.tried, standing.attempt) == ("returned", offer.version, 1)
    assert bench.installed.was_answered(1)
    assert not bench.installed.was_answered(2), "another attempt is another question"


def test_a_release_by_a_key_that_root_has_not_named_is_not_fetched_until_root_names_it(bench: Bench) -> None:
    """The offer and the word of the key come in messages of their own, and either may come first."""
    key = Identity.generate()
    data = release(bench.tmp_path / "a", "2.0", key=key)
    bench.offer(data)
    assert bench.wants() == []
    assert not bench.installed.was_answered(1)
    bench.installed.hear_keys(statement(key.public_key.hex(), number=2).to_line())
    bench.offer(data)
    assert len(bench.wants()) == 1


def test_an_offer_that_was_withdrawn_is_not_taken_when_somebody_sends_it_again(bench: Bench) -> None:
    """0.3.0 remembered the latest answer alone, so that the offer before it counted as new again."""
    withdrawn, newer = (release(bench.tmp_path / version, version, kib=200) for version in ("2.0", "2.1"))
    bench.offer(withdrawn, attempt=1)
    assert len(bench.wants()) == 1
    bench.offer(newer, attempt=2)  # in its place; nothing of either is answered yet
    for replayed in range(2):
        bench.offer(withdrawn, attempt=1)
        bench.now = max(bench.now, bench.updates.due_at) + 600
        (want,) = bench.wants()
        assert want.digest == hashlib.sha256(newer).digest()
        if not replayed:
            bench.updates.close()
            bench.restart()
            bench.offer(withdrawn, attempt=1)
            assert bench.wants() == [], "the newer one was heard before the restart"
            bench.offer(newer, attempt=2)
    bench.fetch(newer)
    bench.installed.incoming.joinpath("2.1.hfr").unlink()  # as if it was refused or went back
    bench.restart()
    for attempt in (0, 1, 2):
        bench.offer(withdrawn, attempt=attempt)
        assert bench.wants() == []
    assert bench.installed.standing().tried == "2.1"
    bench.offer(withdrawn, attempt=3)
    assert len(bench.wants()) == 1, "the operator offers it once more"


def test_an_offer_that_contradicts_its_manifest_is_refused(bench: Bench) -> None:
    data = release(bench.tmp_path / "a", "2.0")
    for changes in ({"version": "2.1"}, {"size": len(data) + 1}, {"manifest": b"HR"}):
        bench.offer(data, **changes)
        assert bench.wants() == [], changes


def test_what_a_board_says_of_its_releases(bench: Bench) -> None:
    def slot() -> str:
        return bench.installed.standing().slot

    assert slot() == "good"
    data = release(bench.tmp_path / "a", "2.0")
    bench.offer(data)
    bench.fetch(data)
    assert slot() == "good"
    bench.slots.install()
    assert slot() == "good"
    bench.slots.begin()
    assert slot() == "trial"
    bench.slots.back()
    assert slot() == "returned"
    bench.offer(data)
    assert bench.wants() == [], "what has failed is not taken again"
    bench.offer(data, attempt=2)
    assert len(bench.wants()) == 1
    for damaged in ("[1", "[]", '{"version": "2.0", "attempt": "x"}'):
        (bench.state_dir / "update.json").write_text(damaged)
        assert slot() == "good", "as if there was no offer yet"
    (bench.state_dir / "update.json").write_text('{"version": "2.0", "attempt": 1}')
    assert slot() == "returned", "as 0.3 wrote it"
    (bench.root / "current").unlink()
    (bench.root / "slots.json").unlink()
    os.rename(bench.root / "releases", bench.root / "gone")
    assert slot() == "none"


def test_an_installation_that_ends_while_the_board_looks_is_no_return(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = release(bench.tmp_path / "a", "2.0")
    bench.offer(data)
    bench.fetch(data)
    look = bench.installed.state

    def look_and_be_overtaken() -> State | None:
        state = look()
        bench.slots.install()
        return state

    monkeypatch.setattr(bench.installed, "state", look_and_be_overtaken)
    assert bench.installed.standing().slot == "good"


def test_a_full_disk_is_said_and_tried_again_with_the_next_offer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    data = release(bench.tmp_path / "a", "2.0")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(release_file_module.os, "posix_fallocate", full)
        with pytest.raises(StoreFull):
            ReleaseFile(bench.tmp_path / "x", hashlib.sha256(data).digest(), len(data))
        bench.offer(data)
    assert bench.wants() == []
    bench.offer(data)
    assert len(bench.wants()) == 1


def test_a_release_lies_there_for_good_before_its_offer_counts_as_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut in between must not leave an offer that is answered and no release."""
    data, synced = release(bench.tmp_path / "a", "2.0"), list[str]()
    file = ReleaseFile(bench.installed.incoming, hashlib.sha256(data).digest(), len(data))
    for frame in split(data, RELEASE_CHUNK_BYTES):
        file.add(frame)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda h: (synced.append(os.readlink(f"/proc/self/fd/{h}")), fsync(h)))
    file.finish(bench.installed.incoming / "2.0.hfr")
    assert synced == [str(bench.installed.incoming)]


def test_the_head_alone_says_who_signed_it(tmp_path: Path) -> None:
    data = release(tmp_path / "a", "2.0")
    head = SignedManifest.from_bytes(data[: data.index(b"\xfd7zXZ")])
    good, other = (k.public_key for k in (KEY, Identity.generate()))
    assert head.verify([other.hex(), "no key", good.hex()]).version == "2.0"
    with pytest.raises(BadSignature):
        head.verify([other.hex()])


def test_root_reads_no_link_or_pipe_of_the_client_for_the_release_keys(bench: Bench) -> None:
    """A pipe would hold up a command of root for ever, and with it the way to get rid of such a client."""
    kept, elsewhere = bench.state_dir / "release_keys", bench.tmp_path / "elsewhere"
    elsewhere.write_text(f"{statement(KEY.public_key.hex(), number=2).to_line()}\n")
    kept.symlink_to(elsewhere)
    assert bench.installed.trust().number == 1
    kept.unlink()
    os.mkfifo(kept)
    assert bench.installed.trust().number == 1
    kept.unlink()
    elsewhere.rename(kept)
    assert bench.installed.trust().number == 2
