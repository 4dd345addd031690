"""A systemd of a test's own, which runs a board's units. Needs root; nothing outside is changed.

It is a user's instance, with a control group of its own and a `/run` that nobody else sees.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
_START = """
mount --make-rprivate /
umount -R /sys/fs/cgroup 2> /dev/null
mount -t cgroup2 none /sys/fs/cgroup || exit 1
group=/sys/fs/cgroup/hushfleet-test-$$
mkdir $group && echo $$ > $group/cgroup.procs || exit 1
mount -t tmpfs none /run && mkdir -p /run/systemd/system || exit 1
"$@"
echo $$ > /sys/fs/cgroup/cgroup.procs
find $group -depth -type d -exec rmdir {} +
"""
_TARGETS = ("basic.target", "default.target", "shutdown.target")


class OwnSystemd:
    """`with OwnSystemd(folder, units) as systemd:`. Raises `OSError` where this machine does not allow it.

    :param folder: is made; :param units: their names and texts.
    """

    def __init__(self, folder: Path, units: dict[str, str]) -> None:
        self._units, self._run, self._log = folder / "units", folder / "run", folder / "systemd.log"
        for each in (folder, self._units, self._run):
            each.mkdir(mode=0o700)
        for name, text in {**dict.fromkeys(_TARGETS, "[Unit]\nDefaultDependencies=no\n"), **units}.items():
            (self._units / name).write_text(text)

    def __enter__(self) -> OwnSystemd:
        if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("unshare") is None:
            raise OSError("a systemd of one's own needs root, systemd and unshare")
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self._run), "SYSTEMD_UNIT_PATH": str(self._units)}
        environment.pop("NOTIFY_SOCKET", None)
        systemd = [str(SYSTEMD), "--user", "--log-target=console", "--show-status=0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _START, "sh", *systemd], stdout=log, stderr=log, env=environment
            )
        try:
            self.until(lambda: self._process.poll() is not None or (self._run / "systemd/private").exists())
            if self._process.poll() is not None:
                raise OSError(self._log.read_text(errors="replace"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self("exit", "--force", check=False)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """`systemctl`."""
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self._run)}
        command = ["systemctl", "--user", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=check).stdout.strip()

    def shown(self, unit: str, property_: str) -> str:
        return self("show", "--value", "-p", property_, unit)

    @staticmethod
    def until(condition: Callable[[], object], *, within_s: float = 300.0, every_s: float = 0.2) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s:g} s"
            time.sleep(every_s)
