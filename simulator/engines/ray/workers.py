"""The fast engine's workers on a Ray cluster: more than one machine, without a file system in common.

The run folder stays where the simulation was started. A job's files travel with it: what never changes goes through
Ray's object store, and a device's store goes there and back. The store is written here, whole, before the update is
handed to the aggregator. So a node, a worker or this process may die at any moment: a job that is done again computes
the same, as each device's randomness is keyed by its number and the round.

Ray does not ship the code. The bits also depend on the versions of numpy, onnxruntime and torch and on the
processor's vector units. So every worker compares its `fingerprint` with ours and refuses to work where it differs.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import shutil
import socket
import sqlite3
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from hushfleet.errors import BadInput, HushfleetError, StoreError
from hushfleet.methods import allowed_file
from hushfleet.simulator.engines.fast.jobs import JobFiles
from hushfleet.simulator.engines.fast.workers import ENVIRONMENT, Item, Outcome
from hushfleet.simulator.engines.ray.fingerprint import differences, fingerprint

RETRIES = 5  # of a job whose worker or node died
AHEAD = 4  # jobs that are handed to Ray before the first of them is done, for each core
SMALL_BYTES = 64 << 10  # goes with the job itself; larger files are stored once
_REACH_S = 10.0
_BESIDE = ("-journal", "-wal", "-shm")
_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # Ray tries for a quarter of an hour otherwise


class Changes(NamedTuple):
    """What a job sends back. :param store: uint8 `[bytes]`, or None; :param log: what is to be added."""

    outcome: Any
    store: np.ndarray | None = None
    log: bytes = b""


class RayWorkers:
    """`Workers` on a Ray cluster. One for a process at a time.

    An item of `map` that has `files` (`JobFiles`, below its `path`) takes them along; others are handed over as they
    are.

    :param count: how many jobs at a time, each with one core; 0 takes all cores.
    :param address: `host:port` of a cluster's head, or `auto` for the one that this machine belongs to; empty starts
        a Ray of this process alone, which nobody else can join.
    :param object_store_bytes: of a Ray of our own; by default what Ray thinks fit.

    Raises `BadInput` where ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, count: int = 0, *, address: str = "", object_store_bytes: int | None = None) -> None:
        self._wanted = count
        self._ray = _import_ray(local=not address)
        _join(self._ray, count, address, object_store_bytes)
        self._work = self._ray.remote(num_cpus=1, max_retries=RETRIES)(work)
        # Ray writes to disk what does not fit into its memory.
        self._stored = lru_cache(maxsize=1 << 14)(lambda path, version: self._ray.put(_read(path)))
        self.count = self._count()

    def map(self, function: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
        """Outcomes in the order of the items; what a job changed in files is written before its outcome is given.

        Raises what `function` raises, and `HushfleetError` for a job that died `RETRIES` times more.
        """
        self.count = self._count()
        # Ray keeps the others waiting, except where somebody else is to have the rest of the cluster.
        most = self.count if self.count < self._cores() else AHEAD * self.count
        under_way: deque[tuple[Any, JobFiles]] = deque()
        try:
            for item in items:
                under_way.append(self._sent(function, item))
                if len(under_way) == most:
                    yield self._received(*under_way.popleft())
            while under_way:
                yield self._received(*under_way.popleft())
        finally:
            if self._ray.is_initialized():
                for reference, _ in under_way:
                    self._ray.cancel(reference)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends a Ray of our own, or leaves the cluster."""
        self._ray.shutdown()

    def _sent(self, function: Callable[[Any], Any], item: Any) -> tuple[Any, JobFiles]:
        expected = fingerprint(compiled=getattr(item, "runtime", None) == "native")
        files: JobFiles | None = getattr(item, "files", None)
        if files is None:
            return self._work.remote(function, item, expected), JobFiles(())
        store = None if files.store is None else read_store(files.store)
        names = [path.relative_to(item.path) for path in files.inputs]
        inputs = [self._input(path) for path in files.inputs]
        return self._work.remote(function, item, expected, store, names, *inputs), files

    def _input(self, path: Path) -> Any:
        about = path.stat()
        if about.st_size <= SMALL_BYTES:
            return _read(path)
        return self._stored(path, (about.st_ino, about.st_mtime_ns, about.st_size))

    def _received(self, reference: Any, files: JobFiles) -> Any:
        changes = self._get(reference)
        # Lines first: if this process dies in between, the round is done again, and its last line counts.
        if files.log is not None:
            files.log.parent.mkdir(parents=True, exist_ok=True)
            with files.log.open("ab") as file:
                file.write(changes.log)
        if files.store is not None and changes.store is not None:
            replace_store(files.store, changes.store)
        return changes.outcome

    def _get(self, reference: Any) -> Changes:
        errors = self._ray.exceptions
        try:
            changes: Changes = self._ray.get(reference)
            return changes
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception) and not isinstance(error.cause, errors.RayError):
                raise error.cause from None
            raise HushfleetError(f"a Ray worker could not do its job: {error}") from error
        except errors.RayError as error:
            raise HushfleetError(
                f"a job was lost {RETRIES + 1} times with the Ray worker that did it ({type(error).__name__}); if "
                f"nobody killed it, its node lacks memory: give fewer --workers. Ray says: {error}"
            ) from error

    def _cores(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def _count(self) -> int:
        cores = self._cores()
        return max(1, min(self._wanted or cores, cores))


# on a node


def work(
    function: Callable[[Any], Any],
    item: Any,
    expected: dict[str, str],
    store: np.ndarray | None = None,
    names: Iterable[Path] | None = None,
    *inputs: np.ndarray,
) -> Changes:
    """Does one job. Raises `BadInput` on a node that would compute other bits, and whatever `function` raises.

    :param expected: the sender's `fingerprint`.
    :param store: the device's store, uint8 `[bytes]`, where it has one.
    :param names: of the inputs, below the run folder; None for a job without files.
    """
    _one_thread()
    unlike = differences(expected, fingerprint(compiled="compiler" in expected))
    if unlike:
        raise BadInput(
            f"the Ray node {platform.node()} would not compute the same bits: it has {'; '.join(unlike)}. Install the "
            "same versions on all nodes (pip install -c constraints.txt), or leave the node out of the cluster"
        )
    if names is None:
        return Changes(function(item))
    # One folder for each process and run: what is loaded of a run is kept in memory under its path (`loaded_run`).
    key = "".join(character if character.isalnum() else "-" for character in str(item.path))
    folder = Path(tempfile.gettempdir()) / f"hushfleet-ray-{os.getpid()}" / key[-150:]
    shutil.rmtree(folder.parent, ignore_errors=True)  # of a dead process that had the same number
    try:
        for name, content in zip(names, inputs, strict=True):
            _write(folder / name, content)
        item = _moved(item, folder)
        files: JobFiles = item.files
        for path in (files.store, files.log):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if files.store is not None and store is not None:
            _write(files.store, store)
        outcome = function(item)
        return Changes(
            outcome,
            None if files.store is None else read_store(files.store),
            files.log.read_bytes() if files.log is not None and files.log.exists() else b"",
        )
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


@lru_cache(maxsize=1)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _moved(job: Any, folder: Path) -> Any:
    """The same job in another run folder; a job may stand around another one."""
    if hasattr(job, "job"):
        return replace(job, job=_moved(job.job, folder))
    return replace(job, path=folder)


# files


def read_store(store: Path) -> np.ndarray | None:
    """The whole SQLite file, with what a killed process has left in a journal or a log; None where there is no file.

    Nobody else may have it open. Raises `StoreError` where the file is damaged, or gone while its log is there.
    """
    beside = [store.with_name(store.name + suffix) for suffix in _BESIDE]
    if not store.exists():
        if any(path.exists() for path in beside):
            raise StoreError(f"{store} is gone, but its log is still there; put the store back, or begin a new run")
        return None
    try:
        with closing(sqlite3.connect(store, isolation_level=None, timeout=1.0)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # rolls back a cut transaction
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"the store {store} is damaged or not readable: {error}") from error
    for path in beside:
        path.unlink(missing_ok=True)  # what journal_mode = PERSIST leaves of a finished transaction
    return _read(store)


def replace_store(store: Path, content: np.ndarray) -> None:
    """The file holds all of `content`, or what it held before. For its owner only: it holds a private key."""
    part = store.with_name(store.name + ".part")
    part.unlink(missing_ok=True)
    with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(content.data)
    os.replace(part, store)


def _read(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)


def _write(path: Path, content: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.data)


# the cluster


def _import_ray(*, local: bool) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:
        # Ray listens on all interfaces and runs what it is sent; and it reads this when it is imported.
        guard = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if local else _JOINING
        for name, value in guard.items():
            os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise BadInput(f"the engine ray needs the package {error.name!r}: pip install 'hushfleet[ray]'") from error
    return ray


def _join(ray: Any, count: int, address: str, object_store_bytes: int | None) -> None:
    if ray.is_initialized():
        raise BadInput("this process is part of a Ray cluster already; close those workers first")
    options: dict[str, Any] = {"address": address}
    if address:
        _check_address(address)
    else:
        cores = count or len(os.sched_getaffinity(0))
        memory = {} if object_store_bytes is None else {"object_store_memory": object_store_bytes}
        options = {"address": "local", "include_dashboard": False, "num_cpus": cores, **memory}
    try:
        environment = {"env_vars": ENVIRONMENT | allowed_file()}
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, runtime_env=environment, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()
        if not address:
            raise HushfleetError(f"Ray does not start on this machine: {error}") from error
        raise BadInput(_unreachable(address, error)) from error


def _check_address(address: str) -> None:
    """Raises `BadInput` where nobody listens: Ray would try for minutes."""
    if "://" in address:
        raise BadInput(
            f"--ray-address {address!r}: give HOST:PORT of the head node, or auto, from a node of the cluster"
        )
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        except (OSError, ValueError) as error:
            raise BadInput(_unreachable(address, error)) from error


def _unreachable(address: str, error: Exception) -> str:
    if "uthentication" in f"{error} {error.__cause__}":
        return (
            f"the Ray cluster at {address!r} asks for its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what "
            "`ray get-auth-token` prints on its head node"
        )
    return (
        f"no Ray cluster can be joined at {address!r}: {error}. Start one by `ray start --head` there and `ray start "
        "--address HOST:PORT` on this machine and the others; without --ray-address, this machine's cores are used"
    )
