"""CIFAR-10 and CIFAR-100 as people keep them: the original Python batches, class folders of images, or a tar of either.

Decoding 60,000 JPEG files takes some ten seconds, so what comes from a tar is kept decoded in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hushfleet.data.batch_pickle import bytes_of, labels_of, read_batch
from hushfleet.data.images import pillow, pixels_of
from hushfleet.errors import BadInput
from hushfleet.progress import doing
from hushfleet.user_files import read_cached, user_cache_dir, write_cached

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FINE_LABELS = """
    apple aquarium-fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn-mower leopard lion lizard
    lobster man maple-tree motorcycle mountain mouse mushroom oak-tree orange orchid otter palm-tree pear
    pickup-truck pine-tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
    shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet-pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow-tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_FINE_LABELS.split())
ORDER_SEED = 0
_CACHED = ("train_images", "train_labels", "test_images", "test_labels")

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
LabelledImages = tuple[Images, Labels]
Arrays = tuple[Images, Labels, Images, Labels]
"""Training images uint8 `[n, C, H, W]` and labels int64 `[n]`, then those of the test part."""


class Cifar(NamedTuple):
    """One of the two sets.

    :param name: as the set is called in its folder's and archive's name.
    :param batches: the folder of its Python batches.
    :param parts: the files of the training part, and of the test part.
    :param labels: under which key a batch has them.
    """

    name: str
    batches: str
    parts: tuple[tuple[str, ...], tuple[str, ...]]
    labels: str
    class_names: tuple[str, ...]

    def find(self, folder: Path) -> Arrays | None:
        """Training images uint8 `[n, 3, 32, 32]` and labels int64 `[n]`, then the test part; None if absent."""
        for place in (folder / self.name, folder):
            batches = place / self.batches
            if batches.is_dir():
                return self._arrays(_read_files(batches, "*"), batches)
            if (place / "train" / self.class_names[0]).is_dir() and (place / "test").is_dir():
                return self._arrays(_read_files(place, "train/*/*", "test/*/*"), place)
            number = self.name.removeprefix("cifar")
            archives = [*place.glob(f"cifar*{number}*.tar.gz"), *place.glob(f"cifar*{number}*.tgz")]
            for archive in sorted(each for each in archives if ("100" in each.name) == (number == "100")):
                return self._from_tar(archive)
        return None

    def _from_tar(self, archive: Path) -> Arrays:
        cached = user_cache_dir() / f"{self.name}-{_key(archive)}.npz"
        kept = _read_cache(cached)
        if kept is not None:
            return kept
        print(f"decoding {archive.name}, once; the copy goes to {cached}", file=sys.stderr)
        arrays = self._arrays(_read_tar(archive), archive)
        _write_cache(cached, arrays)
        return arrays

    def _arrays(self, files: Iterable[tuple[str, bytes]], where: Path) -> Arrays:
        """Sorts named file contents into batches or class images, and decodes them."""
        batches: dict[str, LabelledImages] = {}
        images: dict[str, tuple[Images, int]] = {}
        for name, content in files:
            *folders, base = name.split("/")
            if base in (*self.parts[0], *self.parts[1]):
                batches[base] = _unpickle(content, f"{where}: {name}", labels_key=self.labels)
            elif len(folders) >= 2 and folders[-2] in ("train", "test"):
                if folders[-1] not in self.class_names:
                    known = ", ".join(self.class_names)
                    raise BadInput(f"{where} holds the class folder {folders[-1]!r}; {self.name} has {known}")
                label = self.class_names.index(folders[-1])
                images["/".join([*folders[-2:], base])] = (_decode(content, f"{where}: {name}"), label)
        if not batches:
            return (*_shuffled(images, "train/", where), *_shuffled(images, "test/", where))
        missing = [name for part in self.parts for name in part if name not in batches]
        if missing:
            raise BadInput(f"{where} lacks {', '.join(missing)} of {self.name}'s batches; fetch it again")
        train, test = (_joined([batches[name] for name in part]) for part in self.parts)
        return (*train, *test)


