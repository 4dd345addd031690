"""The fast engine's workers on a Ray cluster: more than one machine, without a file system in common.

The run folder stays where the simulation was started. A job's files travel with it: what never changes through
Ray's object store, once for each node, and a device's store there and back. The store is written here, whole, before
the update is handed to the aggregator, so a node, a worker or this process may die at any moment: a job that is done
again computes the same, as each device's randomness is keyed by its number and the round.

Ray does not ship the code. The bits also depend on the versions of numpy, onnxruntime and torch and on the
processor's vector units, which no code can bring along; so every worker compares its `fingerprint` with ours and
refuses to work where it differs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from hushfleet.edge_client.storage.store_file import StoreLock
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.methods import allowed_file
from hushfleet.simulator.engines.fast.fingerprint import fingerprint
from hushfleet.simulator.engines.fast.job_files import JobFiles, replace_file, travels, whole
from hushfleet.simulator.engines.fast.workers import ENVIRONMENT, Item, Outcome
from hushfleet.simulator.engines.ray.node import Brought, Luggage, Version, remove_scratch, work

COMPILED = "native"  # the runtime that each node compiles for itself
RETRIES = 5  # of a job whose worker or node died
REACH_S = 10.0
CLEANING_S = 20.0
SMALL_BYTES = 64 << 10  # goes with the job itself; Ray stores each larger one on its own
UNDELIVERED = 8  # finished jobs that wait for an earlier one, for each worker

_END = object()
_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # Ray tries for a quarter of an hour otherwise


@dataclass(eq=False)
class _Flight:
    """A job that is under way."""

    item: Any
    files: JobFiles
    locks: list[StoreLock] = field(default_factory=list)
    landed: bool = False
    outcome: Any = None
    failure: Exception | None = None

    def release(self) -> None:
        while self.locks:
            self.locks.pop().release()


class RayCrew:
    """`Workers` on a Ray cluster. One for a process at a time.

    Items of `map` that are a `TravellingJob` bring their files along; others are handed over as they are.

    :param count: how many jobs at a time, each with one core; 0 takes all cores.
    :param address: `host:port` of a cluster's head, or `auto` for the one that this machine belongs to; empty starts
        a Ray of this process alone, which nobody else can join.
    :param object_store_bytes: of a Ray of our own; by default what Ray thinks fit.

    Raises `BadInput` where ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, count: int = 0, *, address: str = "", object_store_bytes: int | None = None) -> None:
        self._local = not address
        self._name = secrets.token_hex(4)
        self._wanted = count
        self._ray = _import_ray(local=self._local)
        self._join(count, address, object_store_bytes)
        self._open = True
        self._work = self._ray.remote(num_cpus=1, max_retries=RETRIES)(work)
        self._kept: OrderedDict[Path, tuple[Version, Any]] = OrderedDict()
        self._kept_bytes, self._room_bytes = 0, self._object_store_bytes() // 2
        self.count = self._count()

    def map(self, function: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
        """Outcomes in the order of the items, as they become ready; what they changed in files is then written.

        Raises what `function` raises, and `HushfleetError` for a job that died `RETRIES` times more.
        """
        self.count = self._count()
        source, under_way, flying = iter(items), deque[_Flight](), dict[Any, _Flight]()
        # A job in reserve for each worker, except where others are to have the rest of the cluster.
        most = self.count if self.count < self._cores() else 2 * self.count
        more = True
        try:
            while True:
                while more and len(flying) < most and len(under_way) < UNDELIVERED * self.count:
                    item = next(source, _END)
                    more = item is not _END
                    if more:
                        under_way.append(self._packed(item))
                        flying[self._launch(function, under_way[-1])] = under_way[-1]
                if not under_way:
                    return
                for reference in self._ready(list(flying), wait=not under_way[0].landed):
                    self._land(reference, flying.pop(reference))
                if under_way[0].landed:
                    first = under_way.popleft()
                    if first.failure is not None:
                        raise first.failure
                    yield first.outcome
        finally:
            for flight in under_way:
                flight.release()
            if self._open:
                for reference in flying:
                    self._ray.cancel(reference)

    def close(self) -> None:
        """Ends a Ray of our own, or leaves the cluster; nothing of the run stays on any node."""
        if not self._open:
            return
        self._open = False
        if not self._local:
            self._clean_nodes()
        self._ray.shutdown()
        if self._local:
            remove_scratch(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the way out and back

    def _packed(self, item: Any) -> _Flight:
        files = item.files if travels(item) else JobFiles()
        flight = _Flight(item, files)
        try:
            for store in files.stores:
                store.parent.mkdir(parents=True, exist_ok=True)
                flight.locks.append(StoreLock(store))
                whole(store)
        except BaseException:
            flight.release()
            raise
        return flight

    def _launch(self, function: Callable[[Any], Any], flight: _Flight) -> Any:
        item, files = flight.item, flight.files
        if not travels(item):
            return self._work.remote(function, item, Luggage(self._name, "", expected=_expected(item)))

        def names(paths: Iterable[Path]) -> tuple[str, ...]:
            return tuple(path.relative_to(item.path).as_posix() for path in paths)

        versions = tuple(_version(path) for path in files.inputs)
        at_hand = tuple(store.exists() for store in files.stores)
        luggage = Luggage(
            crew=self._name,
            run=hashlib.sha256(bytes(item.path.absolute())).hexdigest()[:16],
            inputs=tuple(zip(names(files.inputs), versions, strict=True)),
            stores=names(files.stores),
            stores_at_hand=at_hand,
            appended=names(files.appended),
            expected=_expected(item),
        )
        data = [self._input(path, version) for path, version in zip(files.inputs, versions, strict=True)]
        data += [_read(store) for store, there in zip(files.stores, at_hand, strict=True) if there]
        return self._work.remote(function, item, luggage, *data)

    def _input(self, path: Path, version: Version) -> Any:
        """The file's bytes, or what stands for them in the object store, where they are put once."""
        if version.size <= SMALL_BYTES:
            return _read(path)
        known, reference = self._kept.pop(path, (None, None))
        if known != version:
            self._kept_bytes += version.size - (known.size if known else 0)
            reference = self._ray.put(_read(path))
        self._kept[path] = version, reference
        while self._kept_bytes > self._room_bytes and len(self._kept) > 1:
            _, (old, _) = self._kept.popitem(last=False)
            self._kept_bytes -= old.size
        return reference

    def _ready(self, flying: list[Any], *, wait: bool) -> list[Any]:
        if not flying:
            return []
        ready, _ = self._ray.wait(flying, num_returns=1 if wait else len(flying), timeout=None if wait else 0)
        return ready

    def _land(self, reference: Any, flight: _Flight) -> None:
        try:
            brought = self._get(reference)
        except Exception as failure:  # whatever a job raises is raised in its turn, after the outcomes before it
            flight.release()
            flight.landed, flight.failure = True, failure
            return
        # Lines first: if this process dies in between, the round is done again, and its last line counts.
        for path, lines in zip(flight.files.appended, brought.appended, strict=True):
            with path.open("ab") as file:
                file.write(lines)
        for store, content in zip(flight.files.stores, brought.stores, strict=True):
            replace_file(store, memoryview(content))
        flight.release()
        flight.landed, flight.outcome = True, brought.outcome

    def _get(self, reference: Any) -> Brought:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception) and not isinstance(error.cause, errors.RayError):
                raise error.cause from None
            raise HushfleetError(f"a Ray worker could not do its job: {error}") from error
        except errors.RayError as error:
            raise HushfleetError(
                f"a job was lost {RETRIES + 1} times with the Ray worker that did it ({type(error).__name__}); if "
                f"nobody killed it, its node lacks memory: give fewer --workers. Ray says: {error}"
            ) from error

    # the cluster

    def _join(self, count: int, address: str, object_store_bytes: int | None) -> None:
        if self._ray.is_initialized():
            raise BadInput("this process is part of a Ray cluster already; close that crew first")
        options: dict[str, Any] = {"address": "local", "include_dashboard": False}
        if self._local:
            options["num_cpus"] = count or len(os.sched_getaffinity(0))
            options["object_store_memory"] = object_store_bytes
        else:
            _check_address(address)
            options = {"address": address}
        try:
            self._ray.init(
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                runtime_env={"env_vars": ENVIRONMENT | allowed_file()},
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self._ray.shutdown()
            if self._local:
                raise HushfleetError(f"Ray does not start on this machine: {error}") from error
            raise BadInput(_unreachable(address, error)) from error

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _cores(self) -> int:
        return int(sum(node["Resources"].get("CPU", 0) for node in self._nodes()))

    def _count(self) -> int:
        cores = self._cores()
        return max(1, min(self._wanted or cores, cores))

    def _object_store_bytes(self) -> int:
        return int(min(node["Resources"].get("object_store_memory", 0) for node in self._nodes()))

    def _clean_nodes(self) -> None:
        on_node = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        clean = self._ray.remote(num_cpus=0, max_retries=0)(remove_scratch)
        with suppress(self._ray.exceptions.RayError):  # a dead node is swept when it works for anybody again
            cleaned = [
                clean.options(scheduling_strategy=on_node(node["NodeID"], soft=False)).remote(self._name)
                for node in self._nodes()
            ]
            self._ray.wait(cleaned, num_returns=len(cleaned), timeout=CLEANING_S)


def _import_ray(*, local: bool) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:
        # Ray listens on all interfaces and runs what it is sent; and it reads this when it is imported.
        guard = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if local else _JOINING
        for name, value in guard.items():
            os.environ.setdefault(name, value)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise BadInput(f"the engine ray needs the package {error.name!r}: pip install 'hushfleet[ray]'") from error
    return ray


def _check_address(address: str) -> None:
    """Raises `BadInput` where nobody listens: Ray would try for minutes."""
    if "://" in address:
        raise BadInput(
            f"--ray-address {address!r}: give HOST:PORT of the head node, or auto, from a node of the cluster"
        )
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    if address and address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
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


def _expected(item: Any) -> Mapping[str, str]:
    return fingerprint(compiled=getattr(item, "runtime", None) == COMPILED)


def _version(path: Path) -> Version:
    about = path.stat()
    return Version(about.st_ino, about.st_mtime_ns, about.st_size)


def _read(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)
