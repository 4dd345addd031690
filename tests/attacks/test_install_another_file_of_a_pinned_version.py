"""A mirror or an index that was broken into sends its own file for a version that constraints.txt pins.

The command is the one of the Makefile, with a small package and a folder as the index.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
METADATA = "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Index:
    """A folder with one wheel, the environment that installs from it, and `constraints.txt` beside."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "environment"
        venv.create(self.home, with_pip=True)
        self.python = self.home / "bin" / "python"

    def serve(self, code: str) -> str:
        """The package's only version has this code now; the wheel's SHA-256."""
        path = self.folder / "small-1.0-py3-none-any.whl"
        files = {"small.py": code, "small-1.0.dist-info/METADATA": METADATA, "small-1.0.dist-info/WHEEL": WHEEL}
        record = "".join(f"{name},,\n" for name in (*files, "small-1.0.dist-info/RECORD"))
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in {**files, "small-1.0.dist-info/RECORD": record}.items():
                archive.writestr(zipfile.ZipInfo(name), text)  # always the same date
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def pin(self, line: str) -> None:
        (self.folder / "constraints.txt").write_text(f"{line}\n")

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": os.devnull}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def installed(self) -> str | None:
        """What the installed package says."""
        done = self.run([str(self.python), "-c", "import small; print(small.SAYS)"])
        return done.stdout.strip() or None

    def make(self) -> list[str]:
        """The Makefile's command that installs what constraints.txt has."""
        recipe = ["make", "--dry-run", "--no-print-directory", f"VENV={self.home}", str(self.home / "installed")]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(recipe, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        (line,) = [line for line in done.stdout.splitlines() if "constraints.txt" in line]
        return shlex.split(line)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return Index(tmp_path_factory.mktemp("index"))


def test_a_pinned_version_alone_lets_it_in_and_its_hash_does_not(index: Index) -> None:
    true = index.serve("SAYS = 'ours'")
    assert index.serve("SAYS = 'theirs'") != true

    index.pin("small==1.0")
    as_it_was = [str(index.python), "-m", "pip", "install", "-c", "constraints.txt", "small"]
    assert index.run(as_it_was).returncode == 0
    assert index.installed() == "theirs"
    index.run([str(index.python), "-m", "pip", "uninstall", "--yes", "small"])
    assert index.installed() is None

    refused = index.run(index.make())
    assert "Hashes are required in --require-hashes mode" in refused.stderr, "a pin without a hash"
    index.pin(f"small==1.0 --hash=sha256:{true}")
    refused = index.run(index.make())
    assert refused.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    assert index.installed() is None

    assert index.serve("SAYS = 'ours'") == true
    assert index.run(index.make()).returncode == 0
    assert index.installed() == "ours"
