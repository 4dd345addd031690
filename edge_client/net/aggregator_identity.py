"""Which aggregator a device listens to, and which of its messages are of today.

The key is that of the configuration, or the first one that the device meets; it is pinned in the store before anything
that it signed is believed. So is the newest start (epoch) of that key: what names an older one was recorded in an
earlier run and published again. Within an epoch the rounds of a task go forwards only.
"""

from __future__ import annotations

import logging

from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadSignature, Malformed, Replayed, StoreError
from hushfleet.wire.format.messages import Known, Message, RoundPlan, ServerState, TaskNotice, decode_message

_PHASES = {"open": 0, "closed": 1, "finished": 2}

_log = logging.getLogger("hushfleet.edge")


class Trust:
    """:param configured: the aggregator's public key from the device's file, or None."""

    def __init__(self, store: DeviceStore, configured: bytes | None, *, federation: str) -> None:
        self._store = store
        self._federation = federation
        self._newest: Known | RoundPlan | None = None
        self.key = configured or store.server_key
        self.epoch = self._pinned_epoch()

    def verified(self, payload: bytes) -> Message:
        """The message, if the trusted aggregator signed it and it is no older than what came. Raises a `WireError`."""
        if self.key is None:
            raise BadSignature("the aggregator's key is not known yet")
        message = decode_message(payload, federation=self._federation, public_key=self.key)
        if isinstance(message, ServerState | TaskNotice | RoundPlan | Known):
            self._check_epoch(message)
        if isinstance(message, RoundPlan):
            self._check_order(message)
        return message

    def meet(self, payload: bytes) -> ServerState:
        """The aggregator's announcement; the first key is pinned. Raises a `WireError` or `StoreError`."""
        state = decode_message(payload, federation=self._federation)
        if not isinstance(state, ServerState):
            raise Malformed(f"a {type(state).__name__} came where the aggregator's state belongs")
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

    def reach(self, known: Known) -> None:
        """The aggregator is at least as far as it says in an answer that was made for this process."""
        if not self._is_behind(known):
            self._newest = known

    def _check_order(self, plan: RoundPlan) -> None:
        if self._is_behind(plan):
            raise Replayed(
                f"a plan of round {plan.round} ({plan.phase}) of {plan.task} came again; "
                f"the aggregator is at round {self._newest.round} ({self._newest.phase}) by now"
            )
        self._newest = plan

    def _is_behind(self, place: RoundPlan | Known) -> bool:
        last = self._newest
        same_run = last is not None and (last.epoch, last.task) == (place.epoch, place.task)
        return same_run and _place(place) < _place(last)

    def _check_epoch(self, message: ServerState | TaskNotice | RoundPlan | Known) -> None:
        if message.epoch < self.epoch:
            raise Replayed(
                f"a {type(message).__name__} of the aggregator's start {message.epoch}"
                f"{_named(message)} came again; the newest start that this device knows is {self.epoch}. "
                "If the aggregator is new and has lost its counter, write a higher number into its file KEY.epoch"
            )
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            try:
                self._store.pin_epoch(self._scope, message.epoch)
            except StoreError as error:  # it holds for this process all the same
                _log.error("%s", error)

    def _pinned_epoch(self) -> int:
        return 0 if self.key is None else self._store.epoch(self._scope)

    @property
    def _scope(self) -> str:
        return f"{self._federation}/{self.key.hex()}"


def _place(plan: RoundPlan | Known) -> tuple[int, int]:
    return plan.round, _PHASES[plan.phase]


def _named(message: ServerState | TaskNotice | RoundPlan | Known) -> str:
    task, round_number = getattr(message, "task", None), getattr(message, "round", None)
    if task is None:
        return ""
    return f" ({task})" if round_number is None else f" ({task}, round {round_number})"
