"""The public sets: from small files of our own making, and from the real ones where they are at hand."""

from __future__ import annotations

import base64
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
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from hushfleet.data.cifar import CIFAR10_CLASSES
from hushfleet.data.sets import is_at_hand, load, set_names
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


def batch(rng: np.random.Generator, count: int) -> dict:
    return {
        "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
        "labels": rng.integers(0, 10, count).tolist(),
    }


def write_batches(folder: Path) -> dict[str, dict]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(4)
    made = {name: batch(rng, 3) for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]}
    for name, content in made.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(b"not looked at")
    return made


def test_cifar10_from_its_python_batches(tmp_path: Path) -> None:
    made = write_batches(tmp_path / "cifar10" / "cifar-10-batches-py")
    data = load("cifar10", data_dir=tmp_path)
    assert data.input_shape == (3, 32, 32)
    assert (len(data.train), len(data.test)) == (15, 3)
    assert data.train.y[3:6].tolist() == made["data_batch_2"]["labels"]
    assert data.test.images[1].tobytes() == made["test_batch"]["data"][1].tobytes()  # red plane, green, blue


def as_python_2_wrote_it(name: str, pixels: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes of the batches that are distributed: protocol 2 of Python 2, whose bytes are strings."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    return b"".join([
        b"\x80\x02}q\x01(", text(b"batch_label"), b"q\x02", text(name.encode()), b"q\x03",
        text(b"labels"), b"q\x04]q\x05(", *(b"K" + bytes([label]) for label in labels), b"e",
        text(b"data"), b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85", text(b"b"),
        b"\x87Rq\x09(K\x01K", bytes([len(pixels)]), b"M\x00\x0c\x86cnumpy\ndtype\nq\x0a", text(b"u1"),
        b"K\x00K\x01\x87Rq\x0b(K\x03", text(b"|"), b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
        pixels.nbytes.to_bytes(4, "little"), pixels.tobytes(), b"tb",
        text(b"filenames"), b"q\x0c]q\x0d(", text(b"a.png"), b"r\x00\x01\x00\x00",
        text(b"b.png"), b"r\x01\x01\x00\x00eu.",
    ])  # fmt: skip


@pytest.mark.parametrize("protocol", [None, 2, 3, 4])
def test_a_batch_of_any_python(tmp_path: Path, protocol: int | None) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    made = write_batches(folder)["data_batch_1"]
    (folder / "data_batch_1").write_bytes(
        pickle.dumps(made, protocol)
        if protocol
        else as_python_2_wrote_it("training batch 1 of 5", made["data"], made["labels"])
    )
    data = load("cifar10", data_dir=tmp_path)
    assert data.train.y[:3].tolist() == made["labels"]
    assert data.train.images[2].tobytes() == made["data"][2].tobytes()


# Found by fuzzing: its memo index 175,726,962 made Python's unpickler take 2.6 GiB for 99 bytes.
LARGE_MEMO = (
    "gAJ9cQAoWAQAAABkYXRhcnJheQpfcmVjb25zdHJ1Y3QKcQNjAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACAAAAAAAAAAAAAAAAAAAAAAAAACQA"
    "AAAAAP8AAAgAAAAAAAD///9j"
)
ONE = {"data": np.zeros((1, 3072), np.uint8), "labels": [0]}
LARGE_PICKLES = {
    "memo": base64.b64decode(LARGE_MEMO),
    "a memo in a batch that ends": b"\x80\x02}r\x72\x61\x79\x0a.",
    "a length": b"\x80\x04}\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    "a shape": pickle.dumps(ONE, 2).replace(b"M\x00\x0c", b"J\0\0\0@"),
    # each round would make a text of twice the characters of the one before
    "hexadecimal text": b"\x80\x03}c_codecs\nencode\nq\0C\2ab" + b"q\1h\0h\1X\3\0\0\0hex\x86R" * 60 + b"s.",
    # a key that has 2^60 parts
    "a key": b"\x80\x02}K\0\x85" + b"q\0h\0\x86" * 60 + b"Ns.",
    # the same for labels: a list of twice a list of twice a list ...
    "labels": pickle.dumps(ONE | {"labels": functools.reduce(lambda part, _: [part, part], range(60), [0])}),
}  # fmt: skip


