"""Loads the public data sets by name: `digits`, `mnist`, `fashion-mnist`, `emnist`, `cifar10`,
`cifar100`, `svhn`.

`digits` comes with scikit-learn and needs no file. The others are searched in `data_dir`, or, if none is
given, in the user's own data folder, where torchvision downloads missing files.

Pixels are normalised with each set's public channel mean and standard deviation over its training images
(for `digits`: over all 1,797). FedDPA's code uses 0.5 / 0.5 for SVHN and a smaller deviation for
CIFAR-10; for networks of this size this makes no difference.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import string
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hushfleet.data.form import PUBLIC_DATA
from hushfleet.data.images import read_image
from hushfleet.data.partition import stratified_choice
from hushfleet.data.samples import DataSet, Samples
from hushfleet.data.torchvision_sets import Arrays, ImageArray, Labels, TorchvisionSet, download, read
from hushfleet.errors import BadInput
from hushfleet.user_files import read_cached, user_cache_dir, user_data_dir, write_cached

Reader = Callable[[], Arrays]
ORDER_SEED = 0
"""Seeds the fixed splits and orders below; another value would change every published figure."""
DIGITS_TEST_IMAGES = 360
_BATCHES = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}

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


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A public data set: how it is found, read and scaled.

    :param find: returns a reader of the set; None if a folder does not have it.
    :param class_names: the meaning of labels 0, 1, ...
    :param mean: per channel, for pixels in [0, 1]; `std` likewise.
    :param looked_for: the files that it consists of, and where they are expected.
    :param torchvision: what torchvision downloads if files are missing; None: it needs no files.
    :param epoch: see `hushfleet.methods.Published`.
    """

    name: str
    find: Callable[[Path], Reader | None]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    looked_for: str = ""
    torchvision: TorchvisionSet | None = None
    epoch: int = 0

    def is_at_hand(self, data_dir: Path | None = None) -> bool:
        """Returns whether `load` would find the set's files without a download; they are not read."""
        return self.find(Path(data_dir or user_data_dir())) is not None


def load(name: str, *, data_dir: Path | None = None) -> DataSet:
    """Loads a data set.

    :param name: a key of `SOURCES`.
    :param data_dir: the folder of its files: `<data_dir>/<name>/`, `<data_dir>/<torchvision's name>/raw/` or the
        folder itself. Nothing is downloaded into it. None: the user's data folder, with download.
    :raises BadInput: an unknown name, files that are missing or broken, or no network to fetch them; the
        text says which files are expected where.
    """
    if name not in SOURCES:
        raise BadInput(f"unknown data set {name!r}; the sets are {', '.join(SOURCES)}")
    source = SOURCES[name]
    folder = Path(data_dir or user_data_dir())
    found = source.find(folder)
    if found is None and data_dir is None and source.torchvision is not None:
        download(source.torchvision, folder, looked_for=source.looked_for)
        found = source.find(folder)
    if found is None:
        hint = "" if data_dir is None else "; without --data-dir it is downloaded"
        raise BadInput(f"the data set {name} is not in {folder}: looked for {source.looked_for}{hint}")
    train_images, train_labels, test_images, test_labels = found()
    for labels in (train_labels, test_labels):
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(source.class_names):
            raise BadInput(
                f"{name} holds labels from {labels.min()} to {labels.max()}; "
                f"0 to {len(source.class_names) - 1} are expected"
            )
    return DataSet(
        name,
        Samples(train_images, train_labels, source.mean, source.std),
        Samples(test_images, test_labels, source.mean, source.std),
        source.class_names,
    )


