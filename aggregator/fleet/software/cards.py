"""Prepares the SD card images of a fleet's boards: chooses the boards and the release, and makes the content."""

from __future__ import annotations

import secrets
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.software.releases import (
    FleetRelease,
    Withdrawal,
    add_release,
    describe_signing,
    find_release,
    keys_in_force,
    offered_releases,
    releases,
    trust,
)
from hushfleet.aggregator.fleet.trust.device_file import device_toml
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.membership import chosen_ids
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.data.form import FOLDERS
from hushfleet.errors import BadInput, BadSignature, HushfleetError
from hushfleet.firmware_profiles import load_board
from hushfleet.firmware_profiles.cards import bundle
from hushfleet.firmware_profiles.cards.device_toml import faults_of
from hushfleet.firmware_profiles.cards.seed import Card
from hushfleet.firmware_profiles.cards.stock_image import System
from hushfleet.firmware_profiles.cards.wifi import read_wifi
from hushfleet.progress import doing
from hushfleet.release.archive import add_signature
from hushfleet.release.manifest import VERSION, version_order
from hushfleet.version import __version__

_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Folders that the client's unit hides from it (ProtectHome=, PrivateTmp=)."""


def choose_boards(
    registry: FleetRegistry,
    *,
    devices: Sequence[str] = (),
    file: Path | None = None,
    count: int | None = None,
    again: bool = False,
    token_again: bool = False,
    now: float,
) -> list[Board]:
    """Chooses the boards that are named as `chosen_ids` says, or the first `count` (None: all) that have no card yet.

    :param again: also those that have a card or are enrolled. Raises `BadInput` if there are not enough.
    :param token_again: also one with an unused token, as a push that has failed leaves it on the board itself.
    """
    known = registry.boards()
    wait = {row.device for row in known if registry.tokens(row.device, now=now)}  # their cards were not used yet
    if devices or file is not None:
        boards = {row.device: row for row in known}

        def needs_card(row: Board) -> bool:
            return row.standing != "blocked" and (again or (row.standing == "new" and row.device not in wait))

        chosen = [
            boards[each] for each in chosen_ids(boards, devices, file, folder=registry.path.parent, fits=needs_card)
        ]
        for row in chosen:
            if row.standing == "blocked":
                raise BadInput(f"{row.device} is blocked ({row.reason}); its card would not be let in")
            if row.standing != "new" and not again:
                raise BadInput(
                    f"{row.device} has a card and is {row.standing}. A new card has a new identity: write it with "
                    f"--force, then let it in with: hushfleet fleet renew DIR {row.device} --new-card"
                )
            if row.device in wait and not (again or token_again):
                raise BadInput(
                    f"{row.device} has a card that no board has used yet, and which would stop working: --force writes "
                    "another in its place"
                )
        return chosen
    # A board whose key was given runs already. If it is pending and not approved, somebody has asked in its name,
    # maybe without its card.
    free = [row for row in known if row.standing in ("new", "pending") and row.public_key is None]
    free = [row for row in free if again or row.device not in wait]
    if len(free) < (count or 1):
        raise BadInput(
            f"{len(free)} boards of the fleet have no card yet, not {count or 1}: add more with fleet add, name "
            "one with --device, or write cards anew with --force"
        )
    return free[:count]


@dataclass(frozen=True)
class ReleasePlatform:
    """The Python and the architecture that a release is made for.

    :param why: how this is known, in words.
    """

    python: str
    arch: str
    why: str = ""

    @property
    def platform(self) -> str:
        """The name in releases: `cp313-aarch64`."""
        return f"cp{self.python.replace('.', '')}-{self.arch}"


