"""Runs the fast engine's workers on a Ray cluster: several machines, with the run folder on a shared file system.

A node, a worker or this process may die at any moment: a repeated job computes the same, because each device's
randomness is derived from its number and the round, and a device's store answers for a round that it has committed.

Ray does not distribute the code. The bits also depend on the versions of numpy, onnxruntime and torch and on the
processor's vector units. So each worker compares its `fingerprint` with the sender's and refuses to work if it differs.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.methods import allowed_file
from hushfleet.simulator.engines.fast.workers import ENVIRONMENT, Item, Outcome
from hushfleet.simulator.engines.ray.fingerprint import differences, fingerprint

RETRIES = 5  # for a job whose worker or node died
AHEAD = 4  # jobs for each core that are passed to Ray before the first of them is done
_REACH_S = 10.0
_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # Ray tries for a quarter of an hour otherwise


class RayWorkers:
    """`Workers` on a Ray cluster. A process can have one at a time.

    :param count: number of jobs at a time, each with one core; 0 means all cores.
    :param address: `host:port` of a cluster's head, or `auto` for the cluster of this machine; empty starts a Ray only
        for this process, which no other process can join.
    :param object_store_bytes: size of the object store of such an own Ray; by default Ray chooses.

    Raises `BadInput` if ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, count: int = 0, *, address: str = "", object_store_bytes: int | None = None) -> None:
        self._wanted = count
        self._ray = _import_ray(local=not address)
        _join(self._ray, count, address, object_store_bytes)
        self._work = self._ray.remote(num_cpus=1, max_retries=RETRIES)(work)
        self.count = self._count()

    def map(self, function: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
        """Yields outcomes in the order of the items. An item's `path`, if any, is a folder that the nodes must see.

        Jobs whose outcomes are not read run to their end, or until this process leaves the cluster. They are not
        cancelled: that can abort the process if a job ends at the same moment (ray-project/ray#54798, still in 2.60).

        Raises the errors of `function`, and `HushfleetError` for a job that died in all `RETRIES` retries too.
        """
        self.count = self._count()
        # Ray queues jobs beyond its cores; with fewer workers than cores, it must not get more jobs than workers.
        most = self.count if self.count < self._cores() else AHEAD * self.count
        under_way: deque[Any] = deque()
        for item in items:
            expected = fingerprint(compiled=getattr(item, "runtime", None) == "native")
            under_way.append(self._work.remote(function, item, expected))
            if len(under_way) == most:
                yield self._get(under_way.popleft())
        while under_way:
            yield self._get(under_way.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the own Ray, or leaves the cluster."""
        self._ray.shutdown()

    def _get(self, reference: Any) -> Any:
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

    def _cores(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def _count(self) -> int:
        cores = self._cores()
        return max(1, min(self._wanted or cores, cores))


# on a node


def work(function: Callable[[Any], Any], item: Any, expected: dict[str, str]) -> Any:
    """Does one job. Raises `BadInput` on a node that would compute other bits or does not see the run folder.

    :param expected: the sender's `fingerprint`.
    """
    _one_thread()
    unlike = differences(expected, fingerprint(compiled="compiler" in expected))
    if unlike:
        raise BadInput(
            f"the Ray node {platform.node()} would not compute the same bits: it has {'; '.join(unlike)}. Install the "
            "same versions on all nodes (pip install --no-deps -r constraints.txt), or leave it out of the cluster"
        )
    path: Path | None = getattr(item, "path", None)
    if path is not None and not path.is_dir():
        raise BadInput(f"the Ray node {platform.node()} does not see {path}: give an --out that all nodes share")
    return function(item)


@lru_cache(maxsize=1)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# the cluster


def _import_ray(*, local: bool) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:
        # Ray listens on all interfaces and runs any code that it receives: it needs a token. Its import reads these.
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
    """Raises `BadInput` if nothing listens at the address: Ray would try for minutes."""
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
