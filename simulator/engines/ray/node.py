"""A job of the fast engine on a node of a Ray cluster that does not have the run folder.

The worker process keeps a scratch folder that looks like the run folder to the job. Files that never change stay
there from job to job; what belongs to a device comes and goes with its job, so any node may die at any moment.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.errors import BadInput
from hushfleet.simulator.engines.fast.fingerprint import differences, fingerprint
from hushfleet.simulator.engines.fast.job_files import moved, whole

KEPT_BYTES = 512 << 20  # of files that never change, for each worker process
_PREFIX = "hushfleet-ray-"
_LOCK = "lock"


class Version(NamedTuple):
    """Tells a file from another one that has taken its name."""

    inode: int
    changed_ns: int
    size: int


@dataclass(frozen=True)
class Luggage:
    """What stands beside a job's bytes: where they belong.

    :param crew: who sent it; scratch folders are named after it. :param run: which run folder it is from.
    :param inputs: (path in the run folder, version), in the order of the bytes.
    :param stores: paths in the run folder; `stores_at_hand` of them, the first ones, come with bytes.
    :param expected: the sender's `fingerprint`.
    """

    crew: str
    run: str
    inputs: tuple[tuple[str, Version], ...] = ()
    stores: tuple[str, ...] = ()
    stores_at_hand: tuple[bool, ...] = ()
    appended: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)


class Brought(NamedTuple):
    """What a job brings back.

    :param stores: each uint8 `[bytes]`. :param appended: what is to be added to each file.
    """

    outcome: Any
    stores: tuple[np.ndarray, ...]
    appended: tuple[bytes, ...]


def work(function: Callable[[Any], Any], item: Any, luggage: Luggage, *data: np.ndarray) -> Brought:
    """Does one job. Raises `BadInput` on a node that would compute other bits, and whatever `function` raises.

    :param data: uint8 `[bytes]` each: the inputs', then those of the stores that exist.
    """
    _begin()
    unlike = differences(luggage.expected, fingerprint(compiled="compiler" in luggage.expected))
    if unlike:
        raise BadInput(
            f"the Ray node {platform.node()} would not compute the same bits: it has {'; '.join(unlike)}. Install the "
            "same versions on all nodes (pip install -c constraints.txt), or leave the node out of the cluster"
        )
    if not luggage.run:
        return Brought(function(item), (), ())
    scratch = _scratch(luggage.crew)
    folder = scratch.folder(luggage.run)
    scratch.unpack(folder, luggage.inputs, data[: len(luggage.inputs)])
    stores = [folder / name for name in luggage.stores]
    appended = [folder / name for name in luggage.appended]
    own = [*stores, *appended]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
    at_hand = [store for store, there in zip(stores, luggage.stores_at_hand, strict=True) if there]
    for store, content in zip(at_hand, data[len(luggage.inputs) :], strict=True):
        _write(store, content)
    try:
        outcome = function(moved(item, folder))
        for store in stores:
            whole(store)
        return Brought(
            outcome,
            tuple(np.fromfile(store, np.uint8) for store in stores),
            tuple(path.read_bytes() if path.exists() else b"" for path in appended),
        )
    finally:
        _remove(own)


def remove_scratch(crew: str) -> None:
    """Deletes what a crew's workers have left on this machine; none of them may be at work."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{crew}-*"):
        shutil.rmtree(root, ignore_errors=True)


class Scratch:
    """A worker process's folder, locked as long as the process lives; those of dead processes are removed."""

    def __init__(self, crew: str, *, kept_bytes: int = KEPT_BYTES) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        self.root, self._fd = _locked_folder(parent, crew)
        self.kept_bytes = kept_bytes
        self._kept: OrderedDict[Path, Version] = OrderedDict()

    def folder(self, run: str) -> Path:
        return self.root / run

    def unpack(self, folder: Path, inputs: Sequence[tuple[str, Version]], data: Sequence[np.ndarray]) -> None:
        """Afterwards all `inputs` are there; older ones make room."""
        for (name, version), content in zip(inputs, data, strict=True):
            path = folder / name
            if self._kept.get(path) != version:
                _write(path, content)
            self._kept[path] = version
            self._kept.move_to_end(path)
        spare = sum(version.size for version in self._kept.values()) - self.kept_bytes
        for path in list(self._kept)[: len(self._kept) - len(inputs)]:
            if spare <= 0:
                break
            spare -= self._kept.pop(path).size
            path.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _scratch(crew: str) -> Scratch:
    return Scratch(crew)


@lru_cache(maxsize=1)
def _begin() -> None:
    import torch

    torch.set_num_threads(1)


def _locked_folder(parent: Path, crew: str) -> tuple[Path, int]:
    while True:
        root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{crew}-", dir=parent))
        fd = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return root, fd
        os.close(fd)  # another worker's sweep came between making the lock and taking it


def _sweep(parent: Path) -> None:
    """The kernel releases the lock of a process after any death."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # at work
        finally:
            os.close(fd)


def _write(path: Path, content: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(memoryview(content))


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink()
