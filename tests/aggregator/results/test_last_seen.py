"""When a device was last heard: by its own words, and not by what a broker repeats of it."""

from __future__ import annotations

from typing import Any

from hushfleet.aggregator.results.fleet_state import FleetState, SeenDevice


def activity(*events: dict[str, Any]) -> SeenDevice:
    state = FleetState()
    for at, event in enumerate(events):
        state.apply({"at": 100.0 * at, "device": "one", **event})
    return state.devices["one"]


def presence(state: str) -> dict[str, Any]:
    return {"event": "presence", "state": state, "board": "pi-4"}


def test_a_message_is_heard_and_the_brokers_word_is_not() -> None:
    assert activity(presence("ready"), presence("training")).last_seen == 100.0
    assert activity(presence("ready"), {"event": "offer", "round": 1}).last_seen == 100.0
    assert activity(presence("ready"), presence("sleeping")).last_seen == 100.0, "it says so before it disconnects"
    assert activity(presence("ready"), presence("lost")).last_seen == 0.0


def test_a_start_of_the_aggregator_is_no_sign_of_a_device_that_is_away() -> None:
    for gone in ("lost", "sleeping"):
        before = activity(presence("ready"), presence(gone)).last_seen
        assert activity(presence("ready"), presence(gone), presence(gone)).last_seen == before
        assert activity(presence(gone)).last_seen is None, "it was away before this run"
    assert activity(presence("ready"), presence("lost"), presence("ready")).last_seen == 200.0
