"""Fetches public data sets with torchvision into the user's data folder, when nobody says where they are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hushfleet.errors import BadInput

ORIGINS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "emnist": "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    "svhn": "http://ufldl.stanford.edu/housenumbers/",
}
"""Where torchvision takes each set from; named in the message for a machine without a network."""
_CLASSES = {
    "mnist": "MNIST", "fashion-mnist": "FashionMNIST", "emnist": "EMNIST",
    "cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN",
}  # fmt: skip


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
        make = getattr(datasets, _CLASSES[name])
        if name == "svhn":
            for split in ("train", "test"):
                make(str(folder / "svhn"), split=split, download=True)
        else:
            make(str(folder), download=True, **({"split": "letters"} if name == "emnist" else {}))
    except (OSError, RuntimeError, ImportError) as error:
        raise BadInput(f"{name} could not be downloaded ({error}); {by_hand}") from error


_declared: list[Any] = []  # keeps the library alive: its declarations vanish with it


def import_torchvision() -> ModuleType:
    """The `torchvision` package, also beside a PyTorch that it was not built for. Raises ImportError.

    The wheel on PyPI has CUDA operators. Beside a PyTorch without CUDA its native library does not load, and the import
    fails with "operator torchvision::nms does not exist". Only the data sets are used here, so it is enough to declare
    the two operators first.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    import torch

    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]
    if not _declared:
        make: Any = torch.library.Library  # has no types
        library = make("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return importlib.import_module("torchvision")
