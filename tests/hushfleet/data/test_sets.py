"""The public sets: from small files of our own making, and from the real ones where they are at hand."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from hushfleet.data.sets import CIFAR10_CLASSES, SOURCES, load, read_idx
from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.errors import BadInput

REPOSITORY = Path(__file__).parents[3]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_family(folder: Path, *, prefixes=("train-", "t10k-"), zipped: bool = True, first_label: int = 0) -> dict:
    """Twelve training and six test images of 28 x 28, and what was put in."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    made = {}
    for prefix, part, count in zip(prefixes, ("train", "test"), (12, 6), strict=True):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) // 2 + first_label).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx(array)
            name = f"{prefix}{kind}-ubyte"
            (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
        made[part] = (images, labels)
    return made


def test_digits_need_no_file_and_never_change() -> None:
    digits = load("digits")
    assert digits.input_shape == (1, 8, 8)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.class_names == tuple("0123456789")
    from sklearn.datasets import load_digits

    scans = load_digits()
    # Both parts together are the original scans, which come back exactly from the bytes.
    whole = np.concatenate([digits.train.images, digits.test.images])[:, 0]
    assert set(np.unique(whole)) == {round(level * 255 / 16) for level in range(17)}
    back = np.rint(whole * (16 / 255)).astype(int).reshape(-1, 64)
    assert sorted(map(tuple, back)) == sorted(map(tuple, scans.data.astype(int)))
    # Stratified: each class has its fifth in the test part.
    counts = np.bincount(scans.target)
    assert (np.abs(np.bincount(digits.test.y) - counts * 360 / 1797) < 1).all()
    assert abs(digits.train.x.mean()) < 0.01
    assert abs(digits.train.x.std() - 1) < 0.01
    # The split is part of every published figure: pinned.
    assert hashlib.sha256(digits.test.images.tobytes()).hexdigest()[:16] == "62d31ee8de56380a"


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw"])
def test_idx_sets_are_found_in_both_layouts(tmp_path: Path, place: str, zipped: bool) -> None:
    made = write_family(tmp_path / place, zipped=zipped)
    data = load("mnist", data_dir=tmp_path)
    for part, samples in (("train", data.train), ("test", data.test)):
        assert (samples.images[:, 0] == made[part][0]).all()
        assert samples.y.tolist() == made[part][1].tolist()
        assert samples.y.dtype == np.int64
    pixel = int(made["train"][0][4, 10, 10])
    assert data.train.x[4, 0, 10, 10] == pytest.approx((pixel / 255 - 0.1307) / 0.3081, abs=1e-5)


def test_the_set_s_own_folder_may_be_named_directly(tmp_path: Path) -> None:
    write_family(tmp_path / "fashion-mnist")
    data = load("fashion-mnist", data_dir=tmp_path / "fashion-mnist")
    assert data.class_names[9] == "ankle-boot"
    with pytest.raises(BadInput, match="the data set mnist is not in"):
        load("mnist", data_dir=tmp_path / "fashion-mnist")


@pytest.mark.parametrize(
    ("place", "prefixes"),
    [
        ("emnist", ("train-", "t10k-")),
        ("EMNIST/raw", ("emnist-letters-train-", "emnist-letters-test-")),
    ],
)
def test_emnist_is_turned_counted_from_zero_and_mixed(tmp_path: Path, place: str, prefixes) -> None:
    made = write_family(tmp_path / place, prefixes=prefixes, first_label=1)
    data = load("emnist", data_dir=tmp_path)
    assert data.classes == 26
    images, labels = made["train"]
    assert data.train.y.tolist() == (labels - 1).tolist()
    assert data.train.images[5, 0, 3, 20] == images[5, 20, 3]
    assert (data.train.images[:, 0] == images.transpose(0, 2, 1)).all()
    # The test part is shuffled, images and labels together, the same way each time.
    upright = {image.T.tobytes(): int(label) - 1 for image, label in zip(*made["test"], strict=True)}
    assert [upright[image[0].tobytes()] for image in data.test.images] == data.test.y.tolist()
    assert data.test.y.tolist() != sorted(data.test.y.tolist())
    assert data.test.y.tolist() == load("emnist", data_dir=tmp_path).test.y.tolist()


IDX = idx(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG" + IDX,
        b"\0\0\x0d\x01\0\0\0\1" + bytes(4),
        IDX[:9],
        IDX[:-1],
        IDX + b"x",
        b"\0\0\x08\2" + b"\xff" * 8,
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_what_is_no_whole_idx_file_is_refused(tmp_path: Path, content: bytes, zipped: bool) -> None:
    path = tmp_path / ("images.gz" if zipped else "images")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(BadInput, match="cannot be read as an IDX file of bytes"):
        read_idx(path)


def test_broken_idx_sets_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadInput, match=r"holds only .* of the four files"):
        load("mnist", data_dir=tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(5, np.uint8)))
    with pytest.raises(BadInput, match="do not belong together"):
        load("mnist", data_dir=tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(6, 10, np.uint8)))
    with pytest.raises(BadInput, match="labels from 10 to 10"):
        load("mnist", data_dir=tmp_path)


