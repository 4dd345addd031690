"""The first starts of a new release: it proves itself before it touches the store or takes part in a round.

It tests itself, connects as the board, and says so for some minutes in STATE/healthy, which `slots.py check` counts.
Only when that has made the release good does it bring the store up to date and train; until then the former release can
go on with the store as it is. Who does not get so far is taken back by `slots.py`, whatever happens in here.
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
from hushfleet.edge_client.fleet.self_test import drop_copy, self_test
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import LinkLost
from hushfleet.wire.format.messages import encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link, LinkDown, LinkUp

BEAT_S = 10.0
LONGEST_SLEEP_S = 1.0

_log = logging.getLogger("hushfleet.edge")


def prove(
    config: DeviceConfig,
    connect: Callable[[DeviceStore], Link],
    stop: threading.Event,
    supervisor: Supervisor,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether this client may go on: its release is good, or nothing is on trial. Raises `HushfleetError`.

    :param connect: makes a link for the device of this store.
    """
    installed, state_dir = Installed.of(config), Path(config.device.state_dir)
    state = installed.state()
    if state is None or not state.trial or not state.starts:
        drop_copy(state_dir)  # of a trial that was killed
        return True
    trial = state.trial
    _log.info("release %s is on trial: start %d", trial, state.starts)
    copy = self_test(state_dir, config.store_path, device=config.device.id)
    supervisor.ready()
    try:
        reachable = TlsIdentity(state_dir, device=config.device.id).is_usable() or config.broker.cert_file is not None
        if copy is None or not (copy.is_enrolled and reachable):
            return _wait(installed, trial, stop, supervisor, None, clock)  # it has nobody to connect to yet
        link = connect(copy)
        link.open()
        try:
            return _wait(installed, trial, stop, supervisor, (link, _health(config, copy, clock())), clock)
        finally:
            link.close()
    finally:
        if copy is not None:
            copy.close()
        drop_copy(state_dir)


def _wait(
    installed: Installed,
    trial: str,
    stop: threading.Event,
    supervisor: Supervisor,
    online: tuple[Link, Callable[[float], tuple[str, bytes]]] | None,
    clock: Callable[[], float],
) -> bool:
    """Until `slots.py` has decided, or `stop` is set.

    :param online: the link, and what is published on it; None where there is nobody to connect to.
    """
    up, beat_at = online is None, clock()
    while not stop.is_set():
        supervisor.alive()
        event = None
        if online is None:
            stop.wait(LONGEST_SLEEP_S)
        else:
            event = online[0].receive(LONGEST_SLEEP_S)
        if isinstance(event, LinkUp | LinkDown):
            up = isinstance(event, LinkUp)
            _log.info("connected" if up else "the connection was lost")
            beat_at = clock()
        if up and clock() >= beat_at:
            beat_at = clock() + BEAT_S
            installed.say_healthy(trial)
            if online is not None:
                topic, payload = online[1](clock())
                try:
                    online[0].publish(topic, payload, retain=True)
                except LinkLost:
                    up = False
        state = installed.state()
        if state is None or state.trial != trial:
            good = state is not None and state.good == trial
            _log.info("release %s %s", trial, "has proved itself" if good else "was taken back")
            return good
    return False


def _health(config: DeviceConfig, store: DeviceStore, now: float) -> Callable[[float], tuple[str, bytes]]:
    """Makes what is published of a board whose release is on trial: topic and frame."""
    topics, health = Topics(config.device.federation), BoardHealth(config, now=now)

    def said(now: float) -> tuple[str, bytes]:
        message = health.message(now, session=store.last_session, hushed=True)
        frame = encode_message(message, store.identity, federation=topics.federation)
        return topics.health(config.device.id), frame

    return said
