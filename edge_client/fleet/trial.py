"""Runs the first starts of a new release: it must pass a trial before it changes the store or takes part in a round.

The release tests itself, connects as the board, and writes STATE/healthy for some minutes. `slots.py check` counts this
and makes the release good. After that, the release upgrades the store and trains. Until then, the former release can
still use the unchanged store. If the new release does not get so far, `slots.py` goes back to the former one.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from hushfleet.apart import apart
from hushfleet.at_need import NAMED
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.storage.state_files import TRIAL_STORE
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.storage.store_file import is_there, way_on
from hushfleet.errors import HushfleetError, LinkLost, StoreError
from hushfleet.wire.format.messages import encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link, LinkDown, LinkUp

BEAT_S = 1.0
# Mean squared error of x @ w against y, and its gradient, as an ONNX graph
# (`tests/edge_client/fleet/test_release_check.py` makes it).
_GRAPH = (
    "eNp9kLtOw0AQRT32Yq8vkERDgNRbIOEiH5AOU7sB0aTzY2Uh4gdeWwn5Gv6O38DrIEGFNM087rkzIyU7my8Xt6ADgjbt0mq9Z2qVn6R9Muxs44Op"
    "V+IxNX0Uwu2bFX2SixmoBfVMnfKeh8zm3RhMRnlWeAcyLHaNMQpPuhhynei0juaQb1q3xWtlVo7l3Fid19SaKVfhS23eB62P2vIOoJypOvHuQRXE"
    "UXcNU/k/8gpUjsF+2aXFeq+8h6IYRdGFpEWwIYqtXXR5ypx4gm6vf88HpCQWcKW7XY5r8BzjMIfwmOKpurBfOUcoAz6bqtkM063sQ4yjTrbEj/tf"
    "WizgLPgbh7BIbw=="
)
_PARTS = (
    "agent",
    "worker.trainer",
    "worker.predict",
    "fleet.membership",
    "fleet.enrol",
    "fleet.updates",
    "fleet.release_file",
)

_log = logging.getLogger("hushfleet.edge")


def prove(
    config: DeviceConfig, connect: Callable[[DeviceStore], Link], stop: threading.Event, supervisor: Supervisor
) -> bool:
    """Returns whether this client may continue: its release is good, or nothing is on trial. Raises `HushfleetError`.

    :param connect: makes a link for the device of this store.
    """
    installed, state_dir = Installed.of(config), Path(config.device.state_dir)
    state = installed.state()
    if state is None or not state.trial or not state.starts:
        drop_copy(state_dir)  # left by a trial that was killed
        return True
    trial = state.trial
    _log.info("release %s is on trial: start %d", trial, state.starts)
    copy = check_release(state_dir, config.store_path, device=config.device.id)
    supervisor.ready()
    online: _Online | None = None
    try:
        known = TlsIdentity(state_dir, device=config.device.id).is_usable() or config.broker.cert_file is not None
        if copy is not None and copy.is_enrolled and known:  # otherwise there is no broker to connect to yet
            online = _Online(config, copy, connect(copy))
        while not stop.is_set():
            supervisor.alive()
            if online is None:
                stop.wait(BEAT_S)
            if online is None or online.step(BEAT_S):
                installed.say_healthy(trial)
            state = installed.state()
            if state is None or state.trial != trial:
                good = state is not None and state.good == trial
                _log.info("release %s %s", trial, "has proved itself" if good else "was taken back")
                return good
        return False
    finally:
        if online is not None:
            online.close()
        if copy is not None:
            copy.close()
        drop_copy(state_dir)


class _Online:
    """The board's connection while its release is on trial: it sends the board's health, and nothing else.

    :param store: a copy of the store, with the board's key.
    """

    def __init__(self, config: DeviceConfig, store: DeviceStore, link: Link) -> None:
        self._store, self._link = store, link
        self._federation = config.device.federation
        self._topic = Topics(self._federation).health(config.device.id)
        self._health = BoardHealth(config, now=time.monotonic())
        self._up = False
        link.open()

    def step(self, longest_s: float) -> bool:
        """Waits for an event, and sends the health if it is due. Returns whether the board is connected."""
        event = self._link.receive(longest_s)
        if isinstance(event, LinkUp | LinkDown):
            self._up = isinstance(event, LinkUp)
            _log.info("connected" if self._up else "the connection was lost")
        now = time.monotonic()
        if self._up and now >= self._health.due_at:
            message = self._health.message(now, session=self._store.last_session, hides_duration=True)
            frame = encode_message(message, self._store.identity, federation=self._federation)
            try:
                self._link.publish(self._topic, frame, retain=True)
            except LinkLost:
                self._up = False
        return self._up

    def close(self) -> None:
        self._link.close()


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
    for module in sorted(NAMED):
        importlib.import_module(module)
    _compute()


def _compute() -> None:
    import numpy as np

    from hushfleet.learning.graph_safety import check_graph
    from hushfleet.learning.graph_session import GradientGraph
    from hushfleet.params import ParamLayout

    graph = zlib.decompress(base64.b64decode(_GRAPH))
    check_graph(graph, max_bytes=4096)
    gradient = GradientGraph(graph, ParamLayout(("w",), ((2,),)))
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 1, 0, 1])
    w = np.array([0.5, -0.25], np.float32)
    loss, slope = gradient(w, x, y)
    error = x @ w - y
    expected = np.mean(error**2), 2 * np.mean(x * error[:, None], axis=0)
    if not (np.isclose(loss, expected[0], rtol=1e-5) and np.allclose(slope, expected[1], rtol=1e-5)):
        raise HushfleetError(f"ONNX Runtime computes {loss:g}, {slope} in place of {expected[0]:g}, {expected[1]}")


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