@pytest.fixture
def write_batches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict]]:
    """Writes small Python batches, and has torchvision know their digests as the published ones."""

    def write(folder: Path, name: str = "CIFAR10", *, labels: str = "labels", classes: int = 10) -> dict[str, dict]:
        kind: Any = getattr(import_torchvision().datasets, name)
        (folder / kind.base_folder).mkdir(parents=True)
        rng, made = np.random.default_rng(4), {}
        for parts in ("train_list", "test_list"):
            sums = []
            for file, _ in getattr(kind, parts):
                pixels = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
                made[file] = {"data": pixels, labels: rng.integers(0, classes, 3).tolist()}
                content = pickle.dumps(made[file], protocol=2)
                (folder / kind.base_folder / file).write_bytes(content)
                sums.append([file, hashlib.md5(content).hexdigest()])
            monkeypatch.setattr(kind, parts, sums)
        meta = pickle.dumps({kind.meta["key"]: ["a"] * classes})
        (folder / kind.base_folder / kind.meta["filename"]).write_bytes(meta)
        monkeypatch.setattr(kind, "meta", kind.meta | {"md5": hashlib.md5(meta).hexdigest()})
        return made

    return write


def test_cifar10_from_its_python_batches(tmp_path: Path, write_batches) -> None:
    made = write_batches(tmp_path / "cifar10")
    data = load("cifar10", data_dir=tmp_path)
    assert data.input_shape == (3, 32, 32)
    assert (len(data.train), len(data.test)) == (15, 3)
    assert data.train.y[3:6].tolist() == made["data_batch_2"]["labels"]
    assert data.test.images[1].tobytes() == made["test_batch"]["data"][1].tobytes()  # red plane, green, blue


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_that_is_not_the_published_one_is_never_opened(tmp_path: Path, write_batches, packed: bool) -> None:
    write_batches(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": Evil(), "labels": []}, protocol=2))
    if packed:
        with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
            tar.add(folder, arcname=folder.name)
        folder.rename(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match=r"cifar10 in .* cannot be read .*corrupted"):
        load("cifar10", data_dir=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_incomplete_batches_are_refused(tmp_path: Path, write_batches) -> None:
    write_batches(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").unlink()
    with pytest.raises(BadInput, match=r"cannot be read .*not found or corrupted"):
        load("cifar10", data_dir=tmp_path)


def colour(label: int, at: int) -> tuple[int, int, int]:
    return (25 * label, 255 - 25 * label, 40 * at)


def write_class_folders(folder: Path) -> None:
    """Four training images and one test image a class, of one colour each, as JPEG files."""
    for part, count in (("train", 4), ("test", 1)):
        for label, name in enumerate(CIFAR10_CLASSES):
            (folder / part / name).mkdir(parents=True)
            for at in range(count):
                Image.new("RGB", (32, 32), colour(label, at)).save(folder / part / name / f"{at:04d}.jpg", quality=95)


def check_class_folders(data) -> None:
    assert np.bincount(data.train.y).tolist() == [4] * 10
    assert np.bincount(data.test.y).tolist() == [1] * 10
    assert data.train.y[:10].tolist() != [0] * 4 + [1] * 4 + [2] * 2  # mixed, not sorted by class
    assert data.train.images.flags.c_contiguous
    for image, label in zip(data.test.images, data.test.y, strict=True):
        assert np.abs(image[:, 16, 16].astype(int) - colour(int(label), 0)).max() <= 4


def test_cifar10_from_class_folders(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "cifar10")
    check_class_folders(load("cifar10", data_dir=tmp_path))
    (tmp_path / "cifar10" / "train" / "cat" / "0001.jpg").write_bytes(b"\xff\xd8 half a file")
    with pytest.raises(BadInput, match=r"train/cat/0001\.jpg is not a readable image"):
        load("cifar10", data_dir=tmp_path)


def test_cifar10_from_a_tar_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_class_folders(tmp_path / "unpacked")
    (tmp_path / "cifar10").mkdir()
    archive = tmp_path / "cifar10" / "cifar10-images.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "unpacked", arcname="CIFAR-10-images")
    first = load("cifar10", data_dir=tmp_path)
    check_class_folders(first)
    assert "decoding cifar10-images.tar.gz" in capsys.readouterr().err
    (copy,) = (tmp_path / "cache" / "hushfleet").iterdir()
    second = load("cifar10", data_dir=tmp_path)
    assert capsys.readouterr().err == ""
    assert (second.train.images == first.train.images).all()
    assert (second.test.y == first.test.y).all()
    # A broken copy is made again; a changed archive gets a copy of its own.
    copy.write_bytes(copy.read_bytes()[:1000])
    check_class_folders(load("cifar10", data_dir=tmp_path))
    assert "decoding" in capsys.readouterr().err
    os.utime(archive, (1, 1))
    load("cifar10", data_dir=tmp_path)
    assert len(list((tmp_path / "cache" / "hushfleet").iterdir())) == 2
    # A cache that cannot be written costs time, not the data.
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check_class_folders(load("cifar10", data_dir=tmp_path))
    assert "could not be kept" in capsys.readouterr().err


def test_a_tar_of_batches_and_a_broken_tar(tmp_path: Path, monkeypatch, write_batches) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = write_batches(tmp_path / "elsewhere")
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "elsewhere" / "cifar-10-batches-py", arcname="cifar-10-batches-py")
    data = load("cifar10", data_dir=tmp_path)
    assert data.test.y.tolist() == made["test_batch"]["labels"]
    archive.write_bytes(archive.read_bytes()[:5000])
    with pytest.raises(BadInput, match="cannot be read"):
        load("cifar10", data_dir=tmp_path)
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("readme"), io.BytesIO())
    with pytest.raises(BadInput, match="holds no train/<class>/ and test/<class>/ images"):
        load("cifar10", data_dir=tmp_path)


def test_whether_a_set_is_at_hand_is_said_without_reading_it(tmp_path: Path) -> None:
    """`hushfleet reproduce --list` asks for all of them, and decoding an archive takes ten seconds."""
    (tmp_path / "cifar10.tar.gz").write_bytes(b"no archive")
    assert SOURCES["cifar10"].is_at_hand(tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        load("cifar10", data_dir=tmp_path)


def test_cifar100_by_its_fine_labels(tmp_path: Path, write_batches) -> None:
    made = write_batches(tmp_path / "cifar100", "CIFAR100", labels="fine_labels", classes=100)
    assert SOURCES["cifar100"].is_at_hand(tmp_path)
    assert not SOURCES["cifar10"].is_at_hand(tmp_path)
    data = load("cifar100", data_dir=tmp_path)
    assert (data.input_shape, data.classes, data.class_names[9]) == ((3, 32, 32), 100, "bottle")
    assert data.train.y.tolist() == made["train"]["fine_labels"]
    assert data.test.images[2].tobytes() == made["test"]["data"][2].tobytes()
    # the archive as it is distributed, which is not one of CIFAR-10
    archive = tmp_path / "packed" / "cifar-100-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "cifar100" / "cifar-100-python", arcname="cifar-100-python")
    assert load("cifar100", data_dir=archive.parent).test.y.tolist() == made["test"]["fine_labels"]
    assert not SOURCES["cifar10"].is_at_hand(archive.parent)


def test_svhn_from_matlab_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    (tmp_path / "svhn").mkdir()
    images = rng.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    labels = np.array([[1], [10], [9], [10]], dtype=np.uint8)
    known = {}
    for part in ("train", "test"):
        file = tmp_path / "svhn" / f"{part}_32x32.mat"
        savemat(file, {"X": images, "y": labels})
        known[part] = ["", file.name, hashlib.md5(file.read_bytes()).hexdigest()]
    with pytest.raises(BadInput, match=r"svhn in .* cannot be read .*not found or corrupted"):
        load("svhn", data_dir=tmp_path)
    monkeypatch.setattr(import_torchvision().datasets.SVHN, "split_list", known)
    data = load("svhn", data_dir=tmp_path)
    assert data.train.y.tolist() == [1, 0, 9, 0]  # the files call zero ten
    assert data.train.images[2, 1, 30, 7] == images[30, 7, 1, 2]


def test_a_set_that_is_not_there_says_what_was_looked_for(tmp_path: Path) -> None:
    for name in SOURCES:
        if name != "digits":
            with pytest.raises(BadInput, match=f"{name} is not in .*: looked for .*{name}/"):
                load(name, data_dir=tmp_path)
    with pytest.raises(BadInput, match="the sets are digits, mnist, fashion-mnist, emnist, cifar10, cifar100, svhn"):
        load("imagenet")


def test_without_a_network_the_message_says_what_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # the discard port: nobody answers
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(BadInput, match=r"cifar10 could not be downloaded.*cs\.toronto\.edu.*--data-dir"):
        load("cifar10")
    with pytest.raises(BadInput, match=r"svhn could not be downloaded.*stanford\.edu.*train_32x32\.mat"):
        load("svhn")


def test_downloads_into_the_user_s_folder_and_then_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_family(tmp_path / "site")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mnist = import_torchvision().datasets.MNIST
    monkeypatch.setattr(mnist, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    sums = [(f.name, hashlib.md5(f.read_bytes()).hexdigest()) for f in sorted((tmp_path / "site").iterdir())]
    monkeypatch.setattr(mnist, "resources", sums)
    try:
        data = load("mnist")
    finally:
        server.shutdown()
        server.server_close()
    assert data.test.y.tolist() == made["test"][1].tolist()
    assert (tmp_path / "home" / "hushfleet" / "MNIST" / "raw").is_dir()
    assert len(load("mnist").train) == 12  # the server is gone: found on disk


def test_torchvision_imports_beside_any_torch() -> None:
    """In a process of its own, since a failed import must not spoil a later one."""
    script = (
        "import sys\n"
        "import hushfleet.data.sets\n"
        "assert 'torch' not in sys.modules and 'torchvision' not in sys.modules\n"
        "assert 'sklearn' not in sys.modules and 'PIL' not in sys.modules and 'scipy' not in sys.modules\n"
        "from hushfleet.data.torchvision_sets import import_torchvision\n"
        "first, second = import_torchvision(), import_torchvision()\n"
        "import torchvision\n"
        "assert first is second is torchvision\n"
        "print(torchvision.datasets.SVHN.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.stdout.strip() == "SVHN", done.stderr


# Class counts of the real sets (training, test); MNIST's are uneven.
REAL_COUNTS = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion-mnist": ([6000] * 10, [1000] * 10),
    "emnist": ([4800] * 26, [800] * 26),
    "cifar10": ([5000] * 10, [1000] * 10),
}


def test_real_sets_where_they_are_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every real set in HUSHFLEET_DATA_DIR, or beside the repository; the small files always."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_family(tmp_path / "mnist")
    folders = [(tmp_path, {"mnist": ([2, 2, 2, 2, 2, 2], [2, 2, 2])})]
    named = os.environ.get("HUSHFLEET_DATA_DIR")
    real = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    folders += [(real, {name: REAL_COUNTS[name]}) for name in REAL_COUNTS if (real / name).is_dir()]
    for folder, expected in folders:
        for name, (train, test) in expected.items():
            data = load(name, data_dir=folder)
            assert np.bincount(data.train.y).tolist() == train, name
            assert np.bincount(data.test.y).tolist() == test, name
            if folder == real:
                sample = data.train.take(slice(0, 5000)).x
                assert np.abs(sample.mean(axis=(0, 2, 3))).max() < 0.05, name
                assert np.abs(sample.std(axis=(0, 2, 3)) - 1).max() < 0.05, name
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # some 180 MB when CIFAR-10 was there
