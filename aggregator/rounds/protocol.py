"""The states of the aggregator's rounds, as a table. `hushfleet.aggregator.rounds.cycle` finds the events.

docs/architecture.md shows it as a diagram; `tests/chaos` counts rows that no storm has reached.
"""

from __future__ import annotations

from hushfleet.state_table import Row, StateTable

BETWEEN, COLLECTING, RESTING, UNMASKING, ENDED = "between", "collecting", "resting", "unmasking", "ended"

ROUNDS = StateTable(
    (
        Row(BETWEEN, "enough devices", "open", COLLECTING),
        Row(BETWEEN, "no round may follow", "end", ENDED),
        Row(COLLECTING, "paused", "rest", RESTING),
        Row(COLLECTING, "window ends", "stop_waiting", COLLECTING),
        Row(COLLECTING, "too few at the end of the window", "rest", RESTING),
        Row(COLLECTING, "too few at the deadline", "extend", COLLECTING),
        Row(COLLECTING, "devices of the sum are fixed", "ask_members", UNMASKING),
        Row(COLLECTING, "over", "close", BETWEEN),
        Row(RESTING, "may go on", "go_on", COLLECTING),
        Row(RESTING, "no round may follow", "end", ENDED),
        Row(UNMASKING, "too few at the deadline", "extend", UNMASKING),
        Row(UNMASKING, "over", "close", BETWEEN),
    )
)