def choose_target(boards: Sequence[Board], system: System, *, python: str | None = None) -> ReleasePlatform:
    """Chooses the platform by the image, or else by the boards' profiles. Raises `BadInput` for boards of several
    kinds."""
    profiles = {row.board: load_board(row.board) for row in boards}
    arches = {profile.architecture for profile in profiles.values()}
    if len(arches) > 1:
        raise BadInput(
            f"these boards are of several architectures ({', '.join(sorted(profiles))}): write them one by one"
        )
    arch = arches.pop()
    if system.arch is not None and system.arch != arch:
        raise BadInput(f"the image is for {system.arch}, and {', '.join(sorted(profiles))} needs one for {arch}")
    if python is not None:
        if system.pythons and python not in system.pythons:
            raise BadInput(f"the image has Python {', '.join(system.pythons)}, and not {python} as --python says")
        return ReleasePlatform(python, arch)
    if system.pythons:
        fitting = [each for each in system.pythons if each in bundle.PYTHONS]
        if not fitting:
            raise BadInput(
                f"{system.name or 'the image'} has Python {', '.join(system.pythons)}, and releases are made for "
                f"{', '.join(bundle.PYTHONS)}: take an image of Raspberry Pi OS Trixie (3.13) or of Ubuntu 24.04 (3.12)"
            )
        return ReleasePlatform(fitting[0], arch, ", as the image has it")
    pythons = {profile.python for profile in profiles.values()}
    if len(pythons) > 1:
        raise BadInput(
            "these boards have systems with several Pythons: name those of one kind with --device, or say --python"
        )
    return ReleasePlatform(
        pythons.pop(), arch, ", as the board's profile has it; if the system is another, say --python"
    )


def require_python(python: str) -> None:
    """Raises `BadInput` if no release is made for this Python version."""
    if python not in bundle.PYTHONS:
        raise BadInput(
            f"there is no release for Python {python!r}, only for {', '.join(bundle.PYTHONS)}: write a system that has "
            "one of these, such as Raspberry Pi OS Trixie (3.13)"
        )


def build_release(
    folder: FleetFolder,
    registry: FleetRegistry,
    target: ReleasePlatform,
    *,
    version: str,
    wheels: Path | None = None,
    downgrade_from: Sequence[str] = (),
    system: bool = False,
    sign: bool = True,
) -> Path:
    """Builds a release of the software that is installed here; for the arguments see `bundle.build`.

    The keys that are in the fleet's folder sign it. It stays in `unsigned` until `add_release` takes it.

    Raises `BadInput` if the version exists already, is in `unsigned` or was withdrawn, or if wheels are missing.
    """
    for each in (version, *downgrade_from):
        if not VERSION.fullmatch(each):
            raise BadInput(f"{each!r} is no version of a release: write two to four numbers, such as 0.3.1")
    withdrawn = Withdrawal.of(releases(registry))
    if withdrawn is not None and not downgrade_from and withdrawn.includes(version):
        raise BadInput(
            f"{withdrawn}. Build {version} with a version above {withdrawn.up_to} (hushfleet release make --version), "
            f"or for boards that run {withdrawn.by}: --downgrade-from {withdrawn.by}"
        )
    if find_release(registry, version, target.platform) is not None:
        raise BadInput(
            f"release {version} for {target.platform} exists already; boards know a release by its version: name "
            "another one with --version"
        )
    out = folder.unsigned / f"hushfleet-{version}-{target.platform}.hfr"
    if out.exists():  # another build has other bytes, which its signatures do not fit
        raise BadInput(
            f"release {version} for {target.platform} is built and waits for signatures. "
            f"{describe_signing(folder, out)}. To build it anew, delete {out}"
        )
    with doing(f"building a release for Python {target.python} on {target.arch}"):
        bundle.build(
            out,
            key=None,
            python=target.python,
            arch=target.arch,
            version=version,
            wheels=wheels,
            system=system,
            **_downgrade(registry, version, downgrade_from),
        )
    for key in (folder.release_key, folder.root_key)[: 1 + system] if sign else ():
        if key.exists():
            add_signature(out, load(key))
    return out


def release_of(
    folder: FleetFolder, registry: FleetRegistry, targets: Sequence[ReleasePlatform], *, wheels: Path | None = None
) -> FleetRelease:
    """Returns the newest release for the first target that has a release; if none has, builds one for the first target.

    Raises `BadInput` if a signature is missing.
    """
    offered = offered_releases(registry)
    known = next((each for target in targets for each in offered if each.platform == target.platform), None)
    if known is not None:
        return known
    out = build_release(folder, registry, targets[0], version=__version__, wheels=wheels)
    try:
        release = add_release(folder, registry, out)
    except BadSignature as error:
        raise BadInput(f"{error}. {describe_signing(folder, out)}") from error
    out.unlink()
    return release


