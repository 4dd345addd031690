"""Runs the first starts of a new release: it must pass a trial before it changes the store or takes part in a round.

The release tests itself, connects as the board, and writes STATE/healthy for some minutes. `slots.py check` counts this
and makes the release good. After that, the release upgrades the store and trains. Until then, the former release can
still use the unchanged store. If the new release does not get so far, `slots.py` goes back to the former one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.fleet.release_check import check_release, drop_copy
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import LinkLost
from hushfleet.wire.format.messages import encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link, LinkDown, LinkUp

BEAT_S = 1.0

_log = logging.getLogger("hushfleet.edge")


def prove(
    config: DeviceConfig,
    connect: Callable[[DeviceStore], Link],
    stop: threading.Event,
    supervisor: Supervisor,
    *,
    clock: Callable[[], float] = time.monotonic,
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
            online = _Online(config, copy, connect(copy), clock)
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

    def __init__(self, config: DeviceConfig, store: DeviceStore, link: Link, clock: Callable[[], float]) -> None:
        self._store, self._link, self._clock = store, link, clock
        self._federation = config.device.federation
        self._topic = Topics(self._federation).health(config.device.id)
        self._health = BoardHealth(config, now=clock())
        self._up = False
        link.open()

    def step(self, longest_s: float) -> bool:
        """Waits for an event, and sends the health if it is due. Returns whether the board is connected."""
        event = self._link.receive(longest_s)
        if isinstance(event, LinkUp | LinkDown):
            self._up = isinstance(event, LinkUp)
            _log.info("connected" if self._up else "the connection was lost")
        now = self._clock()
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
