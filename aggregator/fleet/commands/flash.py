"""`hushfleet flash`: write the SD card images of a fleet's boards, or a card that is mounted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hushfleet.aggregator.fleet.commands.options import FleetDir, IdsFile, ImagesFolder, WheelsFolder, opened
from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.errors import BadInput
from hushfleet.schema import AtLeast1

if TYPE_CHECKING:
    from hushfleet.firmware_profiles.cards.boot_partition import BootPartition
    from hushfleet.firmware_profiles.cards.seed import Card


@dataclass(frozen=True, kw_only=True)
class FlashOptions:
    """The SD card images to write, and their content."""

    # fmt: off
    fleet: FleetDir
    image: Annotated[Path | None, Option(metavar="FILE", help="A stock image, .img or .img.xz: each board gets a copy "
"of it with its own seed.")] = None
    boot: Annotated[Path | None, Option(metavar="MOUNT", help="The mounted boot partition of a card that holds the "
"stock system already.")] = None
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Folder for the images, with --image.")] = None
    count: Annotated[AtLeast1 | None, Option(help="Number of cards to write, for boards without one. Default: all of "
"them.")] = None
    device: Annotated[list[str] | None, Option(metavar="ID", help="Write the card of this board, or of those that "
"match a pattern in quotes; may be repeated.")] = None
    file: IdsFile = None
    python: Annotated[str | None, Option(metavar="3.X", help="Python version of the system. Default: found from the "
"image.")] = None
    images: ImagesFolder = None
    ssh_key: Annotated[Path | None, Option(metavar="KEY.pub", help="Public SSH key whose owner may log in. Default: "
"nobody may.")] = None
    ssh_user: Annotated[str, Option(help="User name for that key.")] = "hushfleet-admin"
    wheels: WheelsFolder = None
    force: Annotated[bool, Option("--force", help="Also write cards for boards that have one; the old token becomes "
"invalid.")] = False
    # fmt: on


@with_options
def flash(
    options: FlashOptions,
) -> None:
    """Write SD card images: the software, the configuration and a one-time token of each board, on its boot partition.

    The system on the image or card is Raspberry Pi OS from Trixie on, Ubuntu or Debian: cloud-init starts the
    installation. Its settings of first start (of rpi-imager, for example) are replaced: --ssh-key lets somebody log in,
    and the fleet knows the Wi-Fi.

    No root is needed, and no device is ever written to: write the finished images with rpi-imager or dd, or name the
    boot partition of a card that is in the reader. Started again, it writes the cards that are missing.

    Examples:

    `hushfleet flash --fleet greenhouse --count 40 --image raspios.img.xz --out cards`

    `hushfleet flash --fleet greenhouse --device greenhouse-07 --boot /media/me/bootfs`
    """
    from hushfleet.aggregator.config.task import load_task
    from hushfleet.aggregator.fleet.software import cards as content
    from hushfleet.aggregator.fleet.tasks.task_check import KIND_ADVICE, kind_note
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.firmware_profiles.cards.boot_partition import ImageBoot, MountedBoot
    from hushfleet.firmware_profiles.cards.cloud_init import require_cloud_init, write_card
    from hushfleet.firmware_profiles.cards.stock_image import System, read_system
    from hushfleet.user_files import checked_folder

    image, out, boot = options.image, options.out, options.boot
    if (image is None) == (boot is None):
        raise BadInput("name the stock image (--image IMAGE --out FOLDER) or a mounted boot partition (--boot MOUNT)")
    if (image is None) != (out is None):
        raise BadInput("--image and --out FOLDER go together: the boards' images go there, IMAGE itself is not changed")
    if options.python is not None:
        content.require_python(options.python)  # before an image is unpacked
    if out is not None:
        checked_folder(out)
    ssh_keys = [] if options.ssh_key is None else [content.read_ssh_key(options.ssh_key)]
    with opened(options.fleet) as (folder, registry), contextlib.ExitStack() as temporary, show_progress(Console()):
        boards = content.choose_boards(
            registry,
            devices=options.device or (),
            file=options.file,
            count=options.count,
            again=options.force,
            now=time.time(),
        )
        if boot is not None and len(boards) != 1:
            raise BadInput("a mounted boot partition is one card: name its board with one --device ID")
        replaced = [row.device for row in boards if registry.tokens(row.device, now=time.time())]
        partition: BootPartition
        if image is not None and out is not None:
            image = temporary.enter_context(_unpacked(image, out))
            partition, system = ImageBoot(image), read_system(image)
        else:
            partition, system = MountedBoot(boot or Path()), System()
        require_cloud_init(partition, system)
        target = content.choose_target(boards, system, python=options.python)
        cards = [
            content.card_of(folder, row, target=target, images=options.images, user=options.ssh_user, ssh_keys=ssh_keys)
            for row in boards
        ]
        release = content.release_of(folder, registry, [target], wheels=options.wheels)
        cards = [replace(card, release=folder.releases / release.file) for card in cards]
        for card, place in _copies(cards, image, out) if image and out else [(cards[0], partition)]:
            written = write_card(place, card)
            expires = content.note_token(folder, registry, card)
        unfit = kind_note(load_task(folder.task), folder.config)
    names = cards[0].device if len(cards) == 1 else f"{cards[0].device} to {cards[-1].device}, {len(cards)} cards"
    print(
        f"written: {names}\n"
        f"  files      {' '.join(written)}\n"
        f"  release    {release.version} ({release.size / 1e6:.1f} MB), for Python {target.python}{target.why}\n"
        f"  tokens     serve once, until {time.strftime('%Y-%m-%d', time.localtime(expires))}; keep the cards as you "
        "would keep a key"
    )
    if out is not None:
        print(f"next: write {out / cards[0].device}.img to its card, with rpi-imager or:")
        print(f"  sudo dd if={out / cards[0].device}.img of=/dev/CARD bs=4M conv=fsync status=progress")
    else:
        print(f"next: unmount {boot} and put the card into its board")
    print(
        "the first start takes some minutes; the board then shows up in: hushfleet fleet status DIR\n"
        "if it does not: put the card back into the reader and look at hushfleet/install.log on its boot partition"
    )
    if unfit is not None:
        print(f"note: {unfit}. {KIND_ADVICE}")
    if replaced:
        print(f"cards that were written before and stop working: {' '.join(replaced)}")


@contextlib.contextmanager
def _unpacked(image: Path, out: Path) -> Iterator[Path]:
    """Yields the image itself, or an unpacked copy of the .xz, which is removed afterwards."""
    from hushfleet.firmware_profiles.cards.stock_image import copy_sparse

    if not image.is_file():
        raise BadInput(f"there is no image file {image}")
    out.mkdir(parents=True, exist_ok=True)
    if image.suffix != ".xz":
        yield image
        return
    plain = out / ".stock.img"
    try:
        copy_sparse(image, plain)
        yield plain
    finally:
        plain.unlink(missing_ok=True)


def _copies(cards: Sequence[Card], image: Path, out: Path) -> Iterator[tuple[Card, BootPartition]]:
    """Yields a copy of the image for each card; the copy gets its final name when the card is written."""
    from hushfleet.firmware_profiles.cards.boot_partition import ImageBoot
    from hushfleet.firmware_profiles.cards.stock_image import copy_sparse
    from hushfleet.progress import counted

    for card in counted(cards, "cards", total=len(cards)):
        part = out / f".{card.device}.part"
        try:
            copy_sparse(image, part)
            part.chmod(0o600)  # a token and a Wi-Fi key are written next
            yield card, ImageBoot(part)
            part.replace(out / f"{card.device}.img")
        finally:
            part.unlink(missing_ok=True)