def _downgrade(registry: FleetRegistry, version: str, named: Sequence[str]) -> dict[str, Any]:
    """Returns the manifest's fields of a downgrade from the `named` versions; none if there are none.

    The serial is above all earlier ones, even if a clock was set back. A board that was away may still run a version
    that an earlier downgrade has withdrawn: it may come from there, too, and the version stays withdrawn.
    """
    if not named:
        return {}
    known = [each.manifest for each in releases(registry)]
    earlier = (each for manifest in known for each in manifest.downgrade_from)
    above = (each for each in earlier if version_order(each) > version_order(version))
    serial = max([int(time.time()), *(1 + manifest.downgrade_serial for manifest in known)])
    return {"downgrade_from": tuple(dict.fromkeys([*named, *above])), "downgrade_serial": serial}


def card_of(
    folder: FleetFolder,
    board: Board,
    *,
    target: ReleasePlatform,
    images: Path | None = None,
    user: str = "hushfleet-admin",
    ssh_keys: Sequence[str] = (),
) -> Card:
    """Makes the card with a new token, without its release: building that takes minutes, so errors are raised first.

    :param images: a folder with a subfolder for each board, named by the board's id. Raises `BadInput`.
    """
    keys_in_force(folder)
    trusted = trust(folder)
    text = device_toml(folder, board)
    if found := faults_of(text):
        raise BadInput(
            f"{folder.path / FILE_NAME}: [device] makes a DEVICE.toml that boards refuse: {'; '.join(found)}"
        )
    data = tomllib.loads(text)["data"]
    path = PurePosixPath(data["path"])
    hidden = [each for each in _HIDDEN if path.is_relative_to(each)]
    if not path.is_absolute() or hidden:
        reason = f"the client sees nothing in {hidden[0]}" if hidden else "it must begin with /"
        raise BadInput(f"[device.data] path in fleet.toml is {str(path)!r}, and {reason}; /srv is a place for data")
    own = None if images is None else images / board.device
    if own is not None and not own.is_dir():
        raise BadInput(f"there is no folder {own} with images for {board.device}")
    if own is not None and data["kind"] not in FOLDERS:
        raise BadInput(f"boards of this fleet keep their data in one file, {data['path']}: --images has no place there")
    classes = list(load_task(folder.task).data.class_names)
    for name in classes:
        if not name or name.startswith(".") or "/" in name or not name.isprintable():
            raise BadInput(f"the class {name!r} in {folder.task} cannot be the name of a folder")
    return Card(
        device=board.device,
        release=Path(),
        python=target.python,
        device_toml=text,
        ca=(folder.ca / "ca.pem").read_bytes(),
        root_key=trusted.root,
        release_keys=trusted.line,
        token=secrets.token_urlsafe(32),  # one-time: the registry keeps only its public key
        images_path=data["path"] if data["kind"] in FOLDERS else "",
        classes=classes,
        images=own,
        wifi=read_wifi(folder.wifi(board.wifi)) if board.wifi else None,
        user=user,
        ssh_keys=ssh_keys,
    )


def note_token(folder: FleetFolder, registry: FleetRegistry, card: Card) -> float:
    """Notes the token of a card that was written. Returns its end, unix seconds."""
    expires = time.time() + folder.config.enrolment.token_days * 86400
    registry.add_token(card.device, card.token.encode(), expires=expires)
    return expires


def read_ssh_key(path: Path) -> str:
    """Reads the line of a public key file. Raises `BadInput` for anything else, such as a private key."""
    try:
        line = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise HushfleetError(f"{path} cannot be read: {error}") from error
    if "\n" in line or not line.startswith(("ssh-", "ecdsa-", "sk-")):
        raise BadInput(f"{path} holds no public SSH key; its name usually ends in .pub")
    return line
