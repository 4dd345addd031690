"""`make test` on a machine that has Python, make and a C compiler alone: what is installed, skipped and said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.tools import SEARCH_PATH, TOOLS

ROOT = Path(__file__).resolve().parents[1]
INSTALL = ROOT / "tests" / "install_tools.sh"
NEEDY = (  # of each tool some tests, quick ones where it is there
    "tests/aggregator/broker/test_broker.py",
    "tests/aggregator/fleet/commands/test_flash.py",
    "tests/aggregator/fleet/test_push.py",
    "tests/aggregator/fleet/test_units.py",
    "tests/attacks/test_use_the_enrolment_broker.py",
    "tests/firmware_profiles/cards/test_units.py",
    "tests/hushfleet/wire/link/test_tls.py",
)
HIDE = 'for path in $HIDDEN; do mount --bind "$EMPTY" "$path" || exit 99; done; exec "$@"'
"""An empty file that nobody can execute lies over each program, for this process and its children alone."""
FAKES = {  # what each does beside noting how it was called
    "apt-cache": '[ "$2" != chromium-headless-shell ]',
    "apt-get": """
"$DPKG_ROOT/usr/sbin/policy-rc.d" mosquitto start; echo "a service may start: $?" >> "$LOG"
case "$*" in *"$FAILING"*) exit 100 ;; esac""",
    "id": 'echo "$USER_ID"',
    "sudo": '[ "$1" = -n ] && [ "$PASSWORD" = none ] || exit 1\nshift\nexec "$@"',
    "systemctl": "exit 0",
}
MISSING = (
    "mosquitto openssh-client openssh-server mtools dosfstools e2fsprogs systemd chromium-headless-shell gcc libc6-dev "
    "netplan.io espeak-ng"
)
INSTALL_ARGUMENTS = f"install -y --no-install-recommends {MISSING.replace(' chromium-headless-shell', '')}"


def hidden(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees none of the tools but the compiler; skips where no namespace can be made."""
    empty = folder / "empty"
    empty.touch(mode=0o600)
    programs = [program for name, (_, programs) in TOOLS.items() if name != "compiler" for program in programs]
    every = {str(Path(place) / program) for place in SEARCH_PATH.split(":") for program in programs}
    paths = sorted({os.path.realpath(path) for path in every if os.path.exists(path)})
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    namespace = ["unshare", *as_root, "--mount", "sh", "-c", HIDE, "sh"]
    environment = {**os.environ, "HIDDEN": " ".join(paths), "EMPTY": str(empty)}
    for name in ("HUSHFLEET_NO_SKIPS", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], env=environment, check=False).returncode:
        pytest.skip("this system lets nobody hide files from a process")
    return subprocess.run(
        [*namespace, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


class BareMachine:
    """A folder in which nothing of tests/tools.txt is found, with an apt-get that notes what it is told."""

    def __init__(self, folder: Path, *, without: tuple[str, ...] = (), present: bool = False) -> None:
        self.folder, self.log = folder, folder / "log"
        self.policy = folder / "usr" / "sbin" / "policy-rc.d"
        self.policy.parent.mkdir(parents=True)
        (folder / "bin").mkdir()
        for name in ("chmod", "dirname", "env", "rm", "sh", "tee", "tr", "true"):
            path = shutil.which(name)
            assert path is not None
            (folder / "bin" / name).symlink_to(path)
        for name, text in FAKES.items():
            if name not in without:
                fake = folder / "bin" / name
                fake.write_text(f'#!/bin/sh\necho "{name} $*" >> "$LOG"\n{text}\n')
                fake.chmod(0o755)
        shutil.copy(INSTALL, folder)
        rows = [f"{name} {','.join(packages)} absent-{name}\n" for name, (packages, _) in TOOLS.items()]
        (folder / "tools.txt").write_text("# a comment\n" + "".join(rows))
        if present:
            for name in TOOLS:
                (folder / "bin" / f"absent-{name}").symlink_to("sh")

    def install(self, *packages: str, user_id: int = 0, password: str = "none", failing: str = "nothing") -> str:
        """What the script prints; it must end well."""
        environment = {
            "PATH": str(self.folder / "bin"), "LOG": str(self.log), "DPKG_ROOT": str(self.folder),
            "USER_ID": str(user_id), "PASSWORD": password, "FAILING": failing,
        }  # fmt: skip
        command = [str(self.folder / INSTALL.name), *packages]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def calls(self, *names: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(names)]


@pytest.mark.parametrize("user_id", [0, 1000])
def test_who_may_installs_and_no_service_starts(user_id: int, tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    printed = machine.install("make", user_id=user_id)
    assert f"Installing for the tests, by apt-get: make {MISSING}" in printed
    assert machine.calls("apt-get") == [
        "apt-get -qq update",
        f"apt-get -qq {INSTALL_ARGUMENTS}".replace("ends ", "ends make "),
    ]
    assert machine.calls("a service") == ["a service may start: 101"] * 2
    assert not machine.policy.exists(), "what is installed later may start"
    disabled = ["mosquitto", "ssh.service", "ssh.socket"]
    assert machine.calls("systemctl") == [f"systemctl disable --quiet {unit}" for unit in disabled]
    asked = machine.calls("sudo")
    assert (asked[0] == "sudo -n true" and all(line.startswith("sudo -n ") for line in asked)) if user_id else not asked


def test_a_policy_for_services_that_was_there_stays(tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    machine.policy.write_text("#!/bin/sh\nexit 104\n")
    machine.policy.chmod(0o755)
    machine.install()
    assert machine.calls("a service") == ["a service may start: 104"] * 2
    assert machine.policy.exists()


@pytest.mark.parametrize("without", [(), ("sudo",)])
def test_who_may_not_is_told_in_one_line(without: tuple[str, ...], tmp_path: Path) -> None:
    machine = BareMachine(tmp_path, without=without)
    (line,) = machine.install("make", user_id=1000, password="needed").splitlines()
    script = tmp_path / INSTALL.name
    assert (
        line == f"Tests are skipped that need what Debian calls make {MISSING}. To run them, type: sudo {script} make"
    )
    assert machine.calls("apt-get", "sudo -n e", "sudo -n t ", "systemctl") == []


def test_a_system_without_apt_get_is_told_in_one_line(tmp_path: Path) -> None:
    (line,) = BareMachine(tmp_path, without=("apt-get",)).install().splitlines()
    assert MISSING in line
    assert line.endswith("Install it by this system's package manager to run them.")


@pytest.mark.parametrize("step", ["update", "install"])
def test_an_apt_get_that_fails_stops_no_test(step: str, tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    assert f"apt-get {step} failed. To try again, type: " in machine.install(failing=step).splitlines()[-1]
    assert not machine.policy.exists()


def test_where_nothing_is_missing_nothing_is_done_or_said(tmp_path: Path) -> None:
    machine = BareMachine(tmp_path, present=True)
    assert machine.install() == ""
    assert machine.calls() == []


def test_who_starts_mosquitto_says_so() -> None:
    """Else `make test` fails on a machine without it."""
    starts = re.compile(r"""start_broker\("mosquitto"|brokers_of\(|"fleet", "up\"""")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    found = [path for path in files if starts.search(path.read_text("utf-8"))]
    assert len(found) >= 6
    assert [path.name for path in found if not re.search(r"\bneeds?\(", path.read_text("utf-8"))] == []


@pytest.mark.slow
def test_without_the_tools_no_test_fails_and_one_line_says_what_to_type(tmp_path: Path) -> None:
    words = ["-m", "not slow", "-p", "no:cacheprovider", "--timeout", "300", f"--basetemp={tmp_path / 'inner'}"]
    done = hidden(sys.executable, "-m", "pytest", *words, *NEEDY, folder=tmp_path)
    last = done.stdout.splitlines()[-3:]
    assert done.returncode == 0, done.stdout
    (line,) = [each for each in done.stdout.splitlines() if "this machine lacks" in each]
    assert line in last
    counted = re.search(r"(\d+) skipped", last[-1])
    assert counted, last
    assert line.startswith(f"{counted[1]} tests were skipped, because this machine lacks ")
    assert int(counted[1]) >= 40
    for name in ("dosfstools", "mosquitto", "mtools", "ssh", "sshd", "systemd"):
        assert f" {name}" in line.partition(".")[0] + "."
    for package in ("dosfstools", "mosquitto", "mtools", "openssh-client", "openssh-server", "systemd"):
        assert package in line
    assert line.endswith("type: sudo tests/install_tools.sh")
