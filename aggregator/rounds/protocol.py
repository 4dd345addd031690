"""The states of the aggregator's rounds, as a table. `hushfleet.aggregator.rounds.cycle` finds the events.

docs/architecture.md shows it as a diagram; `tests/chaos` counts rows that no storm has reached.
"""

from __future__ import annotations

from hushfleet.state_table import StateTable, Transition

BETWEEN, COLLECTING, RESTING, UNMASKING, ENDED = "between", "collecting", "resting", "unmasking", "ended"

ROUNDS = StateTable(
    (
        Transition(BETWEEN, "enough devices", "open", COLLECTING),
        Transition(BETWEEN, "no round may follow", "end", ENDED),
        Transition(COLLECTING, "paused", "rest", RESTING),
        Transition(COLLECTING, "window ends", "stop_waiting", COLLECTING),
        Transition(COLLECTING, "too few at the end of the window", "rest", RESTING),
        Transition(COLLECTING, "too few at the deadline", "extend", COLLECTING),
        Transition(COLLECTING, "devices of the sum are fixed", "ask_members", UNMASKING),
        Transition(COLLECTING, "over", "close", BETWEEN),
        Transition(RESTING, "may go on", "go_on", COLLECTING),
        Transition(RESTING, "no round may follow", "end", ENDED),
        Transition(UNMASKING, "too few at the deadline", "extend", UNMASKING),
        Transition(UNMASKING, "over", "close", BETWEEN),
    )
)
