"""Wanted: an operator, a root or a device whose signatures anybody can make, or whose secrets everybody knows.

The attacker hands a key to the person who types it, puts it into a file that is passed on, or enrols with it. There are
two kinds: points of small order, for which anybody signs, and strings off the curve, for which nobody does, so that
whoever trusts them is locked out. Held by one rule, `hushfleet.public_keys`, at every place where a key comes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.fleet.software.releases import trust
from hushfleet.aggregator.fleet.trust import keys, membership_list
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.devices_file import read_devices
from hushfleet.aggregator.storage.list_file import membership_list_file
from hushfleet.aggregator.storage.membership_list_signing import read_membership_list
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.edge_client.board.config import load_config
from hushfleet.errors import BadInput, BadSignature, HushfleetError, Malformed
from hushfleet.release.statements import ReleaseKeys, Signed, Trust
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.fleet_messages import EnrolRequest
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, ServerState, decode_message, encode_message
from support.desk import TASK, make_folder
from support.edwards25519 import OFF_CURVE
from support.releases import ROOT, put_trust, statement

ZERO, NEUTRAL = bytes(32), bytes([1]) + bytes(31)
KEYS = [pytest.param(key, id=name) for name, key in (("order 4", ZERO), ("neutral", NEUTRAL), ("no point", OFF_CURVE))]
NOBODY = "which nobody can own|which no board can own"
OWNED = Identity.generate().public_key.hex()


def hushfleet(*words: object) -> str:
    outcome = CliRunner().invoke(build_app(), [str(word) for word in words])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.output


@pytest.fixture
def plant(tmp_path: Path) -> FleetFolder:
    return make_folder(tmp_path / "plant", boards=1)


# what a person types


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("option", ["--operator-key", "--root-key"])
def test_no_fleet_is_made(tmp_path: Path, key: bytes, option: str) -> None:
    """Of the neutral point, 0.3.0 made a fleet whose membership list anybody signs."""
    (tmp_path / "task.toml").write_text(TASK)
    words = ("--broker-name", "broker.example", "--task", tmp_path / "task.toml", option, key.hex())
    with pytest.raises(BadInput, match=f"{option} is '{key.hex()}', {NOBODY}"):
        hushfleet("fleet", "init", tmp_path / "plant", *words)
    assert not (tmp_path / "plant").exists()


@pytest.mark.parametrize("key", KEYS)
def test_root_names_no_such_key(plant: FleetFolder, key: bytes) -> None:
    before = trust(plant)
    for words in (("--key", OWNED, "--key", key.hex()), ("--next-root", key.hex())):
        with pytest.raises(BadInput, match=f"{words[-2]} is '{key.hex()}', {NOBODY}"):
            hushfleet("release", "keys", plant.path, "--new", *words)
    assert trust(plant) == before


@pytest.mark.parametrize("key", KEYS)
def test_the_aggregator_adds_no_such_device(tmp_path: Path, key: bytes) -> None:
    with pytest.raises(BadInput, match=f"--key is .* {NOBODY}"):
        hushfleet("fleet", "add", tmp_path / "run", "pi-1", "--key", key.hex())
    listed = tmp_path / "devices.toml"
    listed.write_text(f'[devices]\npi-0 = "{OWNED}"\npi-1 = "{key.hex()}"\n')
    with pytest.raises(BadInput, match=rf"devices\.toml: the key of pi-1 is .* {NOBODY}"):
        read_devices(listed)
    with DeviceRegister(tmp_path / "former") as register:  # of an earlier version
        register.add([Board("pi-0", public_key=bytes.fromhex(OWNED)), Board("pi-1", public_key=key), Board("pi-2")])
    with pytest.raises(BadInput, match=rf"former: the key of pi-1 is .* {NOBODY}; remove it: hushfleet fleet forget"):
        read_devices(tmp_path / "former")
    hushfleet("fleet", "forget", tmp_path / "former", "pi-1")
    assert [row.device for row in read_devices(tmp_path / "former")] == ["pi-0", "pi-2"]


@pytest.mark.parametrize("key", KEYS)
def test_the_fleet_adds_no_such_board(plant: FleetFolder, tmp_path: Path, key: bytes) -> None:
    listed = tmp_path / "boards.csv"
    listed.write_text(f"id,board,key\nshed,generic-x86,{OWNED}\ntree,generic-x86,{key.hex()}\n")
    with pytest.raises(BadInput, match=rf"boards\.csv, line 3: the key is .* {NOBODY}"):
        hushfleet("fleet", "add", plant.path, "--csv", listed)


@pytest.mark.parametrize("key", KEYS)
def test_a_device_trusts_no_such_key(plant: FleetFolder, tmp_path: Path, key: bytes) -> None:
    good = {"roster_key": "device", "server_key": "broker", "operator_key": "fleet", "service_key": "fleet"}
    for wrong, section in good.items():
        given = {name: key.hex() if name == wrong else OWNED for name in good}
        file = tmp_path / "device.toml"
        file.write_text(
            f'[device]\nid = "pi-1"\nstate_dir = "state"\nroster_key = "{given["roster_key"]}"\n'
            f'[broker]\nurl = "mqtts://broker"\nserver_key = "{given["server_key"]}"\n'
            '[data]\nkind = "folder"\npath = "images"\n[limits]\nepsilon_server = 8\n'
            f'[fleet]\noperator_key = "{given["operator_key"]}"\nservice_key = "{given["service_key"]}"\n'
            'enrol_url = "mqtts://broker:8884"\n'
        )
        with pytest.raises(BadInput, match=rf"device\.toml: line \d+, column 1: {section}\.{wrong}: .* {NOBODY}"):
            load_config(file)
    text = (plant.path / FILE_NAME).read_text()
    (plant.path / FILE_NAME).write_text(f'{text}\n[device.broker]\nserver_key = "{key.hex()}"\n')
    with pytest.raises(BadInput, match=rf"device\.broker\.server_key: .* {NOBODY}"):
        _ = FleetFolder(plant.path).config


# what a file or a message brings


@pytest.mark.parametrize("key", KEYS)
def test_a_folder_with_such_a_key_is_not_used(plant: FleetFolder, key: bytes) -> None:
    plant.operator_public.write_text(f"{key.hex()}\n")
    with pytest.raises(BadInput, match=rf"operator\.pub is .* {NOBODY}"):
        keys.operator_public(plant)
    plant.release_keys.unlink()
    plant.root_public.write_text(f"{key.hex()}\n")
    with pytest.raises(BadInput, match=rf"root\.pub is .* {NOBODY}"):
        trust(plant)


@pytest.mark.parametrize("key", KEYS)
def test_no_statement_about_release_keys_names_one(plant: FleetFolder, tmp_path: Path, key: bytes) -> None:
    """A board keeps the statement that it has, and so does the fleet."""
    one, two, three = (Identity.generate().public_key.hex() for _ in range(3))
    for place in range(4):
        root, release, daily, heir = (
            key.hex() if part == place else each for part, each in enumerate((ROOT.public_key.hex(), one, two, three))
        )
        with pytest.raises(Malformed, match="a public key that somebody can own"):
            ReleaseKeys(2, root, (release,), 1, daily, heir)
    put_trust(tmp_path, one)
    before = Trust.of_board(tmp_path)
    line = statement(one, number=2).to_line().replace(one, key.hex())  # as a root of an earlier version signed it
    with pytest.raises(Malformed, match="a public key that somebody can own"):
        before.after(line)
    plant.release_keys.write_text(plant.release_keys.read_text().replace(trust(plant).in_force().newest_key, key.hex()))
    with pytest.raises(BadInput, match=r"release_keys cannot be used: .*a public key that somebody can own"):
        trust(plant)


def test_nobodys_signature_counts_for_no_statement_and_no_release(tmp_path: Path) -> None:
    """Anybody makes it: R = s B, here for s = 0."""
    word = Signed(statement(OWNED).statement, {NEUTRAL.hex(): (NEUTRAL + bytes(32)).hex()})
    assert not word.is_signed_by(NEUTRAL.hex())


@pytest.mark.parametrize("key", KEYS)
def test_no_membership_list_has_such_a_board(plant: FleetFolder, tmp_path: Path, key: bytes) -> None:
    """It would stop each secure aggregation that draws it. 0.3.0 signed such lists."""
    operator, owned = Identity.generate(), bytes.fromhex(OWNED)
    signed = MembershipList.of({"pi-0": owned, "pi-1": key}).signed(operator)
    with pytest.raises(Malformed, match=f"the key of pi-1 in the membership list is .* {NOBODY}"):
        MembershipList.from_bytes(signed.to_bytes(), operator=operator.public_key)
    file = tmp_path / "roster.signed"
    file.write_bytes(signed.to_bytes())
    assert membership_list_file(file).current() is None
    with pytest.raises(BadInput, match=f"roster.signed is not a readable membership list: the key of pi-1 .* {NOBODY}"):
        read_membership_list(file)
    with DeviceRegister(tmp_path / "run") as register:
        register.add([Board("pi-0", public_key=owned), Board("pi-1", public_key=key)])
        wanted = membership_list.wanted(plant, register.devices())
        assert wanted is not None
        assert wanted.devices == ("pi-0",)
        hushfleet("fleet", "roster", "export", tmp_path / "run", "--out", tmp_path / "roster.unsigned")
    assert read_membership_list(tmp_path / "roster.unsigned").devices == ("pi-0",)


class Nobody:
    def __init__(self, key: bytes) -> None:
        self.public_key = key

    def sign(self, data: bytes) -> bytes:
        return NEUTRAL + bytes(32)


MESSAGES: list[Callable[[bytes], object]] = [
    lambda key: Birth("pi-1", 1, "ready", "generic-x86", "0.3.0", key, 512),
    lambda key: ServerState(1, "ready", key),
    lambda key: EnrolRequest("pi-1", b"csr", key, b"", bytes(16), "generic-x86", "0.3.0"),
]


@pytest.mark.parametrize("key", KEYS)
def test_no_message_comes_from_nobody(key: bytes) -> None:
    for message, pinned in itertools.product(MESSAGES, (None, key)):
        frame = encode_message(message(key), Nobody(key), federation="f")  # type: ignore[arg-type]
        with pytest.raises(BadSignature, match="can have no owner"):
            decode_message(frame, federation="f", public_key=pinned)
    assert issubclass(BadSignature, HushfleetError)
