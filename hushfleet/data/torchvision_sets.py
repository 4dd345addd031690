"""Uses torchvision to download public data sets into the user's data folder, and to read CIFAR and SVHN.

CIFAR is distributed as Python pickles, which can run code. torchvision compares the MD5 sum of each file with the
published MD5 sum before it opens a file.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hushfleet.errors import BadInput
from hushfleet.output import unescaped

ImageArray = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Arrays = tuple[ImageArray, Labels, ImageArray, Labels]
"""Training images uint8 `[n, C, H, W]` and labels int64 `[n]`, then images and labels of the test part."""


class TorchvisionSet(NamedTuple):
    """A data set that torchvision downloads.

    :param kind: the name of torchvision's class.
    :param origin: the address from which torchvision downloads it.
    """

    name: str
    kind: str
    origin: str


_PARTS = ("train", "test")


def download(wanted: TorchvisionSet, folder: Path, *, looked_for: str) -> None:
    """Downloads one set into `folder`, where `sets.load` then finds it.

    :raises BadInput: torchvision is missing, or the download failed; says what to fetch by hand and where to put it.
    """
    name, _, origin = wanted
    by_hand = (
        f"fetch it on another machine from {origin} and put it into {folder}, or name its folder with "
        f"--data-dir: {looked_for}"
    )
    print(f"downloading {name} from {origin} to {folder}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stderr(unescaped(sys.stderr)):  # for its progress bar
            if name in ("mnist", "fashion-mnist"):
                _set(wanted)(str(folder), download=True)
            elif name == "emnist":
                _set(wanted)(str(folder), split="letters", download=True)
            else:
                _parts(wanted, folder / "svhn" if name == "svhn" else folder, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        raise BadInput(f"{name} could not be downloaded ({error}); {by_hand}") from error


def read(wanted: TorchvisionSet, folder: Path) -> Arrays:
    """Reads CIFAR-10, CIFAR-100 or SVHN from a folder that has torchvision's layout.

    :raises BadInput: a file is missing or differs from the published one, or torchvision or scipy is not installed.
    """
    try:
        train, test = _parts(wanted, folder)
    except (OSError, RuntimeError, ImportError) as error:
        name, _, origin = wanted
        raise BadInput(f"{name} in {folder} cannot be read ({error}); fetch it again from {origin}") from error
    return (*_arrays(train), *_arrays(test))


def _set(wanted: TorchvisionSet) -> Any:
    return getattr(import_torchvision().datasets, wanted.kind)


def _parts(wanted: TorchvisionSet, folder: Path, **how: bool) -> list[Any]:
    splits: list[dict[str, Any]] = [
        {"split": part} if wanted.name == "svhn" else {"train": part == "train"} for part in _PARTS
    ]
    return [_set(wanted)(str(folder), **split, **how) for split in splits]


def _arrays(part: Any) -> tuple[ImageArray, Labels]:
    is_svhn = hasattr(part, "labels")  # channels first
    images = part.data if is_svhn else part.data.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images), np.array(part.labels if is_svhn else part.targets, np.int64)


_declared: list[Any] = []  # keeps the library alive: otherwise its declarations are lost


def import_torchvision() -> ModuleType:
    """Imports the `torchvision` package, even if it was built for another PyTorch. Raises ImportError.

    The wheel on PyPI has CUDA operators. With a PyTorch without CUDA its native library does not load, and the import
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
