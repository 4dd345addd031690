"""Installs the folders beside `hushfleet/` below it, so that our `models` or `simulator` hides no other package.

A folder is imported as `hushfleet.<folder>`, wherever the checkout is; everything else is in pyproject.toml.

After `pip install -e .`, Python finds the folders with code of setuptools that runs at each start. Type checkers and
editors do not run code: `build/links` shows them the same packages as symbolic links.
"""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import Command, find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

NESTED = ("aggregator", "edge_client", "firmware_profiles", "models", "simulator")
ROOT = Path(__file__).resolve().parent
LINKS = ROOT / "build" / "links"
# Python skips this folder, because it has no importer: it runs the checkout itself, with its paths and its new files.
TYPES_PTH = f"{LINKS}\nimport sys; sys.path_importer_cache[{str(LINKS)!r}] = None\n"

inside = [package for folder in NESTED for package in (folder, *(f"{folder}.{p}" for p in find_packages(folder)))]


class LinkPackages(Command):
    """`python setup.py links`: must also run again if an entry of `hushfleet/` itself is added or removed."""

    user_options = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        package = LINKS / "hushfleet"
        package.mkdir(parents=True, exist_ok=True)
        entries = [path for path in (ROOT / "hushfleet").iterdir() if path.name != "__pycache__"]
        wanted = {path.name: path for path in (*entries, *map(ROOT.joinpath, NESTED))}
        for link in package.iterdir():
            if link.name not in wanted:
                link.unlink()
        for name, path in wanted.items():
            if not (package / name).is_symlink():  # an existing link stays: a process may be reading it
                (package / name).symlink_to(Path("../../..", path.relative_to(ROOT)))


class EditableWheel(editable_wheel):
    def run(self):
        super().run()
        self.run_command("links")
        (wheel,) = Path(self.dist_dir).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
        name, text = "hushfleet_types.pth", TYPES_PTH.encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
        files[record] += f"{name},sha256={digest},{len(text)}\n".encode()
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for each, content in {name: text, **files}.items():
                archive.writestr(each, content)


setup(
    packages=[*find_packages(include=["hushfleet", "hushfleet.*"]), *(f"hushfleet.{package}" for package in inside)],
    package_dir={f"hushfleet.{folder}": folder for folder in NESTED},
    cmdclass={"editable_wheel": EditableWheel, "links": LinkPackages},
)
