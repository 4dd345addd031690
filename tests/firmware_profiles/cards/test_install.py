"""install.sh below a folder in place of `/`: what it leaves, also when it was cut off anywhere before.

What needs root (users, owners) is replaced by programs that do nothing; a card's `install.sh` runs as root in an
aarch64 system in `make test-arm`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hushfleet.firmware_profiles.cards.boot_partition import MountedBoot
from hushfleet.firmware_profiles.cards.bundle import PYTHONS
from hushfleet.firmware_profiles.cards.cloud_init import write_card
from hushfleet.firmware_profiles.cards.seed import Card
from hushfleet.firmware_profiles.cards.wifi import Wifi
from hushfleet.release.manifest import this_platform
from hushfleet.wire.format.identity import Identity
from support.slots import pack_files
from support.stock import TRIXIE

TOKEN = "token-" * 7
PYTHON, ARCH = this_platform()
DEVICE_TOML = """\
[device]
id = "greenhouse-07"
state_dir = "/var/lib/hushfleet"
[broker]
url = "mqtts://broker.example"
[data]
kind = "folder"
path = "/srv/photos"
[limits]
epsilon_server = 8.0
"""
NOTHING = "#!/bin/sh\nexit 0\n"
SUBSTITUTES = {
    "id": '#!/bin/sh\n[ "$1" = -u ] && echo 0\nexit 0\n',
    "useradd": NOTHING,
    "chown": NOTHING,
    "chgrp": NOTHING,
    "install": '#!/bin/sh\nexec /usr/bin/install -d -m "$3" "$8"\n',
    "systemctl": NOTHING,
    "stat": "#!/bin/sh\necho ${STATE_KIND:-ext2/ext3}\n",
    "setpriv": '#!/bin/sh\nshift 3\nexec "$@"\n',
    # the power is cut at the n-th time that something is about to last
    "mv": '#!/bin/sh\n. "$(dirname "$0")/count"\nexec /bin/mv "$@"\n',
    "rm": '#!/bin/sh\n. "$(dirname "$0")/count"\nexec /bin/rm "$@"\n',
    "dd": '#!/bin/sh\n. "$(dirname "$0")/count"\nexec /bin/dd "$@"\n',
    "sync": '#!/bin/sh\n. "$(dirname "$0")/count"\n',
    "count": 'file=$(dirname "$0")/left\nn=$(($(cat "$file") - 1))\necho $n > "$file"\n[ $n -ne 0 ] || kill -9 $PPID\n',
}


class Board:
    """A card's boot partition and the root file system of the board that it is in."""

    def __init__(self, folder: Path, *, arch: str = ARCH, device_toml: str = DEVICE_TOML) -> None:
        self.root, self.boot, self.tools = folder / "root", folder / "boot", folder / "tools"
        for each in (self.boot, self.tools):
            each.mkdir(parents=True)
        for name, text in TRIXIE.items():
            (self.boot / name).write_text(text)
        for name, text in SUBSTITUTES.items():
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        payload, key = folder / "payload", Identity.generate()
        payload.mkdir()
        (payload / "__main__.py").write_text("print('the client')\n")
        release = pack_files(payload, folder / "a.hfr", "1.2.3", key, arch=arch)
        card = Card(
            device="greenhouse-07",
            release=release,
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            device_toml=device_toml,
            ca=b"authority",
            root_key="ab" * 32,
            release_keys="root's statement",
            token=TOKEN,
            images_path="/srv/photos",
            classes=["cat", "no cat"],
            wifi=Wifi(ssid="home", country="DE", password="correct horse"),
        )
        write_card(MountedBoot(self.boot), card)

    @property
    def state(self) -> Path:
        return self.root / "var/lib/hushfleet"

    def install(self, *, cut_at: int = 0, state_kind: str = "ext2/ext3") -> subprocess.CompletedProcess[str]:
        (self.tools / "left").write_text(str(cut_at))
        path = f"{self.tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["sh", str(self.boot / "hushfleet" / "install.sh")]
        environment = {**os.environ, "PATH": path, "HUSHFLEET_ROOT": str(self.root), "STATE_KIND": state_kind}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def secrets_on_the_card(self) -> list[str]:
        secrets = (TOKEN.encode(), Wifi(ssid="home", country="DE", password="correct horse").key.encode())
        files = [path for path in self.boot.rglob("*") if path.is_file()]
        return sorted(path.name for path in files if any(secret in path.read_bytes() for secret in secrets))

    def assert_installed(self) -> None:
        opt, etc, units = self.root / "opt/hushfleet", self.root / "etc/hushfleet", self.root / "etc/systemd/system"
        assert os.readlink(opt / "current") == "releases/1.2.3"
        done = subprocess.run([opt / "python", "-I", opt / "current"], capture_output=True, text=True, check=True)
        assert done.stdout == "the client\n"
        command = self.root / "usr/local/bin/hushfleet-edge"
        assert os.access(command, os.X_OK)
        assert 'exec /opt/hushfleet/python -I /opt/hushfleet/current "$@"' in command.read_text().splitlines()
        shown = subprocess.run(
            [opt / "python", "-I", opt / "slots.pyz", "show", "--root", opt, "--state", self.state],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert '"good": "1.2.3"' in shown.stdout
        assert (etc / "device.toml").read_text() == DEVICE_TOML
        assert (etc / "ca.pem").read_bytes() == b"authority"
        assert (self.state / "enrol.token").read_text().strip() == TOKEN
        assert (self.state / "enrol.token").stat().st_mode & 0o777 == 0o600
        assert {path.name for path in (self.root / "srv/photos").iterdir()} == {"cat", "no cat"}
        for link in ("multi-user.target.wants/hushfleet-client.service", "timers.target.wants/hushfleet-check.timer"):
            assert (units / link).resolve().is_file()
        assert not list(units.rglob("hushfleet-install*"))
        assert self.secrets_on_the_card() == []
        assert "wlan0" not in (self.boot / "network-config").read_text()
        assert not list(self.root.rglob("*.part"))


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_installs_and_says_so(board: Board) -> None:
    assert board.secrets_on_the_card() == ["enrol.token", "network-config"]
    first_boot = ["sh", str(board.boot / "hushfleet" / "first-boot.sh"), "--later"]
    subprocess.run(first_boot, env={**os.environ, "HUSHFLEET_ROOT": str(board.root)}, check=True)
    unit = board.root / "etc/systemd/system/multi-user.target.wants/hushfleet-install.service"
    assert f"ExecStart=/bin/sh {board.boot}/hushfleet/install.sh" in unit.read_text()
    done = board.install()
    assert done.returncode == 0, done.stdout + done.stderr
    board.assert_installed()
    assert "release 1.2.3 is installed" in (board.boot / "hushfleet/install.log").read_text()
    (board.state / "enrol.token").unlink()  # the board has enrolled
    again = board.install()
    assert "nothing to do" in again.stdout
    assert not (board.state / "enrol.token").exists()


def test_power_cut_at_any_moment(board: Board) -> None:
    """However far it came, the next run ends well, and nothing that was secret is left on the card."""
    cuts = 0
    for cut_at in range(1, 200):
        done = board.install(cut_at=cut_at)
        if done.returncode == 0:
            break
        cuts += 1
        assert done.returncode in (-9, 137), done.stderr  # itself, or what it had started
        token = board.state / "enrol.token"
        assert TOKEN in (token.read_text() if token.exists() else "") or "enrol.token" in board.secrets_on_the_card()
        if cut_at % 2 and not (board.boot / "hushfleet/done").exists():
            shutil.rmtree(board.root)  # and a board whose root had not been written either
            if "enrol.token" not in board.secrets_on_the_card():
                (board.boot / "hushfleet/enrol.token").write_text(f"{TOKEN}\n")
    assert cuts > 20
    board.assert_installed()


def test_half_erased_token_does_not_replace_a_whole_one(board: Board) -> None:
    board.install(cut_at=0)
    (board.boot / "hushfleet/done").unlink()
    (board.boot / "hushfleet/enrol.token").write_bytes(bytes(44))
    assert board.install().returncode == 0
    board.assert_installed()


def test_a_link_where_the_token_goes_is_not_followed(board: Board) -> None:
    """`hushfleet push` installs anew on a board whose client may not be its owner's any more."""
    board.state.mkdir(parents=True)
    other = board.root / "shadow"
    other.write_text("secret")
    (board.state / "enrol.token.part").symlink_to(other)
    assert board.install().returncode == 0
    board.assert_installed()
    assert other.read_text() == "secret"


def test_a_board_whose_data_are_one_file_gets_no_folder_in_its_place(board: Board) -> None:
    (board.boot / "hushfleet/images_path").write_text("\n")
    (board.boot / "hushfleet/classes").write_text("")
    assert board.install().returncode == 0
    assert not (board.root / "srv").exists()
    assert board.root.stat().st_mode & 0o7777 != 0o2775, "nor does / become the client's"


def test_a_client_that_may_delete_old_images_may_write_where_they_lie(board: Board, tmp_path: Path) -> None:
    dropped = "etc/systemd/system/hushfleet-client.service.d/data.conf"
    assert board.install().returncode == 0
    assert not (board.root / dropped).exists()
    text, count = re.subn(r"(\[data\][^[]*)", r'\1inbox = "/srv/new photos"\nkeep = "90d"\n', DEVICE_TOML)
    assert count == 1
    keeps = Board(tmp_path / "keeps", device_toml=text)
    assert keeps.install().returncode == 0

    lines = (keeps.root / dropped).read_text().splitlines()
    assert lines == ["[Service]", 'ReadWritePaths="-/srv/photos"', 'ReadWritePaths="-/srv/new photos"']
    assert (keeps.root / "srv/new photos").is_dir()


def test_card_for_another_python_says_what_to_do(board: Board) -> None:
    (board.boot / "hushfleet/python").write_text("3.2\n")
    done = board.install()
    assert done.returncode == 2, "systemd does not try it each minute"
    assert "this card is for Python 3.2, which is not here" in done.stdout
    assert f"--python for the system that it starts, {PYTHONS[0]} to {PYTHONS[-1]}" in done.stdout
    assert "--python" in (board.boot / "hushfleet/install.log").read_text()
    assert not (board.root / "opt").exists()


def test_a_release_for_another_system_takes_no_token(tmp_path: Path) -> None:
    """As where 32-bit programs run on a 64-bit kernel."""
    board = Board(tmp_path, arch="riscv64")
    done = board.install()
    assert done.returncode == 2, "systemd does not try it each minute"
    assert f"release 1.2.3 is for {PYTHON} on riscv64; here is {PYTHON} on {ARCH}" in done.stdout
    assert not list((board.root / "opt/hushfleet/releases").glob("*"))
    assert not (board.root / "opt/hushfleet/current").exists()
    assert "enrol.token" in board.secrets_on_the_card()


def test_damaged_release_leaves_nothing_and_keeps_the_token(board: Board) -> None:
    release = board.boot / "hushfleet/release.hfr"
    release.write_bytes(release.read_bytes()[:-1] + b"x")
    done = board.install()
    assert done.returncode == 1
    assert "damaged" in done.stdout
    assert not (board.root / "opt/hushfleet/current").exists()
    assert "enrol.token" in board.secrets_on_the_card()


@pytest.mark.parametrize("kind", ["overlayfs", "tmpfs", "ramfs"])
def test_a_state_that_is_forgotten_at_each_start_is_refused(tmp_path: Path, kind: str) -> None:
    board = Board(tmp_path)
    done = board.install(state_kind=kind)
    assert done.returncode == 2
    assert f"whose file system ({kind}) forgets at each start what was written. Turn the overlay off" in done.stdout
    assert not (board.root / "opt").exists(), "nothing was installed"


@pytest.mark.parametrize(("kind", "mark"), [("overlayfs", ".dockerenv"), ("overlayfs", "run/.containerenv")])
def test_the_overlay_of_a_container_lasts(tmp_path: Path, kind: str, mark: str) -> None:
    board = Board(tmp_path)
    (board.root / mark).parent.mkdir(parents=True, exist_ok=True)
    (board.root / mark).touch()
    assert board.install(state_kind=kind).returncode == 0


def test_a_tester_may_allow_it(tmp_path: Path) -> None:
    allowed = DEVICE_TOML.replace("[broker]", "allow_volatile_state = true\n[broker]")
    assert Board(tmp_path, device_toml=allowed).install(state_kind="tmpfs").returncode == 0