def _read_digits() -> Arrays:
    found = find_spec("sklearn")  # only to find its file: importing it takes a second
    if found is None or found.origin is None:
        raise BadInput("the digits set comes with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    # 0..16 becomes 0..255; rint(byte * 16 / 255) gives the scan back exactly.
    images = np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    rng = np.random.Generator(np.random.PCG64(ORDER_SEED))
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[stratified_choice(labels, DIGITS_TEST_IMAGES, rng)] = True
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def _idx_finder(name: str, torchvision_name: str, prefixes: tuple[str, str]) -> Callable[[Path], Reader | None]:
    """Returns a function that looks for the four IDX files, plain or gzipped, with classic or torchvision's names."""

    def find(folder: Path) -> Reader | None:
        places = [folder / name, folder / torchvision_name / "raw"]
        if folder.name in (name, torchvision_name):
            places += [folder, folder / "raw"]
        for place in places:
            for train, test in (("train-", "t10k-"), prefixes):
                files = [
                    _first_file(place, f"{part}{kind}-ubyte")
                    for part in (train, test)
                    for kind in ("images-idx3", "labels-idx1")
                ]
                present = [file for file in files if file is not None]
                if len(present) == 4:
                    return partial(_idx_pairs, *present)
                if present:
                    raise BadInput(
                        f"{place} holds only {', '.join(file.name for file in present)} of the four files "
                        f"of {name}: {train} and {test} images-idx3-ubyte and labels-idx1-ubyte, plain or .gz"
                    )
        return None

    return find


def _first_file(folder: Path, stem: str) -> Path | None:
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    return None


def _idx_pairs(*paths: Path) -> Arrays:
    return (*_idx_pair(*paths[:2]), *_idx_pair(*paths[2:]))


def _idx_pair(images_path: Path, labels_path: Path) -> tuple[ImageArray, Labels]:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise BadInput(
            f"{images_path.name} {list(images.shape)} and {labels_path.name} {list(labels.shape)} in "
            f"{images_path.parent} do not belong together: [n, H, W] and [n] are expected"
        )
    return images[:, None], labels.astype(np.int64)


def read_idx(path: Path) -> ImageArray:
    """Reads an array from an IDX file of bytes, plain or gzipped; torchvision reads only plain ones, with PyTorch.

    Format: two zero bytes, 8 for bytes, the number of dimensions, each dimension as big-endian uint32, then the values.

    :raises BadInput: the file cannot be read, or its header does not describe it.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it starts with {content[:4].hex() or 'nothing'}")
        shape = np.frombuffer(content, ">u4", content[3], 4).tolist()
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise BadInput(f"{path} cannot be read as an IDX file of bytes: {error}; fetch it again") from error


def _find_emnist(folder: Path) -> Reader | None:
    found = _find_emnist_raw(folder)
    return None if found is None else partial(_read_emnist, found)


def _read_emnist(raw: Reader) -> Arrays:
    train_images, train_labels, test_images, test_labels = raw()
    # The files swap rows and columns of every letter, count from 1, and sort the test part by label.
    order = np.random.Generator(np.random.PCG64(ORDER_SEED)).permutation(len(test_labels))
    return (
        np.ascontiguousarray(train_images.swapaxes(2, 3)),
        train_labels - 1,
        np.ascontiguousarray(test_images.swapaxes(2, 3)[order]),
        test_labels[order] - 1,
    )


_find_emnist_raw = _idx_finder("emnist", "EMNIST", ("emnist-letters-train-", "emnist-letters-test-"))


def _find_svhn(folder: Path) -> Reader | None:
    for place in (folder / "svhn", folder / "SVHN", folder):
        if all((place / f"{part}_32x32.mat").is_file() for part in ("train", "test")):
            return partial(read, _SVHN, place)
    return None


def _find_cifar(torchvision: TorchvisionSet, folder: Path) -> Reader | None:
    """Finds CIFAR as Python batches or class folders of images, or in a tar of either."""
    name = torchvision.name
    for place in (folder / name, folder):
        if (place / _BATCHES[name]).is_dir():
            return partial(read, torchvision, place)
        if name == "cifar10" and (place / "train" / CIFAR10_CLASSES[0]).is_dir() and (place / "test").is_dir():
            return partial(_read_folders, place)
        for archive in sorted([*place.glob("cifar*10*.tar.gz"), *place.glob("cifar*10*.tgz")]):
            if ("100" in archive.name) == (name == "cifar100"):
                return partial(_from_tar, torchvision, archive)
    return None


def _read_folders(place: Path) -> Arrays:
    files = (file for part in ("train", "test") for file in place.glob(f"{part}/*/*") if file.is_file())
    return _class_folders(((str(file), file.read_bytes()) for file in files), place)


def _class_folders(files: Iterable[tuple[str, bytes]], where: Path) -> Arrays:
    """:param files: the paths `.../train/<class>/<name>` and `.../test/<class>/<name>` with their contents."""
    found: dict[str, dict[tuple[str, str], ImageArray]] = {"train": {}, "test": {}}
    for path, content in files:
        _, part, kind, name = f"///{path}".rsplit("/", 3)
        if part in found:
            if kind not in CIFAR10_CLASSES:
                raise BadInput(f"{where} holds the class folder {kind!r}; cifar10 has {', '.join(CIFAR10_CLASSES)}")
            try:
                found[part][kind, name] = read_image(io.BytesIO(content), input_shape=(3, 32, 32))
            except BadInput as error:
                raise BadInput(f"{where}: {part}/{kind}/{name} is not a readable image: {error.__cause__}") from error
    if not all(found.values()):
        raise BadInput(f"{where} holds no train/<class>/ and test/<class>/ images and no CIFAR-10 batches")
    return (*_shuffled(found["train"]), *_shuffled(found["test"]))


def _shuffled(images: dict[tuple[str, str], ImageArray]) -> tuple[ImageArray, Labels]:
    """Shuffles in a fixed order, so that any first part of the set is a fair sample."""
    names = sorted(images)
    order = [names[at] for at in np.random.Generator(np.random.PCG64(ORDER_SEED)).permutation(len(names))]
    return np.stack([images[name] for name in order]), np.array([CIFAR10_CLASSES.index(kind) for kind, _ in order])


def _from_tar(torchvision: TorchvisionSet, archive: Path) -> Arrays:
    """Decodes the archive once, which takes ten seconds, and stores the arrays in the user's cache folder."""
    name, status = torchvision.name, archive.stat()
    with archive.open("rb") as file:
        key = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode() + file.read(1 << 16)).hexdigest()[:16]
    cached = user_cache_dir() / f"{name}-{key}.npz"
    if (content := read_cached(cached)) is not None:
        with np.load(io.BytesIO(content), allow_pickle=False) as kept:
            train_images, train_labels, test_images, test_labels = (kept[key] for key in kept.files)
        return train_images, train_labels, test_images, test_labels
    print(f"decoding {archive.name}, once; the copy goes to {cached}", file=sys.stderr)
    try:
        with tarfile.open(archive) as tar, tempfile.TemporaryDirectory() as unpacked:
            if batches := [member for member in tar if f"/{_BATCHES[name]}/" in f"/{member.name}"]:
                tar.extractall(unpacked, batches, filter="data")
                return read(torchvision, Path(unpacked))
            files = ((each.name, found.read()) for each in tar if each.isfile() and (found := tar.extractfile(each)))
            arrays = _class_folders(files, archive)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{archive} cannot be read: {error}; fetch it again") from error
    buffer = io.BytesIO()
    np.savez(buffer, *arrays)
    try:
        write_cached(cached, buffer.getvalue())
    except OSError as error:  # the set is still loaded; the next start decodes again
        print(f"the decoded copy could not be kept in {cached.parent}: {error}", file=sys.stderr)
    return arrays


