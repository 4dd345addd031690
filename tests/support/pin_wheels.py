"""Writes firmware_profiles/cards/wheels.txt anew, with the versions that are installed here.

Run `python tests/support/pin_wheels.py` when constraints.txt has changed. The hashes are those of pip's index, which is
trusted at this moment and never again: look at what the commit changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import resources
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hushfleet.firmware_profiles.cards.bundle import ARCHITECTURES, PYTHONS, pip_target

# The last versions for a Python that this installation's own are too new for; what these need is here or not imported.
_LAST = {"3.10": {"numpy": "2.2.6", "onnxruntime": "1.23.2", "pillow": "12.3.0", "tomli": "2.5.0"}}
_UNUSED = ("flatbuffers", "packaging", "protobuf", "pycparser")  # asked for by parts that `bundle` leaves out
_MARKERS = {PYTHONS: "", PYTHONS[:1]: ' ; python_version == "3.10"', PYTHONS[1:]: ' ; python_version >= "3.11"'}
_HEAD = """\
# The wheels that releases for boards are built of, in pip's format; nothing else is put into a release.
# tests/support/pin_wheels.py writes this file.
"""


def needed(python: str, arch: str) -> list[str]:
    """What `hushfleet[edge]` needs of other packages, and what they need, pinned: `numpy==2.4.6`, ..."""
    last = _LAST.get(python, {})
    system = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": arch}
    found: dict[str, str] = {}
    todo = [("hushfleet", "edge")]
    while todo:
        package, extra = todo.pop()
        for line in distribution(package).requires or ():
            need = Requirement(line)
            name = canonicalize_name(need.name)
            wanted = need.marker is None or need.marker.evaluate({**system, "extra": extra})
            if not wanted or name in found or name in _UNUSED:
                continue
            if name in last:
                found[name] = last[name]
            else:
                found[name] = distribution(name).version
                todo.append((name, ""))
    return sorted(f"{name}=={version}" for name, version in found.items())


def _hashes(python: str, arch: str, needs: list[str]) -> dict[str, str]:
    """Of the wheels that pip would fetch; by requirement."""
    with tempfile.TemporaryDirectory() as target:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command = [*pip, "--report=-", f"--target={target}", *pip_target(python, arch), *needs]
        report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        f"{canonicalize_name(each['metadata']['name'])}=={each['metadata']['version']}": each["download_info"][
            "archive_info"
        ]["hashes"]["sha256"]
        for each in report["install"]
    }


def main() -> None:
    pythons, hashes = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for python in PYTHONS:
        for arch in ARCHITECTURES:
            for need, digest in _hashes(python, arch, needed(python, arch)).items():
                pythons[need].add(python)
                hashes[need].add(digest)
    text = _HEAD
    for need in sorted(hashes):
        marker = _MARKERS[tuple(python for python in PYTHONS if python in pythons[need])]
        lines = [f"{need}{marker}", *(f"--hash=sha256:{each}" for each in sorted(hashes[need]))]
        text += " \\\n    ".join(lines) + "\n"
    path = resources.files("hushfleet.firmware_profiles.cards") / "wheels.txt"
    Path(str(path)).write_text(text)


if __name__ == "__main__":
    main()
