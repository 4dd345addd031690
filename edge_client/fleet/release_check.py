"""Tests a release before it may use the store: imports modules, computes a gradient, and reads a copy of the store."""

from __future__ import annotations

import base64
import contextlib
import importlib
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

from hushfleet.apart import apart
from hushfleet.edge_client.state_files import TRIAL_STORE
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.storage.store_file import is_there, way_on
from hushfleet.errors import HushfleetError, StoreError
from hushfleet.params import ParamLayout

# Mean squared error of x @ w against y, and its gradient, as an ONNX graph
# (`tests/edge_client/fleet/test_release_check.py` makes it).
_GRAPH = (
    "eNp9kLtOw0AQRT32Yq8vkERDgNRbIOEiH5AOU7sB0aTzY2Uh4gdeWwn5Gv6O38DrIEGFNM087rkzIyU7my8Xt6ADgjbt0mq9Z2qVn6R9Muxs44Op"
    "V+IxNX0Uwu2bFX2SixmoBfVMnfKeh8zm3RhMRnlWeAcyLHaNMQpPuhhynei0juaQb1q3xWtlVo7l3Fid19SaKVfhS23eB62P2vIOoJypOvHuQRXE"
    "UXcNU/k/8gpUjsF+2aXFeq+8h6IYRdGFpEWwIYqtXXR5ypx4gm6vf88HpCQWcKW7XY5r8BzjMIfwmOKpurBfOUcoAz6bqtkM063sQ4yjTrbEj/tf"
    "WizgLPgbh7BIbw=="
)
_PARTS = ("agent", "trainer", "predict", "fleet.membership", "fleet.updates")


class ReleaseCheckFailed(HushfleetError):
    """This release does not work on this board."""


def check_release(folder: Path, store_path: Path, *, device: str) -> DeviceStore | None:
    """Tests the release. Returns a copy of the device's store that this release has upgraded; None if there is no
    store yet.

    The caller closes the copy and then calls `drop_copy`. Raises `HushfleetError`.

    :param folder: for the copy; the device's state directory.
    """
    apart(f"{__name__}:check_software")
    return _read_store(folder, store_path, device=device)


def drop_copy(folder: Path) -> None:
    """Deletes the copy, which must never be used as a store."""
    for path in folder.glob(f"{TRIAL_STORE}*"):
        path.unlink(missing_ok=True)


def check_software() -> None:
    """Imports all parts of the release and computes a gradient. Raises `ReleaseCheckFailed`, or what an import does."""
    for part in _PARTS:
        importlib.import_module(f"hushfleet.edge_client.{part}")
    _compute()


def _compute() -> None:
    import numpy as np

    from hushfleet.graphs.safety import check_graph
    from hushfleet.graphs.session import GradientGraph

    graph = zlib.decompress(base64.b64decode(_GRAPH))
    check_graph(graph, max_bytes=4096)
    gradient = GradientGraph(graph, ParamLayout(("w",), ((2,),)))
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 1, 0, 1])
    w = np.array([0.5, -0.25], np.float32)
    loss, slope = gradient(w, x, y)
    error = x @ w - y
    expected = np.mean(error**2), 2 * np.mean(x * error[:, None], axis=0)
    if not (np.isclose(loss, expected[0], rtol=1e-5) and np.allclose(slope, expected[1], rtol=1e-5)):
        raise ReleaseCheckFailed(f"ONNX Runtime computes {loss:g}, {slope} in place of {expected[0]:g}, {expected[1]}")


def _read_store(folder: Path, store_path: Path, *, device: str) -> DeviceStore | None:
    drop_copy(folder)
    if not is_there(store_path, way_on=way_on(store_path, device=device, in_fleet=True)):
        return None
    copy = folder / TRIAL_STORE
    try:
        copy.touch(mode=0o600)
        with closing(sqlite3.connect(store_path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        return DeviceStore(copy, device=device, durable=False)
    except (sqlite3.Error, OSError) as error:
        with contextlib.suppress(OSError):
            drop_copy(folder)
        raise StoreError(f"the store {store_path} cannot be read by this release: {error}") from error