_IDX_FILES = "train- and t10k-images-idx3-ubyte, train- and t10k-labels-idx1-ubyte (plain or .gz) in {}/ or {}/raw/"
_DIGITS = tuple(string.digits)


def _idx_source(torchvision: TorchvisionSet, class_names: tuple[str, ...], mean: float, std: float) -> DataSource:
    name, kind, _ = torchvision
    return DataSource(
        name=name,
        find=_idx_finder(name, kind, ("train-", "t10k-")),
        class_names=class_names,
        mean=(mean,),
        std=(std,),
        looked_for=_IDX_FILES.format(name, kind),
        torchvision=torchvision,
    )


_CIFAR10 = TorchvisionSet("cifar10", "CIFAR10", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz")
_CIFAR100 = TorchvisionSet("cifar100", "CIFAR100", "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz")
_SVHN = TorchvisionSet("svhn", "SVHN", "http://ufldl.stanford.edu/housenumbers/")
_SETS = (
    DataSource(
        name="digits",
        find=lambda folder: _read_digits,
        class_names=_DIGITS,
        mean=(0.3053,),
        std=(0.3759,),
    ),
    _idx_source(
        TorchvisionSet("mnist", "MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist/"), _DIGITS, 0.1307, 0.3081
    ),
    _idx_source(
        TorchvisionSet("fashion-mnist", "FashionMNIST", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot"),
        0.2860,
        0.3530,
    ),
    DataSource(
        name="emnist",
        find=_find_emnist,
        class_names=tuple(string.ascii_lowercase),
        mean=(0.1722,),
        std=(0.3309,),
        looked_for=_IDX_FILES.format("emnist", "EMNIST")
        + ", the letters part, or torchvision's emnist-letters-* names",
        torchvision=TorchvisionSet("emnist", "EMNIST", "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"),
    ),
    DataSource(
        name="cifar10",
        find=partial(_find_cifar, _CIFAR10),
        class_names=CIFAR10_CLASSES,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        looked_for="in cifar10/ or here: cifar-10-batches-py/, train/<class>/ and test/<class>/ with images, "
        "or a cifar*10*.tar.gz of either",
        torchvision=_CIFAR10,
    ),
    DataSource(
        name="cifar100",
        find=partial(_find_cifar, _CIFAR100),
        class_names=tuple(_FINE_LABELS.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        looked_for="cifar-100-python/ with train and test, or a cifar*100*.tar.gz of it, in cifar100/ or here",
        torchvision=_CIFAR100,
    ),
    DataSource(
        name="svhn",
        find=_find_svhn,
        class_names=_DIGITS,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        looked_for="train_32x32.mat and test_32x32.mat in svhn/ or here",
        torchvision=_SVHN,
    ),
)
SOURCES: dict[str, DataSource] = {source.name: source for source in _SETS}
"""The public data sets by name; to add one, write its value above, and its name into `PUBLIC_DATA`."""
assert tuple(SOURCES) == PUBLIC_DATA
