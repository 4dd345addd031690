"""Wanted: code of the attacker in what the operator signs.

A release is built of wheels of others. Who has the package index, the way to it, a mirror, or the folder of `--wheels`
gives a wheel of the right name and version with other content.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards import bundle
from hushfleet.wire.format.identity import Identity

NAME, VERSION = "numpy", "2.4.6"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, which is all that releases are built of here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "index"
    folder.mkdir()
    digest = hashlib.sha256(write_wheel(folder, "1").read_bytes()).hexdigest()
    monkeypatch.setattr(bundle, "_PINS", tmp_path / "wheels.txt")
    (tmp_path / "wheels.txt").write_text(f"{NAME}=={VERSION} --hash=sha256:{digest}\n")
    return folder


def write_wheel(folder: Path, code: str) -> Path:
    path, info = folder / f"{NAME}-{VERSION}-py3-none-any.whl", f"{NAME}-{VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{NAME}/__init__.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_a_wheel_with_the_right_name_and_version(index: Path, tmp_path: Path) -> None:
    genuine = bundle.fetch_wheels("3.13", "aarch64", source=index)[0].read_bytes()
    evil = write_wheel(index, "import attacker")
    got = hashlib.sha256(evil.read_bytes()).hexdigest()
    # as it was: by name and version alone
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-index", f"--find-links={index}"]
    subprocess.run([*command, f"--dest={tmp_path / 'as it was'}", f"{NAME}=={VERSION}"], check=True)
    assert (tmp_path / "as it was" / evil.name).read_bytes() == evil.read_bytes()
    # now
    with pytest.raises(BadInput, match=rf"{evil.name} has the SHA-256 {got}, which wheels.txt does not name"):
        bundle.build(tmp_path / "a.hfr", key=Identity.generate(), python="3.13", wheels=index)
    assert not (tmp_path / "a.hfr").exists()
    assert bundle.fetch_wheels("3.13", "aarch64")[0].read_bytes() == genuine, "what was kept is still there"


def test_a_wheel_that_is_put_into_the_cache(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write there could change the hashes beside the wheels, too, as long as these were believed."""
    (kept,) = bundle.fetch_wheels("3.13", "aarch64", source=index)
    evil = write_wheel(kept.parent, "import attacker").read_bytes()
    (kept.parent / "wheels.json").write_text(f'{{"{kept.name}": "{hashlib.sha256(evil).hexdigest()}"}}')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    (fetched,) = bundle.fetch_wheels("3.13", "aarch64")
    assert fetched.read_bytes() == next(index.glob("*.whl")).read_bytes() != evil


def test_a_wheel_beside_the_pinned_ones_in_the_cache(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept,) = bundle.fetch_wheels("3.13", "aarch64", source=index)
    (kept.parent / "evil-1.0-py3-none-any.whl").write_bytes(kept.read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert [each.name for each in bundle.fetch_wheels("3.13", "aarch64")] == [kept.name]
