"""Builds a release: the client and the wheels that it needs, for one Python and one architecture, signed.

pip fetches the wheels once, and they are kept: only wheels whose SHA-256 is in `wheels.txt`. Our own part is copied
from this installation. Files that a board does not import are left out.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from hushfleet.edge_client.storage.store_file import OLDEST_SCHEMA, SCHEMA_VERSION
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles.cards.seed import write_system
from hushfleet.release.archive import pack
from hushfleet.release.manifest import Manifest, Signer
from hushfleet.user_files import user_cache_dir
from hushfleet.version import __version__

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
ARCHITECTURES = ("aarch64", "x86_64")
# The oldest system that boards run is Debian 12, glibc 2.36; Ubuntu 22.04 of JetPack 6 has 2.35.
_GLIBC = ("2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35")
_OURS = {  # packages, and their folders that are not copied; an installation has all below `hushfleet`
    "hushfleet": ("aggregator", "edge_client", "firmware_profiles", "models", "simulator"),
    "hushfleet.edge_client": (),
    "hushfleet.firmware_profiles": ("cards",),
}
_FOLDER = resources.files("hushfleet.firmware_profiles.cards")
_PINS = _FOLDER / "wheels.txt"
_DATA = (".py", ".toml", ".typed", ".html", ".css", ".js")
_START = "import sys\n\nfrom hushfleet.edge_client.__main__ import main\n\nsys.exit(main())\n"


def build(
    out: Path,
    *,
    key: Signer | None,
    python: str,
    arch: str = "aarch64",
    version: str = __version__,
    wheels: Path | None = None,
    system: bool = False,
    **downgrade: Any,
) -> Manifest:
    """Writes the release `out`; this takes about 40 s, and a minute more if wheels must be fetched.

    :param python: one of `PYTHONS`; :param arch: one of `ARCHITECTURES`.
    :param version: version that boards will report.
    :param downgrade: `downgrade_from` and `downgrade_serial` of `Manifest`.
    :param key: signs the release; None: it stays unsigned for now.
    :param wheels: a folder with the wheels, for machines without a package index.
    :param system: whether it also replaces `slots.pyz` and the units of boards.

    Raises `BadInput` if wheels are missing, or differ from those in `wheels.txt`.
    """
    if python not in PYTHONS or arch not in ARCHITECTURES:
        offered = f"{', '.join(PYTHONS)} and {', '.join(ARCHITECTURES)}"
        raise BadInput(f"there is no release for Python {python!r} on {arch!r}; choose one of {offered}")
    found = fetch_wheels(python, arch, source=wheels)
    with tempfile.TemporaryDirectory(prefix="hushfleet-release-") as name:
        folder = Path(name)
        contents = {wheel.name: _unpack_wheel(wheel, folder) for wheel in found}
        _copy_ours(folder, version)
        (folder / "__main__.py").write_text(_START)
        if system:
            write_system(folder / "system")
        out.parent.mkdir(parents=True, exist_ok=True)
        return pack(
            folder,
            out,
            key=key,
            system=system,
            version=version,
            python=f"cp{python.replace('.', '')}",
            arch=arch,
            oldest_store=int(OLDEST_SCHEMA),
            store=int(SCHEMA_VERSION),
            wheels=contents,
            **downgrade,
        )


def pinned_wheels(python: str) -> dict[str, list[str]]:
    """Reads `wheels.txt` for this Python: `numpy==2.4.6` -> SHA-256 of each wheel that may be used."""
    pinned = {}
    for line in _PINS.read_text("utf-8").replace("\\\n", " ").splitlines():
        need, *hashes = re.split(r"\s+--hash=sha256:", line)
        if hashes:
            wanted = Requirement(need)
            if wanted.marker is None or wanted.marker.evaluate({"python_version": python}):
                pinned[f"{wanted.name}{wanted.specifier}"] = hashes
    return pinned


def pip_target(python: str, arch: str) -> list[str]:
    """Returns options with which pip chooses wheels for a board instead of this machine."""
    platforms = [f"--platform=manylinux{glibc}_{arch}" for glibc in _GLIBC]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]


def fetch_wheels(python: str, arch: str, *, source: Path | None = None) -> list[Path]:
    """Fetches and keeps the wheels of a board's packages, as `wheels.txt` pins them.

    :param source: a folder with the wheels; None: the cache, or pip's index.

    Raises `BadInput` if some are missing, or have another SHA-256.
    """
    target, pinned = pip_target(python, arch), pinned_wheels(python)
    lines = [" --hash=sha256:".join([need, *hashes]) for need, hashes in pinned.items()]
    digest = hashlib.sha256("\n".join(target + lines).encode()).hexdigest()[:16]
    kept = user_cache_dir() / "wheels" / digest
    if source is None and (whole := _whole(kept, pinned)):
        return whole
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        fetched, wanted = Path(name) / "wheels", Path(name) / "wanted.txt"
        wanted.write_text("\n".join(lines))
        local = [] if source is None else ["--no-index", f"--find-links={source}"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, *target, *local, f"--dest={fetched}", "--require-hashes", f"--requirement={wanted}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BadInput(
                f"the wheels for Python {python} on {arch} cannot be downloaded: {_reason(done.stderr)}. Without a "
                "package index, fetch them elsewhere and name their folder with --wheels: pip download --no-deps "
                f"{' '.join(target)} {' '.join(pinned)}"
            )
        shutil.rmtree(kept, ignore_errors=True)
        fetched.rename(kept)
    return sorted(kept.glob("*.whl"))


def _reason(errors: str) -> str:
    """Returns the last error that pip reports."""
    changed = re.search(r"/([^/\s]+\.whl) .*Expected sha256.*Got\s+([0-9a-f]{64})", errors, re.DOTALL)
    if changed:
        name, digest = changed.groups()
        return f"{name} has the SHA-256 {digest}, which wheels.txt does not name: it was changed, or is another build"
    named = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
    return named[-1] if named else "pip failed"


def _whole(folder: Path, pinned: Mapping[str, Collection[str]]) -> list[Path]:
    """Returns the wheels in a folder of the cache; none if one of them is missing or damaged."""
    allowed = {digest for hashes in pinned.values() for digest in hashes}
    wheels = sorted(folder.glob("*.whl"))
    sound = all(hashlib.sha256(wheel.read_bytes()).hexdigest() in allowed for wheel in wheels)
    return wheels if sound and len(wheels) == len(pinned) else []


@cache
def _dropped() -> list[str]:
    lines = (_FOLDER / "dropped.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_dropped(name: str) -> bool:
    """Returns whether a file of a wheel, by its path in the wheel, is left out of a release (`dropped.txt`)."""
    return any(fnmatchcase(name, pattern) for pattern in _dropped())


def _unpack_wheel(wheel: Path, folder: Path) -> str:
    """Unpacks the files of the wheel that a board needs. Returns the wheel's SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and not is_dropped(name):
                archive.extract(name, folder)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def _licence() -> str:
    """Reads our licence from pip's installation.

    In a checkout, `hushfleet.egg-info` may be found first, which has no licence.
    """
    texts = (found.read_text("licenses/LICENSE") for found in distributions(name="hushfleet"))
    licence = next((text for text in texts if text is not None), None)
    if licence is None:
        raise HushfleetError("the installed package hushfleet has no licence file: install it again with pip")
    return licence


def _copy_ours(folder: Path, version: str) -> None:
    """Copies our packages for a board from this installation; `hushfleet.version.__version__` becomes `version`."""
    for package, left_out in _OURS.items():
        source = Path(importlib.import_module(package).__path__[0])
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            if path.suffix in _DATA and name.parts[0] not in left_out:
                target = folder.joinpath(*package.split("."), name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    (folder / "hushfleet" / "LICENSE").write_text(_licence(), "utf-8")
    start = folder / "hushfleet" / "version.py"
    text, count = re.subn(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', start.read_text("utf-8"))
    assert count == 1, start
    start.write_text(text, "utf-8")
