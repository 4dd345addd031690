"""`hushfleet push` over a real ssh to a real sshd: what is installed, what is left, and what is said when it fails.

Only what a board's root would do to this machine is replaced: `install.sh` installs below a folder.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.fleet.software.releases import add_release
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.errors import BadInput, HushfleetError
from support.command import hushfleet
from support.desk import make_folder, served, until
from support.ports import free_ports
from support.releases import build_release
from support.tools import find

SSHD = find("sshd") or "sshd"
pytestmark = pytest.mark.needs("ssh", "sshd")
BOARD, OTHER = "greenhouse-01", "greenhouse-02"
ME = getpass.getuser()
NOTHING = "exit 0"
TOOLS = {  # what needs root is left undone, and who logs in is not root
    "id": 'case "$1" in -u) cat "$TOOLS/uid";; esac',
    "sudo": 'echo 0 > "$TOOLS/uid"; "$@"; s=$?; echo 1000 > "$TOOLS/uid"; exit $s',
    "useradd": NOTHING,
    "chown": NOTHING,
    "chgrp": NOTHING,
    "setpriv": 'shift 3; exec "$@"',
    "stat": "echo ext2/ext3",
    "install": 'exec /usr/bin/install -d -m "$3" "$8"',
}
LOGIN = """
cd "{home}"
export TOOLS="{tools}" PATH="{tools}:/usr/bin:/bin" HUSHFLEET_ROOT="{root}"
echo "Welcome to your board!"
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
CONFIG = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/mine.pub
ForceCommand {folder}/login
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


