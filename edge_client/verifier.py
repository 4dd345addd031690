"""Decides which aggregator a device listens to, and which of its messages are current.

The key comes from the configuration, or is the first one that the device meets; it is pinned in the store before the
device trusts any message with it. The newest start (epoch) of that key is pinned too: a message that names an older
epoch was recorded in an earlier run and published again. Within an epoch the rounds of a task only go forward, though
an open round may rest.
"""

from __future__ import annotations

import logging

from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadSignature, Malformed, Replayed, StoreError
from hushfleet.wire.format.messages import Known, Message, RoundPlan, ServerState, TaskNotice, decode_message

_PHASES = {"closed": 0, "open": 0, "unmask": 1, "finished": 2}

_log = logging.getLogger("hushfleet.edge")


class MessageVerifier:
    """Decodes the aggregator's messages, and rejects messages of others and replayed messages.

    :param configured: the aggregator's public key from the device's file, or None.
    """

    def __init__(self, store: DeviceStore, configured: bytes | None, *, federation: str) -> None:
        self._store = store
        self._federation = federation
        self._newest: Known | RoundPlan | None = None
        self.key = configured or store.server_key
        self.epoch = self._pinned_epoch()

    def verify(self, payload: bytes) -> Message:
        """Decodes a message; it must come from the pinned aggregator and be no replay. Raises a `WireError`."""
        if self.key is None:
            raise BadSignature("the aggregator's key is not known yet")
        message = decode_message(payload, federation=self._federation, public_key=self.key)
        if isinstance(message, ServerState | TaskNotice | RoundPlan | Known):
            self._check_epoch(message)
        if isinstance(message, RoundPlan):
            if self._newest is not None and _is_before(message, self._newest):
                raise Replayed(
                    f"a plan of round {message.round} ({message.phase}) of {message.task} came again; "
                    f"the aggregator is at round {self._newest.round} ({self._newest.phase}) by now"
                )
            self._newest = message
        return message

    def verify_server_state(self, payload: bytes) -> ServerState:
        """Decodes the aggregator's announcement, and pins the first key. Raises a `WireError` or `StoreError`."""
        state = decode_message(payload, federation=self._federation)
        if not isinstance(state, ServerState):
            raise Malformed(f"expected the aggregator's state, got a {type(state).__name__}")
        if self.key is None:
            self._store.pin_server_key(state.public_key)
            self.key = state.public_key
            self.epoch = self._pinned_epoch()
            _log.info("this device now trusts the aggregator %s", state.public_key.hex())
        elif state.public_key != self.key:
            raise BadSignature(
                f"an aggregator with the key {state.public_key.hex()} is there, but this device trusts only "
                f"{self.key.hex()}. If the aggregator was replaced, set broker.server_key in the device's file"
            )
        self._check_epoch(state)
        return state

    def note_progress(self, known: Known) -> None:
        """Notes that the aggregator is at least at the round and phase of its answer to this process."""
        if self._newest is None or not _is_before(known, self._newest):
            self._newest = known

    def is_ahead_of(self, plan: RoundPlan) -> bool:
        """Returns whether the aggregator has reported a later place than this plan."""
        return self._newest is not None and _is_before(plan, self._newest)

    def _check_epoch(self, message: ServerState | TaskNotice | RoundPlan | Known) -> None:
        if message.epoch < self.epoch:
            about = [getattr(message, "task", None), f"round {message.round}" if hasattr(message, "round") else None]
            named = ", ".join(filter(None, about))
            raise Replayed(
                f"a {type(message).__name__} of the aggregator's start {message.epoch}"
                f"{named and f' ({named})'} came again; the newest start that this device knows is {self.epoch}. "
                "If the aggregator is new and has lost its counter, write a higher number into its file KEY.epoch"
            )
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            try:
                self._store.pin_epoch(self._scope, message.epoch)
            except StoreError as error:  # the epoch still holds for this process
                _log.error("%s", error)

    def _pinned_epoch(self) -> int:
        return 0 if self.key is None else self._store.epoch(self._scope)

    @property
    def _scope(self) -> str:
        return f"{self._federation}/{'' if self.key is None else self.key.hex()}"


def _is_before(one: RoundPlan | Known, other: RoundPlan | Known) -> bool:
    """Returns whether `one` comes from an earlier time of the same run; False for another run or task."""
    same_run = (one.epoch, one.task) == (other.epoch, other.task)
    return same_run and _place(one) < _place(other)


def _place(plan: RoundPlan | Known) -> tuple[int, int]:
    """Returns the place of a plan in its run. A closed round has the same place as the next open round, because a round
    that rests is closed for a while."""
    return plan.round + (plan.phase in ("closed", "finished")), _PHASES[plan.phase]
