"""CIFAR-10 in the three forms in which people keep it, and CIFAR-100 in the original one.

The original Python batches (`cifar-10-batches-py/`), class folders of images (`train/cat/0001.jpg`), or a
tar of either. Decoding 60,000 JPEG files takes some ten seconds, so what comes from a tar is kept decoded
in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hushfleet.data.batch_pickle import bytes_of, labels_of, read_batch
from hushfleet.data.download import user_cache_dir
from hushfleet.errors import BadInput

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
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
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCHES = ("test_batch",)
ORDER_SEED = 0

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def find_cifar10(folder: Path) -> Arrays | None:
    """Training images uint8 `[n, 3, 32, 32]` and labels int64 `[n]`, then the test part; None if absent."""
    for place in (folder / "cifar10", folder):
        batches = place / "cifar-10-batches-py"
        if batches.is_dir():
            return _from_files(_read_files(batches, sorted(batches.glob("*_batch*"))), batches)
        if (place / "train" / CIFAR10_CLASSES[0]).is_dir() and (place / "test").is_dir():
            files = sorted(place.glob("train/*/*")) + sorted(place.glob("test/*/*"))
            return _from_files(_read_files(place, files), place)
        archives = sorted([*place.glob("cifar*10*.tar.gz"), *place.glob("cifar*10*.tgz")])
        for archive in (each for each in archives if "100" not in each.name):
            return _from_tar(archive)
    return None


def find_cifar100(folder: Path) -> Arrays | None:
    """The same of CIFAR-100, by its 100 fine labels: `cifar-100-python/` with `train` and `test`, or a tar of it."""
    for place in (folder / "cifar100", folder):
        batches = place / "cifar-100-python"
        if batches.is_dir():
            return _from_two_files(_read_files(batches, [batches / part for part in ("train", "test")]), batches)
        for archive in sorted([*place.glob("cifar*100*.tar.gz"), *place.glob("cifar*100*.tgz")]):
            return _from_two_files(_read_tar(archive), archive)
    return None


def _from_two_files(files: Iterable[tuple[str, bytes]], where: Path) -> Arrays:
    parts = {
        base: _unpickle(content, f"{where}: {base}", labels_key="fine_labels", kind="CIFAR-100")
        for name, content in files
        if (base := name.rpartition("/")[2]) in ("train", "test")
    }
    missing = [part for part in ("train", "test") if part not in parts]
    if missing:
        raise BadInput(f"{where} lacks {' and '.join(missing)} of CIFAR-100; fetch it again")
    return (*parts["train"], *parts["test"])


def _read_files(root: Path, files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        if file.is_file():
            yield file.relative_to(root).as_posix(), file.read_bytes()


def _read_tar(archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{archive} cannot be read: {error}; fetch it again") from error


def _from_tar(archive: Path) -> Arrays:
    cached = user_cache_dir() / f"cifar10-{_key(archive)}.npz"
    kept = _read_cache(cached)
    if kept is not None:
        return kept
    print(f"decoding {archive.name}, once; the copy goes to {cached}", file=sys.stderr)
    arrays = _from_files(_read_tar(archive), archive)
    _write_cache(cached, arrays)
    return arrays


def _key(archive: Path) -> str:
    """Names the file's content without reading all of it: size, time of change, and its first 64 KiB."""
    status = archive.stat()
    with archive.open("rb") as file:
        head = file.read(1 << 16)
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode() + head).hexdigest()[:16]


def _read_cache(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as kept:
            return (kept["train_images"], kept["train_labels"], kept["test_images"], kept["test_labels"])
    except Exception:  # missing, cut short or of another making: it is only a copy, and is made again
        return None


def _write_cache(path: Path, arrays: Arrays) -> None:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    unfinished: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
            unfinished = part.name
            np.savez(part, **dict(zip(names, arrays, strict=True)))
        os.replace(unfinished, path)
    except OSError as error:  # the set is loaded all the same; the next start decodes again
        print(f"the decoded copy could not be kept in {path.parent}: {error}", file=sys.stderr)
        if unfinished is not None:
            Path(unfinished).unlink(missing_ok=True)


def _from_files(files: Iterable[tuple[str, bytes]], where: Path) -> Arrays:
    """Sorts named file contents into batches or class images, and decodes them."""
    batches: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]] = {}
    images: dict[str, tuple[npt.NDArray[np.uint8], int]] = {}
    for name, content in files:
        *folders, base = name.split("/")
        if base in TRAIN_BATCHES + TEST_BATCHES:
            batches[base] = _unpickle(content, f"{where}: {name}")
        elif len(folders) >= 2 and folders[-2] in ("train", "test"):
            if folders[-1] not in CIFAR10_CLASSES:
                raise BadInput(
                    f"{where} holds the class folder {folders[-1]!r}; "
                    f"CIFAR-10 has {', '.join(CIFAR10_CLASSES)}"
                )
            key = "/".join([*folders[-2:], base])
            images[key] = (_decode(content, f"{where}: {name}"), CIFAR10_CLASSES.index(folders[-1]))
    if batches:
        missing = [name for name in TRAIN_BATCHES + TEST_BATCHES if name not in batches]
        if missing:
            raise BadInput(f"{where} lacks {', '.join(missing)} of CIFAR-10's batches; fetch it again")
        parts = [[batches[name] for name in names] for names in (TRAIN_BATCHES, TEST_BATCHES)]
        stacked = [np.concatenate([pair[at] for pair in part]) for part in parts for at in (0, 1)]
        return stacked[0], stacked[1], stacked[2], stacked[3]
    return (*_shuffled(images, "train/", where), *_shuffled(images, "test/", where))


def _shuffled(
    images: dict[str, tuple[npt.NDArray[np.uint8], int]], prefix: str, where: Path
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Folders come sorted by class; a fixed shuffle makes any leading part of the set a fair sample."""
    names = sorted(name for name in images if name.startswith(prefix))
    if not names:
        raise BadInput(f"{where} holds no {prefix}<class>/ images and no CIFAR-10 batches")
    order = np.random.Generator(np.random.PCG64(ORDER_SEED)).permutation(len(names))
    pixels = np.stack([images[names[at]][0] for at in order])
    return pixels, np.array([images[names[at]][1] for at in order], dtype=np.int64)


def _decode(content: bytes, what: str) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"{what} is an image; reading it needs Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except MemoryError:
        raise
    except Exception as error:  # broken images fail in many ways: OSError, SyntaxError, struct.error, ...
        raise BadInput(f"{what} is not a readable image: {error}") from error
    if pixels.shape != (32, 32, 3):
        raise BadInput(f"{what} is {pixels.shape[1]} x {pixels.shape[0]} pixels; CIFAR-10 images are 32 x 32")
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _unpickle(
    content: bytes, what: str, *, labels_key: str = "labels", kind: str = "CIFAR-10"
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    try:
        batch = read_batch(content)
        pixels, labels = bytes_of(batch["data"]), labels_of(batch[labels_key])
    except Exception as error:  # broken bytes fail in many ways: ValueError, IndexError, KeyError, ...
        raise BadInput(f"{what} is not a {kind} batch: {error}") from error
    if pixels.shape != (len(labels), 3 * 32 * 32):
        raise BadInput(
            f"{what} holds data {list(pixels.shape)} for {len(labels)} labels; [n, 3072] is expected"
        )
    return pixels.reshape(-1, 3, 32, 32), labels
