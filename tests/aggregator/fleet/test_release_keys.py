"""Who signs a fleet's releases: the commands on the fleet's machine and on others, and what boards are told of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.fleet.software.newest import SIGN_EVERY_S, TELL_AGAIN_S, TellingNewest
from hushfleet.aggregator.fleet.software.releases import add_release, keys_in_force, releases, trust
from hushfleet.aggregator.fleet.software.rollout import begin, change, current
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.errors import BadSignature, HushfleetError, Malformed
from hushfleet.release.statements import Newest, Signed, Trust, read_keys
from hushfleet.schema import pack as packed
from hushfleet.wire.format.fleet_messages import ReleaseNews
from hushfleet.wire.format.health import Health, SlotState
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.topics import Topics
from support.command import hushfleet
from support.desk import TASK, make_folder
from support.slots import AARCH64, pack_files

NOW = 1_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    return make_folder(tmp_path / "greenhouse", boards=2)


def run(*words: str | Path, group: str = "release", answer: str = "") -> str:
    return hushfleet(group, *words, answer=answer)


def refused(*words: str | Path) -> str:
    """What a command says that gives up."""
    with pytest.raises(HushfleetError) as told:
        run(*words)
    return str(told.value)


def release(folder: Path, version: str, *, system: bool = False, content: str = "x", **manifest: Any) -> Path:
    """One that nobody has signed, as `release make --unsigned` leaves it."""
    files = folder / f"files-{version}"
    files.mkdir()
    (files / "a").write_text(content)
    return pack_files(files, folder / f"{version}.hfr", version, **AARCH64, system=system, **manifest)


def elsewhere(tmp_path: Path, *names: str) -> dict[str, tuple[Path, str]]:
    """Keys on other machines: file and public half."""
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    files = {name: tmp_path / "elsewhere" / f"{name}.key" for name in names}
    return {name: (file, run("key", file, group="fleet").strip()) for name, file in files.items()}


def test_a_new_fleet_trusts_the_release_key_in_its_folder(folder: FleetFolder) -> None:
    assert keys_in_force(folder).keys == (load(folder.release_key).public_key.hex(),)
    assert trust(folder).root == load(folder.root_key).public_key.hex() == folder.root_public.read_text().strip()
    for file in (folder.root_key, folder.release_key, folder.newest_key):
        assert file.stat().st_mode & 0o077 == 0


def test_a_rotated_key_signs_nothing_any_more(folder: FleetFolder, tmp_path: Path) -> None:
    old = keys_in_force(folder).keys
    by_old = release(tmp_path, "1.0")
    run("sign", by_old, "--key", folder.release_key, "--yes")
    run("add", folder.path, by_old)
    assert "statement 2" in run("keys", folder.path, "--new")
    assert keys_in_force(folder).keys != old
    assert load(folder.release_key).public_key.hex() in keys_in_force(folder).keys
    assert load(folder.release_key.with_name("release.key.old")).public_key.hex() in old
    assert "not signed" in refused("rollout", folder.path, "--newest")
    run("sign", folder.releases / "hushfleet-1.0-cp313-aarch64.hfr", "--key", folder.release_key, "--yes")
    run("add", folder.path, folder.releases / "hushfleet-1.0-cp313-aarch64.hfr")
    run("rollout", folder.path, "--newest")


def test_root_and_release_keys_on_other_machines(tmp_path: Path) -> None:
    """The fleet's folder has no private key that boards install by."""
    keys = elsewhere(tmp_path, "root", "ann", "bob", "eve")
    task = tmp_path / "task.toml"
    task.write_text(TASK)
    path = tmp_path / "fleet"
    said = run("init", path, "--broker-name", "127.0.0.1", "--task", task, "--root-key", keys["root"][1], group="fleet")
    assert "waits for root's signature" in said
    folder = FleetFolder(path)
    assert not folder.root_key.exists()
    assert "root has not said yet" in refused("keys", path)
    waits = path / "release_keys.unsigned"
    for _ in range(2):  # at first for the release key in the folder, then for those of two persons and a spare one
        taken = Path(shutil.copy(waits, tmp_path / "elsewhere" / "release_keys.unsigned"))
        assert "not the root key" in refused("sign", taken, "--key", keys["eve"][0], "--yes")
        assert "not signed by the root" in refused("add", path, taken)
        assert "sign it by" in run("sign", taken, "--key", keys["root"][0], answer="n\n")
        assert "not signed by the root" in refused("add", path, taken)
        run("sign", taken, "--key", keys["root"][0], "--yes")
        run("add", path, taken)
        assert "nothing newer" in refused("add", path, taken)
        if trust(folder).number == 1:
            words = [word for name in ("ann", "bob", "eve") for word in ("--key", keys[name][1])]
            run("keys", path, *words, "--threshold", "2")
    folder.release_key.unlink()
    assert keys_in_force(folder).threshold == 2
    file = release(tmp_path, "1.0")
    assert "2 of the keys" in refused("add", path, file)
    said = run("sign", file, "--key", keys["ann"][0], "--yes")
    assert "release 1.0 for cp313 on aarch64, SHA-256" in said
    assert "1 have signed" in refused("add", path, file)
    said = run("sign", file, "--key", keys["bob"][0], "--yes")
    assert f"signed by {keys['ann'][1]}" in said
    assert "1.0" in run("add", path, file)


