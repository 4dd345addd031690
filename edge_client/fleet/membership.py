"""Runs a board of a fleet: gets a certificate first, then runs the agent, as often as needed."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import WaitingNote
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.fleet.newest import News
from hushfleet.edge_client.fleet.renewal import AskAgain, Renewal
from hushfleet.edge_client.fleet.second_place import SecondPlace
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.fleet.updates import ReleaseDuty, RestartForRelease
from hushfleet.edge_client.storage.state_files import WAITING
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link

if TYPE_CHECKING:
    from hushfleet.edge_client.fleet import enrol
else:
    enrol = at_need("hushfleet.edge_client.fleet.enrol")

PATIENCE_S = 60.0  # for a new certificate if the current one may still be valid

_log = logging.getLogger("hushfleet.edge")


def run_in_fleet(
    config: DeviceConfig,
    store: DeviceStore,
    run_agent: Callable[[Sequence[Duty], BoardHealth], None],
    connect: Callable[[], Link],
    stop: threading.Event,
    supervisor: Supervisor,
) -> None:
    """Runs until `stop` is set, or another release waits for its first start.

    :param run_agent: runs the agent with these duties and this report of health until `stop` is set, or a duty ends it.
    :param connect: makes a link to the address that answers boards without a certificate.
    """
    assert config.fleet is not None
    tls = TlsIdentity(Path(config.device.state_dir), device=config.device.id)
    topics, doubt = Topics(config.device.federation), False
    supervisor.ready()  # the answer may take days
    second = SecondPlace(config.fleet, store, now=time.monotonic())
    second.check()
    while not stop.is_set():
        gc.collect()  # an agent's parts refer to each other, so its images and graphs would stay in memory
        usable = store.is_enrolled and tls.is_usable()
        if doubt or not usable:
            if not usable:
                _log.info("asking %s for a certificate", config.enrolment_address)
            patience_s = PATIENCE_S if usable else math.inf
            asking = enrol.CertificateRequest(config, store, tls)
            note = WaitingNote(config.store_path.with_name(WAITING), {}, clock=time.monotonic)
            enrol.enrol(
                asking,
                connect,
                topics,
                config.device.id,
                stop,
                alive=supervisor.alive,
                waits_for=note.is_,
                patience_s=patience_s,
            )
        updates, news = ReleaseDuty(config, store, now=time.monotonic()), News(config)
        try:
            if not stop.is_set():
                duties = [Renewal(config, store, tls), news, updates, second]
                run_agent(duties, BoardHealth(config, now=time.monotonic()))
        except AskAgain as reason:
            _log.warning("%s; asking for a certificate where boards without one do", reason)
            doubt = True
        except RestartForRelease as reason:
            _log.info("%s", reason)
            return
        finally:
            updates.close()
            news.close()
