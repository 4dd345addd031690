"""Leaves out, in forecasts of large fleets, work that is the same for all boards or that no result depends on.

It is the only place that knows of it: agents, coordinator and stores are unchanged. FOR SIMULATION ONLY, because
nothing is signed. The bytes of messages and updates keep their sizes.

- Signatures are zeros, and none is checked.
- A message or a task package that many boards get is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from hushfleet.aggregator.devices import enrolment
from hushfleet.aggregator.rounds import coordinator
from hushfleet.config.spec import TaskSpec
from hushfleet.edge_client.net import verifier
from hushfleet.wire.format import messages, update
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity

_KEPT = 4096


@contextmanager
def short_cuts() -> Iterator[None]:
    """Takes the short-cuts for as long as the context is open, in this whole process."""
    decode = lru_cache(_KEPT)(_decoded)
    replaced: list[tuple[Any, str, Any]] = [
        (Identity, "sign", lambda self, data: bytes(SIGNATURE_BYTES)),
        (TaskSpec, "from_bytes", staticmethod(lru_cache(16)(TaskSpec.from_bytes))),
        *((module, "verify", lambda key, data, signature: None) for module in (messages, update)),
        *((module, "decode_message", decode) for module in (verifier, enrolment, coordinator)),
    ]
    patches = [patch.object(*each) for each in replaced]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def _decoded(data: bytes, *, federation: str, public_key: bytes | None = None) -> messages.Message:
    return messages.decode_message(data, federation=federation, public_key=public_key)