@pytest.mark.parametrize("what", LARGE_PICKLES)
def test_a_small_batch_takes_little_memory_and_time(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder)
    (folder / "data_batch_3").write_bytes(LARGE_PICKLES[what])
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="data_batch_3 is not a CIFAR batch"):
            load("cifar10", data_dir=tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_batch_cannot_run_code(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder)

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": Evil(), "labels": []}, protocol=2))
    with pytest.raises(BadInput, match="data_batch_3 is not a CIFAR batch: it asks for"):
        load("cifar10", data_dir=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_incomplete_and_broken_batches_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder)
    (folder / "data_batch_5").write_bytes(pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [1, 2]}, 2))
    with pytest.raises(BadInput, match=r"\[n, 3072\] is expected"):
        load("cifar10", data_dir=tmp_path)
    (folder / "data_batch_5").unlink()
    with pytest.raises(BadInput, match="lacks data_batch_5"):
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
    Image.new("RGB", (31, 32)).save(tmp_path / "cifar10" / "train" / "cat" / "0001.jpg")
    with pytest.raises(BadInput, match="31 x 32 pixels"):
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


def test_a_tar_of_batches_and_a_broken_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = write_batches(tmp_path / "elsewhere" / "cifar-10-batches-py")
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
    with pytest.raises(BadInput, match="holds no train/<class>/ images"):
        load("cifar10", data_dir=tmp_path)


def test_cifar100_by_its_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar100" / "cifar-100-python"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(6)
    made = {}
    for part, count in (("train", 5), ("test", 3)):
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        fine = rng.integers(0, 100, count).tolist()
        made[part] = {"data": pixels, "fine_labels": fine, "coarse_labels": [0] * count}
        (folder / part).write_bytes(pickle.dumps(made[part], protocol=2))
    assert is_at_hand("cifar100", data_dir=tmp_path)
    assert not is_at_hand("cifar10", data_dir=tmp_path)
    data = load("cifar100", data_dir=tmp_path)
    assert (data.input_shape, data.classes, data.class_names[9]) == ((3, 32, 32), 100, "bottle")
    assert data.train.y.tolist() == made["train"]["fine_labels"]
    assert data.test.images[2].tobytes() == made["test"]["data"][2].tobytes()
    # the archive as it is distributed, which is not one of CIFAR-10
    archive = tmp_path / "packed" / "cifar-100-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname="cifar-100-python")
    assert load("cifar100", data_dir=archive.parent).test.y.tolist() == made["test"]["fine_labels"]
    assert not is_at_hand("cifar10", data_dir=archive.parent)
    (folder / "test").unlink()
    with pytest.raises(BadInput, match="lacks test of cifar100"):
        load("cifar100", data_dir=tmp_path)


def test_svhn_from_matlab_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    (tmp_path / "svhn").mkdir()
    images = rng.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    labels = np.array([[1], [10], [9], [10]], dtype=np.uint8)
    for part in ("train", "test"):
        savemat(tmp_path / "svhn" / f"{part}_32x32.mat", {"X": images, "y": labels})
    data = load("svhn", data_dir=tmp_path)
    assert data.train.y.tolist() == [1, 0, 9, 0]  # the files call zero ten
    assert data.train.images[2, 1, 30, 7] == images[30, 7, 1, 2]
    savemat(tmp_path / "svhn" / "test_32x32.mat", {"X": images[:, :, :, :3], "y": labels})
    with pytest.raises(BadInput, match=r"uint8 \[32, 32, 3, n\] is expected"):
        load("svhn", data_dir=tmp_path)
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"nothing of the kind" * 20)
    with pytest.raises(BadInput, match="cannot be read as SVHN"):
        load("svhn", data_dir=tmp_path)


def test_a_set_that_is_not_there_says_what_was_looked_for(tmp_path: Path) -> None:
    for name in set_names():
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
    from hushfleet.data.download import import_torchvision

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
        "from hushfleet.data.download import import_torchvision\n"
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
