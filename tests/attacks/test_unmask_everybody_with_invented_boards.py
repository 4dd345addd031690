"""Whoever runs the server wants what each board sends, in a fleet with secure aggregation whose boards check the
roster.

He has the fleet's folder, so he is the aggregator to every board. With the operator's key in the folder as well, he
signs a membership list of the victim and of boards that do not exist, whose keys he makes: then all of a sum but the
victim's part is his own. Held by: the operator's key lies elsewhere (`fleet init --operator-key`), and whoever has it
looks at the list before he signs. docs/privacy.md, "Who holds which key".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.device_file import device_toml
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.storage.board import Board
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.privacy.ring import Ring
from hushfleet.wire.format.identity import KEY_BYTES, Identity
from support.desk import make_folder
from support.edge import DEVICE, Bench, Package
from support.secure_fleet import SecureFleet, with_secure_aggregation


class Thief:
    """The person who has a fleet's folder.

    :param folder: as `fleet init` made it.
    """

    def __init__(self, folder: FleetFolder) -> None:
        self.operator = keys.operator_public(folder)
        self.keys = [key for file in sorted(folder.path.rglob("*")) if file.is_file() for key in _keys_in(file)]

    @property
    def operators(self) -> list[Identity]:
        """Those of his keys that boards take for the operator's."""
        return [key for key in self.keys if key.public_key == self.operator]


def _keys_in(file: Path) -> list[Identity]:
    data = file.read_bytes()
    if data.startswith(b"-----BEGIN") and b"PRIVATE KEY" in data:
        key = load_pem_private_key(data, None)
        return [Identity(key)] if isinstance(key, Ed25519PrivateKey) else []
    return [Identity.from_bytes(data)] if len(data) == KEY_BYTES else []


@pytest.fixture
def victim(
    tmp_path: Path, config: DeviceConfig, package: Package, make_bench: Callable[..., Bench]
) -> Callable[[FleetFolder], SecureFleet]:
    """A real board with the card of the fleet in `folder`; the rest of its membership list are invented boards."""

    def make(folder: FleetFolder) -> SecureFleet:
        file = tmp_path / "device.toml"
        file.write_text(device_toml(folder, Board(DEVICE, "generic-x86")))
        card = load_config(file)
        assert card.roster_key is not None
        device = replace(config.device, roster_key=card.roster_key.hex())
        owned = replace(config, device=device, limits=replace(config.limits, accounting="secure", min_devices=8))
        return SecureFleet(make_bench(package=with_secure_aggregation(package).with_spec(rounds=100), config=owned))

    return make


def test_with_the_operators_key_in_the_folder(
    tmp_path: Path, victim: Callable[[FleetFolder], SecureFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is what a fleet that one person holds means: he reads the victim's integers, to the last bit."""
    seen: list[np.ndarray] = []
    encode = Ring.encode
    monkeypatch.setattr(Ring, "encode", lambda *given: seen.append(encode(*given)) or seen[-1].copy())
    folder = make_folder(tmp_path / "greenhouse")
    (operator,) = Thief(folder).operators
    fleet = victim(folder)
    fleet.operator = operator
    fleet.membership_list = fleet.membership_list_of({DEVICE: fleet.bench.store.identity.public_key})
    plan = fleet.open_round(1)
    fleet.bench.until(lambda: fleet.bench.entry_status(1) == "acked")
    secure_round, (update,) = fleet.of(plan), fleet.bench.server.updates
    invented = [name for name in secure_round.devices if name != DEVICE]
    sums, of_invented = fleet.sum(secure_round, update, secure_round.devices)
    included = secure_round.pack_included(secure_round.devices)
    answers = {
        name: np.array(secure_round.answer(fleet.keys_of(name), name, included), np.uint32)
        for name in secure_round.members
        if name in invented
    }
    opened, _ = secure_round.opened(sums, answers)
    read = (opened.astype(np.int64) - of_invented) % secure_round.prime
    assert read.tolist() == seen[0].tolist()


def test_with_the_operators_key_elsewhere(tmp_path: Path, victim: Callable[[FleetFolder], SecureFleet]) -> None:
    """Whichever key of the folder he signs with, the board sends nothing and is charged nothing."""
    operator = Identity.generate()
    folder = make_folder(tmp_path / "greenhouse", operator=operator.public_key)
    thief = Thief(folder)
    assert thief.operators == []
    assert {folder.aggregator, folder.service} <= {file.parent for file in folder.path.rglob("identity.key")}
    assert len(thief.keys) >= 3, "of the aggregator, the fleet service and releases"
    fleet = victim(folder)
    for number, key in enumerate([*thief.keys, Identity.generate()], 1):
        fleet.operator = key
        fleet.membership_list = fleet.membership_list_of({DEVICE: fleet.bench.store.identity.public_key})
        fleet.open_round(number)
        fleet.bench.until(lambda number=number: len(fleet.bench.server.declines) == number)
        assert "signature" in fleet.bench.server.declines[-1].reason
    assert fleet.bench.server.updates == []
    assert fleet.bench.store.ledger.entries() == []
