"""Small questions that several sections ask of a result."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.aggregator.results.result import Result


def rounds_of(result: Result) -> list[int]:
    """The numbers of the rounds: the x axis of most charts."""
    return [row.round for row in result.rounds]


def any_measured(values: Sequence[float | None]) -> bool:
    """Whether there is anything to draw."""
    return any(value is not None for value in values)


def from_to(ordered: Sequence[int]) -> str:
    """`160`, or `100 to 200`, for sorted counts."""
    if not ordered:
        return "none"
    low, high = ordered[0], ordered[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def whole_percent(value: float) -> str:
    """A fraction as a percentage, three figures, without the sign."""
    return f"{100 * value:.3g}"
