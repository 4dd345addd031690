"""Refuses to start an old copy of an aggregator, such as after a move to another machine, if the broker reveals it.

The broker retains the newest start of the key that devices have pinned. A copy that knows only earlier starts is
outdated. Its own start would be newer than all others, and devices would follow it.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hushfleet.errors import BadInput, WireError
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import ServerState, decode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery, Link, LinkDown, LinkUp

CONNECTS_IN_S = 5.0
ANSWERS_IN_S = 1.0
"""A broker sends retained messages immediately. It may retain none: Mosquitto forgets them when it is restarted."""


def refuse_older_copy(link: Link, identity: Identity, *, federation: str, last: int, counter: Path) -> None:
    """Raises `BadInput` if the broker retains a later start of this key than the last one here.

    :param link: a new link, which this function opens and closes.
    :param last: the number of the last start, from the file `counter`.
    """
    link.subscribe(Topics(federation).server)
    link.open()
    state, give_up = None, time.monotonic() + CONNECTS_IN_S
    with contextlib.closing(link), contextlib.suppress(WireError):
        while (left_s := give_up - time.monotonic()) > 0:
            event = link.receive(left_s)
            if isinstance(event, LinkUp):
                give_up = time.monotonic() + ANSWERS_IN_S
            elif isinstance(event, Delivery):
                state = decode_message(event.payload, federation=federation, public_key=identity.public_key)
            if isinstance(event, Delivery | LinkDown):
                break
    if isinstance(state, ServerState) and state.epoch > last:
        raise BadInput(
            f"this is an old copy: the broker has heard start {state.epoch} of this aggregator, and {counter} has "
            f"{last}. If the aggregator has moved, leave this one off. If this is a backup that takes its place, make "
            f"sure that the other one never starts again, and write {state.epoch} into {counter}; what boards have "
            "spent since the backup is then known to their own ledgers alone"
        )