def _joined(parts: list[LabelledImages]) -> LabelledImages:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCHES = ("test_batch",)
CIFAR10 = Cifar("cifar10", "cifar-10-batches-py", (TRAIN_BATCHES, TEST_BATCHES), "labels", CIFAR10_CLASSES)
CIFAR100 = Cifar("cifar100", "cifar-100-python", (("train",), ("test",)), "fine_labels", CIFAR100_CLASSES)


def _read_files(root: Path, *patterns: str) -> Iterator[tuple[str, bytes]]:
    for file in sorted(file for pattern in patterns for file in root.glob(pattern)):
        if file.is_file():
            yield file.relative_to(root).as_posix(), file.read_bytes()


def _read_tar(archive: Path) -> Iterator[tuple[str, bytes]]:
    reading = doing(f"decoding {archive.name}, MiB", total=archive.stat().st_size >> 20)
    try:
        with archive.open("rb") as packed, tarfile.open(fileobj=packed, mode="r:*") as tar, reading as work:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content.read()
                work.count((packed.tell() >> 20) - work.done)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{archive} cannot be read: {error}; fetch it again") from error


def _key(archive: Path) -> str:
    """Names the file's content without reading all of it: size, time of change, and its first 64 KiB."""
    status = archive.stat()
    with archive.open("rb") as file:
        head = file.read(1 << 16)
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode() + head).hexdigest()[:16]


def _read_cache(path: Path) -> Arrays | None:
    content = read_cached(path)
    if content is None:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as kept:
        train_images, train_labels, test_images, test_labels = (kept[name] for name in _CACHED)
    return train_images, train_labels, test_images, test_labels


def _write_cache(path: Path, arrays: Arrays) -> None:
    named: dict[str, Any] = dict(zip(_CACHED, arrays, strict=True))
    buffer = io.BytesIO()
    np.savez(buffer, **named)
    try:
        write_cached(path, buffer.getvalue())
    except OSError as error:  # the set is loaded all the same; the next start decodes again
        print(f"the decoded copy could not be kept in {path.parent}: {error}", file=sys.stderr)


def _shuffled(images: dict[str, tuple[Images, int]], prefix: str, where: Path) -> LabelledImages:
    """Folders come sorted by class; a fixed shuffle makes any leading part of the set a fair sample."""
    names = sorted(name for name in images if name.startswith(prefix))
    if not names:
        raise BadInput(f"{where} holds no {prefix}<class>/ images and no CIFAR-10 batches")
    order = np.random.Generator(np.random.PCG64(ORDER_SEED)).permutation(len(names))
    pixels = np.stack([images[names[at]][0] for at in order])
    return pixels, np.array([images[names[at]][1] for at in order], dtype=np.int64)


def _decode(content: bytes, what: str) -> Images:
    try:
        with pillow().Image.open(io.BytesIO(content)) as image:
            pixels = pixels_of(image, channels=3)
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # broken images fail in many ways: OSError, SyntaxError, struct.error, ...
        raise BadInput(f"{what} is not a readable image: {error}") from error
    if pixels.shape != (3, 32, 32):
        raise BadInput(f"{what} is {pixels.shape[2]} x {pixels.shape[1]} pixels; CIFAR-10 images are 32 x 32")
    return pixels


def _unpickle(content: bytes, what: str, *, labels_key: str = "labels") -> LabelledImages:
    try:
        batch = read_batch(content)
        pixels, labels = bytes_of(batch["data"]), labels_of(batch[labels_key])
    except Exception as error:  # broken bytes fail in many ways: ValueError, IndexError, KeyError, ...
        raise BadInput(f"{what} is not a CIFAR batch: {error}") from error
    if pixels.shape != (len(labels), 3 * 32 * 32):
        raise BadInput(f"{what} holds data {list(pixels.shape)} for {len(labels)} labels; [n, 3072] is expected")
    return pixels.reshape(-1, 3, 32, 32), labels