def test_another_root(folder: FleetFolder, tmp_path: Path) -> None:
    heir, public = elsewhere(tmp_path, "heir")["heir"]
    before = trust(folder)
    run("keys", folder.path, "--new", "--next-root", public)
    waits = folder.path / "release_keys.unsigned"
    assert "not signed by the root" in refused("add", folder.path, waits)
    run("sign", waits, "--key", heir, "--yes")
    run("add", folder.path, waits)
    assert trust(folder).root == public
    assert "not signed by the root" in refused("keys", folder.path, "--new"), "the former root is none"
    run("keys", folder.path, "--new", "--root-key", heir, "--daily-key")
    text = folder.release_keys.read_text()
    assert [each.statement.number for each in read_keys(text)] == [2, 3], "what a board needs that was away"
    assert before.after(text) == trust(folder)


def test_a_line_that_nobody_has_signed_comes_in_beside_no_signed_one(folder: FleetFolder, tmp_path: Path) -> None:
    """Else a board that was away when root was changed could follow no statement any more."""
    heir, _ = elsewhere(tmp_path, "heir")["heir"]
    before = trust(folder)
    run("keys", folder.path, "--new", "--root-key", folder.root_key, "--next-root", heir)
    (second,) = read_keys(folder.release_keys.read_text())
    run("keys", folder.path, "--key", Identity.generate().public_key.hex(), "--next-root", "cd" * 32)
    waits = folder.path / "release_keys.unsigned"
    (third,) = read_keys(waits.read_text())
    third = Signed(replace(third.statement, next_root="")).with_signature(load(heir))
    forged = Signed(replace(second.statement, next_root=Identity.generate().public_key.hex()))
    waits.write_text(f"{forged.to_line()}\n{third.to_line()}\n{forged.to_line()}\n")
    run("add", folder.path, waits)
    text = folder.release_keys.read_text()
    assert read_keys(text) == [second, third]
    assert before.after(text) == trust(folder)


def test_what_renews_the_system_needs_root(folder: FleetFolder, tmp_path: Path) -> None:
    file = release(tmp_path, "1.0", system=True)
    run("sign", file, "--key", folder.release_key, "--yes")
    assert "root has not signed" in refused("add", folder.path, file)
    assert "root must sign it, too" in run("sign", file, "--key", folder.root_key, "--yes")
    run("add", folder.path, file)