class Machine:
    """A board that runs already: its sshd, the home of who logs in, and the folder that stands for its root."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.root, self.tools = folder, folder / "home", folder / "root", folder / "tools"
        for each in (self.home, self.root, self.tools):
            each.mkdir()
        for name in ("host", "mine", "stranger"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(keygen, check=True)
        for name, text in TOOLS.items():
            self.replace(name, text)
        self.has_python(Path(sys.executable))
        (self.tools / "uid").write_text("1000\n")
        _script(folder / "login", LOGIN.format(home=self.home, tools=self.tools, root=self.root))
        (self.port,) = free_ports(1)
        (folder / "sshd_config").write_text(CONFIG.format(port=self.port, folder=folder))
        self.known_as("host")

    def replace(self, name: str, text: str) -> None:
        _script(self.tools / name, text)

    def has_python(self, python: Path | None) -> None:
        """`python3` of the board; None: there is none, as far as the login can see."""
        self.replace("python3", "exit 127" if python is None else f'exec "{python}" "$@"')
        for version in ("3.11", "3.12", "3.13"):  # of this machine
            self.replace(f"python{version}", "exit 127")

    def known_as(self, key: str) -> None:
        known = (self.folder / f"{key}.pub").read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {' '.join(known)}\n")

    def options(self, key: str = "mine") -> str:
        asks_nobody = "-o BatchMode=yes -o IdentitiesOnly=yes -o IdentityAgent=none -F none"
        files = f"-i {self.folder / key} -o UserKnownHostsFile={self.folder / 'known_hosts'}"
        return f"-p {self.port} {asks_nobody} {files}"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd asks for it, Debian's start-up makes it
        log = self.folder / "sshd.log"
        command = [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(log)]
        with subprocess.Popen(command) as process:
            try:
                until(lambda: "listening" in (log.read_text() if log.exists() else ""))
                yield
            finally:
                process.terminate()

    def installed(self, path: str) -> Path:
        return self.root / path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    with made.listening():
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> FleetFolder:
    path = tmp_path_factory.mktemp("desk")
    folder = make_folder(path / "fleet", boards=3)
    key = load_or_create(folder.release_key)
    with FleetRegistry(folder.path) as registry:
        release = build_release(path / "1.0.hfr", "1.0", key=key)
        add_release(folder, registry, release)
        registry.write("UPDATE boards SET board = 'raspberry-pi-4-4gb' WHERE id = 'greenhouse-03'")
    return folder


def words_of(machine: Machine, fleet: FleetFolder, device: str = BOARD, *, key: str = "mine") -> list[str]:
    return [
        "push", f"{ME}@127.0.0.1", "--fleet", str(fleet.path), "--device", device, "--ssh", machine.options(key),
    ]  # fmt: skip


def push(*given: Any, **named: Any) -> str:
    return hushfleet(*words_of(*given, **named))


def test_a_running_board_is_installed_twice_and_enrols(machine: Machine, fleet: FleetFolder) -> None:
    assert "it enrols by itself" in push(machine, fleet)
    assert f'id = "{BOARD}"' in machine.installed("etc/hushfleet/device.toml").read_text()
    assert os.readlink(machine.installed("opt/hushfleet/current")) == "releases/1.0"
    token = machine.installed("var/lib/hushfleet/enrol.token")
    first = token.read_text()
    assert token.stat().st_mode & 0o777 == 0o600
    push(machine, fleet)  # nothing is wrong with that
    assert len(token.read_text()) == len(first)
    assert token.read_text() != first, "the token before holds no longer"
    assert list(machine.home.iterdir()) == [], "nothing is left but what is installed"
    with FleetRegistry(fleet.path) as registry, served(fleet):
        assert len(registry.tokens(BOARD, now=0.0)) == 1
        file = machine.installed("device.toml")
        text = machine.installed("etc/hushfleet/device.toml").read_text()
        text = text.replace('"/var/lib/', f'"{machine.root}/var/lib/').replace('"/etc/', f'"{machine.root}/etc/')
        file.write_text(text.replace("[device]\n", "[device]\nallow_volatile_state = true\n"))
        python, client = machine.installed("opt/hushfleet/python"), machine.installed("opt/hushfleet/current")
        environment = {**os.environ, "TOOLS": str(machine.tools), "NOTIFY_SOCKET": ""}
        with subprocess.Popen([python, "-I", client, file], env=environment) as process:
            until(lambda: registry.board(BOARD).standing == "enrolled")
            until(lambda: not token.exists())
            process.terminate()
    with pytest.raises(BadInput, match="has a card and is enrolled"):
        push(machine, fleet)


def test_what_cannot_be_reached_or_entered_is_named(machine: Machine, fleet: FleetFolder) -> None:
    with pytest.raises(HushfleetError, match=r"could not reach .*by hand: ssh -p"):
        push(machine, fleet, OTHER, key="stranger")
    machine.known_as("stranger")
    with pytest.raises(HushfleetError, match="could not reach"):
        push(machine, fleet, OTHER)
    machine.known_as("host")
    for python, said in ((None, "no Python"), ("echo 3.8", "Python 3.8")):
        machine.has_python(None)
        if python is not None:
            machine.replace("python3", python)
        with pytest.raises(BadInput, match=rf"has {said}, and releases are made for 3\."):
            push(machine, fleet, OTHER)
    machine.has_python(Path(sys.executable))
    with pytest.raises(BadInput, match=r"which is aarch64"):
        push(machine, fleet, "greenhouse-03")
    words = ["push", "--fleet", str(fleet.path), "--device", OTHER, "--", "-oProxyCommand=true"]
    with pytest.raises(BadInput, match="not a destination"):
        hushfleet(*words)
    with pytest.raises(BadInput, match='--ssh "-i \'key": No closing quotation'):
        hushfleet(*words[:-2], "--ssh", "-i 'key", "me@board")


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("tar", "exec cat > /dev/full"),  # the disk is full at once
        ("cp", 'case "$1" in */ca.pem) cat "$1" > /dev/full; exit 1;; esac; exec /bin/cp "$@"'),  # and in the middle
        ("sudo", "exit 1"),  # it wants a password that nobody knows
    ],
)
def test_a_board_that_gives_up_is_cleaned_and_can_be_tried_again(
    machine: Machine, fleet: FleetFolder, tool: str, text: str
) -> None:
    machine.replace(tool, text)
    with pytest.raises(HushfleetError, match=r"exit code 1; .*push again"):
        push(machine, fleet, OTHER)
    assert list(machine.home.iterdir()) == []
    if tool in TOOLS:
        machine.replace(tool, TOOLS[tool])
    else:
        (machine.tools / tool).unlink()
    (machine.tools / "uid").write_text("1000\n")
    assert "it enrols by itself" in push(machine, fleet, OTHER)


def test_control_c_on_a_terminal_ends_both_sides(machine: Machine, fleet: FleetFolder) -> None:
    # exec: dash loses a Ctrl-C that comes while it starts a child
    machine.replace("chgrp", 'echo "in the middle"; exec sleep 60')
    command = [sys.executable, "-m", "hushfleet.aggregator.commands", *words_of(machine, fleet, OTHER)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    said = b""
    while b"in the middle" not in said:
        said += os.read(terminal, 4096)
    assert (machine.home / ".hushfleet-push").exists()
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # EIO: the terminal has no other end any more
        while more := os.read(terminal, 4096):
            said += more
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130, said.decode()
    until(lambda: not list(machine.home.iterdir()))
    machine.replace("chgrp", NOTHING)
    (machine.tools / "uid").write_text("1000\n")
    left = machine.home / ".hushfleet-push"  # of a push whose machine lost its power
    left.mkdir()
    (left / "enrol.token").write_text("old")
    assert "it enrols by itself" in push(machine, fleet, OTHER)
    assert list(machine.home.iterdir()) == []


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
