"""Makes the folder `hushfleet` from which a board installs itself, on its boot partition or where `push` puts it."""

from __future__ import annotations

import io
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hushfleet.data.walk import MAX_NAMED
from hushfleet.edge_client.board.config import load_config
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.wifi import Wifi
from hushfleet.paths import no_file

FOLDER = "hushfleet"
"""The folder on the boot partition."""
_KIT = resources.files("hushfleet.firmware_profiles.cards") / "kit"
_SLOTS = {  # the modules that `slots.py` imports, by package
    "hushfleet": ("__init__.py", "atomic_file.py", "errors.py", "output.py", "public_keys.py", "version.py"),
    "hushfleet.release": ("__init__.py", "archive.py", "manifest.py", "statements.py"),
    "hushfleet.edge_client": ("__init__.py",),
    "hushfleet.edge_client.storage": ("__init__.py", "state_files.py"),
    "hushfleet.edge_client.fleet": ("__init__.py", "client_files.py", "slot_state.py", "slots.py", "system_files.py"),
}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of ZIP and FAT; a card that is written again has the same bytes


@dataclass(frozen=True)
class Card:
    """One board's card.

    :param device: its id in the fleet; the host name is made from it.
    :param release: the `.hfr` file; :param python: version of Python for it, such as `3.13`.
    :param device_toml: text of DEVICE.toml; :param ca: PEM of the fleet's authority.
    :param root_key: public key of root, 64 hex digits; :param release_keys: its signed statement of who signs releases.
    :param token: for enrolment, used once.
    :param images_path: folder of the board's own images; empty: there is none; :param classes: its sub-folders.
    :param images: a folder with images that are copied there.
    :param wifi: None: the board has a cable.
    :param user: user for logins by ssh.
    :param ssh_keys: keys for logins by ssh; without keys, nobody can log in.
    """

    device: str
    release: Path
    python: str
    device_toml: str
    ca: bytes
    root_key: str
    release_keys: str
    token: str
    images_path: str = "/var/lib/hushfleet-images"
    classes: Sequence[str] = ()
    images: Path | None = None
    wifi: Wifi | None = None
    user: str = "hushfleet-admin"
    ssh_keys: Sequence[str] = ()

    @property
    def host(self) -> str:
        """The host name: without dots and underscores, and without a hyphen at either end."""
        return re.sub(r"[._]", "-", self.device).strip("-")


def stage(card: Card, folder: Path, *, afterwards: Mapping[str, str] | None = None) -> None:
    """Writes the folder `hushfleet` of a boot partition into `folder`.

    :param afterwards: files beside it that contain a secret, name -> text that replaces them after the installation.
    """
    ours, afterwards = folder / FOLDER, afterwards or {}
    with resources.as_file(_KIT) as kit:
        shutil.copytree(kit, ours, copy_function=shutil.copyfile)
    (ours / "slots.pyz").write_bytes(slots_archive())
    shutil.copyfile(card.release, ours / "release.hfr")
    texts = {
        "device.toml": card.device_toml,
        "python": f"{card.python}\n",
        "root_key": f"{card.root_key}\n",
        "release_keys": f"{card.release_keys}\n",
        "enrol.token": f"{card.token}\n",
        "images_path": f"{card.images_path}\n",
        "classes": "".join(f"{name}\n" for name in card.classes),
        "secrets": "".join(f"{name}\n" for name in afterwards),
        **{f"after/{name}": text for name, text in afterwards.items()},
    }
    for name, text in texts.items():
        (ours / name).parent.mkdir(exist_ok=True)
        (ours / name).write_text(text, "utf-8")
    data = load_config(ours / "device.toml").data  # raises here if a board would refuse the file
    (ours / "inbox_path").write_text(f"{data.inbox or ''}\n", "utf-8")
    if data.keep or data.max_mib:  # the client's unit lets it write only into its state directory
        folders = (folder.replace("%", "%%") for folder in (data.path, data.inbox, data.unlabelled) if folder)
        (ours / "data.conf").write_text("[Service]\n" + "".join(f'ReadWritePaths="-{each}"\n' for each in folders))
    (ours / "ca.pem").write_bytes(card.ca)
    if card.images is not None:
        _copy_images(card.images, ours / "images")


def slots_archive() -> bytes:
    """Packs `slots.py` and its imports as a ZIP file that `python3` can run. It is stored outside any release."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for package, names in _SLOTS.items():
            for name in names:
                source = (resources.files(package) / name).read_bytes()
                file.writestr(zipfile.ZipInfo(f"{package.replace('.', '/')}/{name}", _EPOCH), source)
        start = "import sys\n\nfrom hushfleet.edge_client.fleet.slots import main\n\nsys.exit(main())\n"
        file.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), start)
    return archive.getvalue()


def write_system(folder: Path) -> None:
    """Writes the part of a release that replaces `slots.pyz` and the units of boards."""
    with resources.as_file(_KIT / "units") as units:
        shutil.copytree(units, folder / "units", copy_function=shutil.copyfile)
    (folder / "slots.pyz").write_bytes(slots_archive())


def _copy_images(source: Path, target: Path) -> None:
    """Raises `BadInput` that names what cannot be copied."""

    def copy(file: str, to: str) -> None:
        if what := no_file(file):
            raise BadInput(f"{file} is {what}, and only files are copied to a card; take it away")
        shutil.copyfile(file, to)

    try:
        shutil.copytree(source, target, copy_function=copy)
    except shutil.Error as error:
        failed = "; ".join(f"{file}: {why}" for file, _, why in error.args[0][:MAX_NAMED])
        raise BadInput(f"images cannot be copied to the card: {failed}") from error
