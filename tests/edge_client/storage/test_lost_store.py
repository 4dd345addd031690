"""A store that is gone, while something that was beside it is there: no client begins an empty ledger then."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.fleet.trial import check_release
from hushfleet.edge_client.storage.round_commit import RoundCommit
from hushfleet.edge_client.storage.state_files import REMNANTS
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import LostStore, StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.mechanism import GaussianMechanism

ROOT = Path(__file__).resolve().parents[3]
DEVICE_TOML = """
[device]
id = "bench-01"
state_dir = "state"
allow_volatile_state = true
[broker]
url = "mqtt://127.0.0.1:9"
[data]
kind = "folder"
path = "images"
[limits]
epsilon_server = 8.0
"""
IN_FLEET = DEVICE_TOML + f'[fleet]\noperator_key = "{"cd" * 32}"\nenrol_url = "mqtts://127.0.0.1:9"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "store.sqlite"


def began_anew_as_it_was(path: Path) -> bool:
    """The rule of 0.3.0: a store that is not there is made, unless its write-ahead log is."""
    return not path.exists() and not path.with_name(path.name + "-wal").exists()


def spend(path: Path) -> None:
    with DeviceStore(path, device="bench-01") as store:
        state = DeviceState(PublicState(np.zeros(8, bool), 1), None, {})
        store.commit_round(RoundCommit("t", 1, GaussianMechanism(2.0).charge(), state, b"u", b"p"))
        assert store.ledger.epsilon_server(delta=1e-5) > 1


@pytest.mark.parametrize("remnant", [*REMNANTS, "store.sqlite-wal", "store.sqlite-shm", "store.sqlite-journal"])
def test_no_ledger_begins_at_zero_beside_a_remnant(path: Path, remnant: str) -> None:
    path.with_name(remnant).write_bytes(b"of a store that was here")
    assert began_anew_as_it_was(path) == (remnant != "store.sqlite-wal")
    with pytest.raises(LostStore, match=f"is missing, but beside it there is still {remnant}") as caught:
        DeviceStore(path, device="bench-01")
    assert "move " in str(caught.value)
    assert not path.exists()


def test_a_link_to_a_disk_that_is_not_mounted_is_no_first_start(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "disk" / "store.sqlite")
    with pytest.raises(LostStore, match=r"is missing, but beside it there is still store\.sqlite\."):
        DeviceStore(path, device="bench-01")
    assert not (tmp_path / "disk").exists()


def test_the_lock_alone_tells_that_there_was_a_store(path: Path) -> None:
    spend(path)
    path.unlink()
    assert [each.name for each in path.parent.iterdir()] == ["store.sqlite.lock"]
    assert began_anew_as_it_was(path)
    for _ in range(2):  # the first refusal leaves what the second one sees
        with pytest.raises(LostStore, match="is missing"):
            DeviceStore(path, device="bench-01")
    with pytest.raises(LostStore, match="is missing"):
        DeviceStore(path, device="bench-01", inspect=True)


@pytest.mark.parametrize(
    "before",
    ["lost+found/", "enrol.token", "incoming/", "healthy", "photo.jpg", "store.sqlite.lock", "store.sqlite.new"],
)
def test_what_lies_there_before_the_first_start_stops_nobody(path: Path, before: str) -> None:
    """Files of a new file system, a card, a release that is tried first, its owner, a first start that was cut off."""
    if before.endswith("/"):
        (path.parent / before).mkdir()
    else:
        path.with_name(before).write_bytes(b"" if before.endswith(".lock") else b"x")
    with pytest.raises(StoreError, match="start the client once") as caught:
        DeviceStore(path, device="bench-01", inspect=True)
    assert not isinstance(caught.value, LostStore)
    with DeviceStore(path, device="bench-01") as store:
        assert store.ledger.rounds_charged() == 0


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_first_start_that_is_killed_may_be_repeated(path: Path, where: str) -> None:
    """Around the moment at which the whole store gets its name."""
    script = """
        import os, sys
        from pathlib import Path
        from hushfleet.edge_client.storage.store import DeviceStore
        replace, where = os.replace, sys.argv[2]

        def killed(*names):
            if where == "after":
                replace(*names)
            os._exit(9)

        os.replace = killed
        DeviceStore(Path(sys.argv[1]), device="bench-01")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = textwrap.dedent(script)
    assert subprocess.run([sys.executable, "-c", code, path, where], env=environment, check=False).returncode == 9
    assert path.exists() == (where == "after")
    lock = path.with_name("store.sqlite.lock")
    assert lock.stat().st_size == 0
    with DeviceStore(path, device="bench-01") as store:
        assert store.ledger.rounds_charged() == 0
    assert lock.read_text().split() == [str(os.getpid())]


def test_an_empty_file_is_no_store(path: Path) -> None:
    """A power cut or a repair of the file system may leave one."""
    spend(path)
    path.write_bytes(b"")
    for inspect in (False, True):
        with pytest.raises(LostStore, match="is damaged: it is empty"):
            DeviceStore(path, device="bench-01", inspect=inspect)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("state", ["gone", "empty", "damaged"])
@pytest.mark.parametrize(
    ("text", "advice", "other"),
    [
        (DEVICE_TOML, "give the device a new id, and count what the old id has spent", "fleet"),
        (IN_FLEET, "hushfleet fleet renew DIR bench-01 --new-card", "new id"),
    ],
    ids=["alone", "in a fleet"],
)
def test_a_person_is_told_what_to_do_and_systemd_not_to_try_again(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str], text: str, advice: str, other: str, state: str
) -> None:
    file = tmp_path / "device.toml"
    file.write_text(text)
    spend(path)
    change: dict[str, Callable[[], object]] = {
        "gone": path.unlink,
        "empty": lambda: path.write_bytes(b""),
        "damaged": lambda: path.write_bytes(b"this is no database\n" * 400),
    }
    change[state]()
    unit = (ROOT / "firmware_profiles/cards/kit/units/hushfleet-client.service").read_text()
    for command in ([str(file)], ["status", str(file)]):
        code = main(command)
        told = capsys.readouterr().err
        assert code == 2
        assert f"RestartPreventExitStatus={code}\n" in unit
        assert advice in told
        assert other not in told.partition("ledger")[2]


def test_a_release_on_trial_does_not_pass_over_it(path: Path) -> None:
    spend(path)
    path.unlink()
    with pytest.raises(LostStore, match="--new-card"):
        check_release(path.parent, path, device="bench-01")
