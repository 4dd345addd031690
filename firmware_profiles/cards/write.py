"""Writes one board's card: into a mounted boot partition, or into a copy of a stock image."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hushfleet.firmware_profiles.cards.boot_partition import BootPartition, require_room
from hushfleet.firmware_profiles.cards.customised import FOLDER
from hushfleet.firmware_profiles.cards.seed import Card, SeedWriter, stage


def write_card(boot: BootPartition, card: Card, writer: SeedWriter) -> list[str]:
    """Replaces the files of an earlier call; returns the names of the written files and folders in the root.

    Raises `BadInput` if the partition does not fit the writer or has no space.
    """
    with tempfile.TemporaryDirectory(prefix="hushfleet-card-") as name:
        folder = Path(name)
        stage(card, writer, boot, folder)
        require_room(boot, folder)
        boot.write(folder, remove=[FOLDER])
        return sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
