"""Fetches public data sets with torchvision into the user's data folder, when nobody says where they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hushfleet.data.torchvision_shim import import_torchvision
from hushfleet.errors import BadInput
from hushfleet.user_files import user_cache_dir as user_cache_dir
from hushfleet.user_files import user_data_dir as user_data_dir

ORIGINS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "emnist": "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    "svhn": "http://ufldl.stanford.edu/housenumbers/",
}
"""Where torchvision takes each set from; named in the message for a machine without a network."""


def download(name: str, folder: Path, *, looked_for: str) -> None:
    """Downloads one set into `folder`, where `sets.load` then finds it.

    :raises BadInput: torchvision is missing, or the download failed; says what to fetch by hand and where
        to put it.
    """
    by_hand = (
        f"fetch it on another machine from {ORIGINS[name]} and put it into {folder}, or name its folder with "
        f"--data-dir: {looked_for}"
    )
    try:
        datasets: Any = import_torchvision().datasets
    except ImportError as error:
        raise BadInput(
            f"{name} is not here, and downloading it needs torchvision, which does not import ({error}); "
            f"pip install torchvision, or {by_hand}"
        ) from error
    print(f"downloading {name} from {ORIGINS[name]} to {folder}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if name == "mnist":
            datasets.MNIST(str(folder), download=True)
        elif name == "fashion-mnist":
            datasets.FashionMNIST(str(folder), download=True)
        elif name == "emnist":
            datasets.EMNIST(str(folder), split="letters", download=True)
        elif name == "cifar10":
            datasets.CIFAR10(str(folder), download=True)
        elif name == "cifar100":
            datasets.CIFAR100(str(folder), download=True)
        else:
            for split in ("train", "test"):
                datasets.SVHN(str(folder / "svhn"), split=split, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        raise BadInput(f"{name} could not be downloaded ({error}); {by_hand}") from error
