"""Releases: built of wheels without an index, and what is left of real packages is enough for a board."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import hushfleet
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards import bundle
from hushfleet.firmware_profiles.cards.bundle import is_dropped
from hushfleet.release.archive import place
from hushfleet.release.manifest import this_platform
from hushfleet.wire.format.identity import Identity
from support.pin_wheels import needed
from support.releases import trust_in

KEY = Identity.generate()
ROOT = Path(__file__).parents[3]
PYTHON, ARCH = this_platform()
BOARD = """
import sys
from pathlib import Path
from hushfleet.edge_client.fleet.trial import check_release
import PIL.Image, numpy, cryptography.x509, hushfleet.firmware_profiles

assert check_release(Path("."), Path("none.sqlite"), device="a") is None
image = PIL.Image.fromarray(numpy.zeros((8, 8, 3), numpy.uint8))
for kind in ("jpeg", "png", "tiff", "webp", "bmp", "gif"):
    image.resize((4, 4)).save(f"a.{kind}")
    PIL.Image.open(f"a.{kind}").convert("RGB").load()
assert hushfleet.firmware_profiles.load_board("raspberry-pi-zero-2-w").memory_mib
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty wheel of each package that a board needs, besides the parts that it does not; pinned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, pins = tmp_path / "wheels", tmp_path / "wheels.txt"
    folder.mkdir()
    for pinned in bundle.pinned_wheels("3.13"):
        wheel = empty_wheel(folder, *pinned.split("=="))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        with pins.open("a") as file:
            file.write(f"{pinned} \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n")
    monkeypatch.setattr(bundle, "_PINS", pins)
    return folder


def empty_wheel(folder: Path, name: str, version: str, **files: str) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
        wheel.writestr(f"{name}/tests/test_a.py", "")
        for file, text in files.items():
            wheel.writestr(f"{name}/{file}.py", text)
    return path


def test_built_without_an_index(tmp_path: Path, wheels: Path) -> None:
    python, version = f"{sys.version_info[0]}.{sys.version_info[1]}", "1.2.3"
    out = tmp_path / "a.hfr"
    manifest = bundle.build(out, key=KEY, python=python, arch=ARCH, version=version, wheels=wheels)
    assert (manifest.python, manifest.arch, manifest.oldest_store) == (PYTHON, ARCH, 1)
    place(out, tmp_path / "releases", trust=trust_in(KEY.public_key.hex()))
    release = tmp_path / "releases" / version
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels.glob("*.whl")}
    assert manifest.wheels == json.loads((release / "release.json").read_text())["wheels"]
    assert manifest.wheels == hashes
    assert {name.split("-")[0] for name in manifest.wheels} >= {"numpy", "onnxruntime", "cryptography", "cffi"}
    ours = {path.relative_to(release / "hushfleet").parts[0] for path in (release / "hushfleet").rglob("*.py")}
    assert not ours & {"aggregator", "models", "simulator"}
    assert (release / "hushfleet/firmware_profiles/boards/raspberry-pi-4-4gb.toml").is_file()
    assert len(list((release / "hushfleet/edge_client/labelling/page").iterdir())) == 3
    assert not (release / "hushfleet/firmware_profiles/cards").exists()
    assert not list(release.rglob("test_a.py"))
    assert "Apache License" in (release / "hushfleet/LICENSE").read_text()
    shown = subprocess.run([sys.executable, "-I", release, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "hushfleet 1.2.3"
    again = tmp_path / "b.hfr"
    bundle.build(again, key=KEY, python=python, arch=ARCH, version=version, wheels=wheels)
    assert again.read_bytes() == out.read_bytes()


def test_wheels_are_kept_and_checked(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = bundle.fetch_wheels("3.13", "aarch64", source=wheels)
    assert len(kept) == len(bundle.pinned_wheels("3.13"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert bundle.fetch_wheels("3.13", "aarch64") == kept  # from the cache
    kept[0].write_bytes(b"damaged")
    with pytest.raises(BadInput, match=r"cannot be downloaded: .* pip download --no-deps"):
        bundle.fetch_wheels("3.13", "aarch64")


def test_missing_wheels_are_named(tmp_path: Path, wheels: Path) -> None:
    next(wheels.glob("numpy*")).unlink()
    with pytest.raises(BadInput, match=r"numpy==.*--wheels"):
        bundle.build(tmp_path / "a.hfr", key=KEY, python="3.13", wheels=wheels)
    with pytest.raises(BadInput, match=r"choose one of 3\.10, 3\.11"):
        bundle.build(tmp_path / "a.hfr", key=KEY, python="3.9", wheels=wheels)
    assert not list(tmp_path.glob("*.hfr"))


@pytest.mark.parametrize("python", bundle.PYTHONS)
def test_what_a_board_needs_is_pinned_with_a_hash_for_each_processor(python: str) -> None:
    """`python tests/support/pin_wheels.py` writes wheels.txt anew."""
    pinned = bundle.pinned_wheels(python)
    for arch in bundle.ARCHITECTURES:
        assert sorted(pinned) == needed(python, arch)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for hashes in pinned.values() for digest in hashes)
    pure = {"array-api-compat", "paho-mqtt", "tomli", "typing-extensions"}
    assert all(len(hashes) >= 2 for need, hashes in pinned.items() if need.split("==")[0] not in pure)


def test_boards_get_the_versions_that_are_tested_here() -> None:
    """And where constraints.txt has hashes, the wheels of boards are among them."""
    text = (ROOT / "constraints.txt").read_text("utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if "==" in line]
    tested = {need.lower().replace("_", "-"): " ".join(hashes) for need, *hashes in lines}
    for need, hashes in bundle.pinned_wheels("3.13").items():
        assert not tested[need] or all(digest in tested[need] for digest in hashes), need


def test_what_trimming_leaves_is_enough_for_a_board(tmp_path: Path) -> None:
    """With the packages that are installed here, in an interpreter that sees nothing else."""
    release = tmp_path / "release"
    for pinned in bundle.pinned_wheels("3.13"):
        for file in distribution(pinned.split("==")[0]).files or ():
            source = Path(str(file.locate()))
            if not is_dropped(str(file)) and not str(file).startswith("..") and source.suffix != ".pyc":
                target = release / str(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    bundle._copy_ours(release, hushfleet.__version__)
    code = f"import sys; sys.path.insert(0, {str(release)!r})\n{BOARD}"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in release.rglob("*") if path.is_file())
    assert size < 140e6


def test_the_licence_is_found_where_a_checkout_has_metadata_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "hushfleet.egg-info" / "PKG-INFO"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: hushfleet\nVersion: 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution("hushfleet").version == "0"
    assert "Apache License" in bundle._licence()