def test_other_content_of_a_known_version_is_refused(folder: FleetFolder, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, other = release(tmp_path, "1.0"), release(tmp_path / "other", "1.0", content="other")
    for each in (first, other):
        run("sign", each, "--key", folder.release_key, "--yes")
    run("add", folder.path, first)
    assert "another release 1.0" in refused("add", folder.path, other)
    assert "damaged" in refused("sign", _damaged(first), "--key", folder.release_key, "--yes")


def _damaged(file: Path) -> Path:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return file


# what boards are told


class Told:
    """The fleet service's part, and what it has published."""

    def __init__(self, folder: FleetFolder) -> None:
        self.folder, self.topics = folder, Topics("greenhouse")
        self.registry = FleetRegistry(folder.path)
        self.registry.write("UPDATE boards SET standing = 'enrolled'")
        self.devices = [board.device for board in self.registry.boards()]
        self.sent: list[tuple[str, ReleaseNews]] = []
        self.wall, self.now = NOW, 0.0
        self.start()

    def start(self) -> None:
        self.part = TellingNewest(self.folder, self.registry, wall=lambda: self.wall)

    def publish(self, topic: str, message: Any, *, retain: bool = False) -> None:
        assert not retain, "what the broker keeps, it could say again"
        self.sent.append((topic, message))

    def send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        raise AssertionError

    def hear(self, device: str, *, slot: SlotState = "good") -> None:
        health = Health(device, 1, "1.0", 1, None, None, None, None, None, None, 0, slot, "cp313-aarch64")
        self.registry.write(
            "UPDATE boards SET state = 'ready', session = 1, version = '1.0', seen = ?1, health = ?2, health_at = ?1 "
            "WHERE id = ?3",
            (self.wall, packed(health), device),
        )

    def after(self, seconds: float, *, heard: bool = True) -> list[str]:
        """Who was told something in this time, at whose end all are heard."""
        self.sent.clear()
        self.wall, self.now = self.wall + seconds, self.now + seconds
        for device in self.devices if heard else ():
            self.hear(device)
        self.part.advance(self, self.now)
        return sorted(str(self.topics.parse(topic).device) for topic, _ in self.sent)

    @property
    def word(self) -> Newest:
        news = self.sent[-1][1]
        keys = Trust(self.folder.root_public.read_text().strip()).after(news.keys.decode()).in_force()
        signed = Signed.from_line(Newest, news.newest.decode())
        assert signed.is_signed_by(keys.newest_key)
        return signed.statement


@pytest.fixture
def told(folder: FleetFolder) -> Iterator[Told]:
    made = Told(folder)
    yield made
    made.registry.close()


def test_each_board_hears_a_word_a_day_when_it_has_been_heard(told: Told) -> None:
    assert told.after(1.0, heard=False) == []
    assert told.after(1.0) == told.devices
    first = told.word
    assert (first.said_at, first.versions) == (int(NOW + 1), {})
    assert told.after(60.0) == []
    assert told.after(TELL_AGAIN_S) == told.devices, "in case it was lost"
    assert told.word == first
    assert told.after(SIGN_EVERY_S) == told.devices
    assert told.word.said_at == int(told.wall)


def test_a_board_that_is_away_is_not_spoken_to_and_hears_it_when_it_is_back(told: Told) -> None:
    assert told.after(1.0) == told.devices
    assert told.after(SIGN_EVERY_S, heard=False) == []
    assert told.after(1.0) == told.devices


def test_a_release_on_trial_which_listens_to_nothing_is_told_afterwards(told: Told) -> None:
    for device in told.devices:
        told.hear(device, slot="trial")
    assert told.after(1.0, heard=False) == []
    assert told.after(1.0) == told.devices


def test_a_clock_that_was_put_back_and_a_restart_do_not_make_a_word_older(told: Told) -> None:
    told.after(1.0)
    before = told.word.said_at
    told.wall -= 10 * 86400
    told.start()
    assert told.after(2.0) == told.devices
    assert told.word.said_at == before + 1


def test_the_newest_is_what_is_rolled_out(told: Told, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        file = release(tmp_path, version)
        run("sign", file, "--key", told.folder.release_key, "--yes")
        add_release(told.folder, told.registry, file)
    told.after(1.0)
    assert told.word.versions == {}
    begin(told.registry, "1.0", now=NOW)
    assert told.after(1.0) == told.devices, "at once"
    assert told.word.versions == {"cp313-aarch64": "1.0"}
    change(told.registry, "stopped", "it was bad")
    told.after(1.0)
    assert told.word.versions == {}


def test_a_word_goes_out_only_by_the_key_that_root_has_named(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.folder.newest_key.unlink()
    assert told.after(1.0) == told.after(1.0) == []
    assert caplog.text.count("boards are not told") == 1
    run("keys", told.folder.path, "--new")
    assert told.after(1.0) == told.devices


def test_a_new_daily_key_signs_once_root_has_named_it(told: Told, tmp_path: Path) -> None:
    """Root's key is on another machine: until it has signed, the former key says the word of the day."""
    folder = told.folder
    root = tmp_path / "root.key"
    folder.root_key.rename(root)
    former = load(folder.newest_key).public_key
    assert "threshold" in refused("keys", folder.path, "--new", "--daily-key", "--threshold", "2")
    assert load(folder.newest_key).public_key == former, "nothing was said"
    assert "nothing has changed yet" in run("keys", folder.path, "--new", "--daily-key")
    assert told.after(1.0) == told.devices
    waits = folder.path / "release_keys.unsigned"
    run("sign", waits, "--key", root, "--yes")
    run("add", folder.path, waits)
    assert load(folder.newest_key).public_key.hex() == keys_in_force(folder).newest_key != former.hex()
    assert told.after(1.0) == told.devices
    assert sorted(file.name for file in folder.service.glob("newest*")) == ["newest", "newest.key"]


def test_every_release_that_the_fleet_knows_was_signed_by_enough(told: Told, tmp_path: Path) -> None:
    with pytest.raises(BadSignature):
        add_release(told.folder, told.registry, release(tmp_path, "1.0"))
    cut = release(tmp_path, "2.0")
    run("sign", cut, "--key", told.folder.release_key, "--yes")
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(Malformed):
        add_release(told.folder, told.registry, cut)
    assert releases(told.registry) == []


def signed(folder: FleetFolder, file: Path) -> Path:
    run("sign", file, "--key", folder.release_key, "--yes")
    return file


def test_the_commands_say_what_was_withdrawn(folder: FleetFolder, tmp_path: Path) -> None:
    run("add", folder.path, signed(folder, release(tmp_path, "3.0")))
    back = release(tmp_path, "2.0.1", downgrade_from=("3.0",), downgrade_serial=1)
    listed = run("add", folder.path, signed(folder, back))
    assert [line.endswith("  withdrawn") for line in listed.splitlines()] == [True, False], listed
    assert "withdraws all others up to 3.0" in refused("rollout", folder.path, "--to", "3.0")
    run("rollout", folder.path, "--newest")
    with FleetRegistry(folder.path) as registry:
        rollout = current(registry)
    assert rollout is not None
    assert rollout.version == "2.0.1"


def test_what_was_withdrawn_is_not_told_as_the_newest(told: Told, tmp_path: Path) -> None:
    add_release(told.folder, told.registry, signed(told.folder, release(tmp_path, "3.0")))
    begin(told.registry, "3.0", now=NOW)
    change(told.registry, "paused")
    told.after(1.0)
    assert told.word.versions == {"cp313-aarch64": "3.0"}
    back = release(tmp_path, "2.0.1", downgrade_from=("3.0",), downgrade_serial=1)
    add_release(told.folder, told.registry, signed(told.folder, back))
    told.after(1.0)
    assert told.word.versions == {}
