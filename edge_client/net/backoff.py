"""How long to wait for an answer before asking again: doubling, and anew after any progress."""

from __future__ import annotations


class Patience:
    """:param first_s: the first wait; :param longest_s: waits double up to it. Monotonic seconds throughout."""

    def __init__(self, first_s: float, longest_s: float, *, now: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.reset(now, wait=False)

    def reset(self, now: float, *, wait: bool) -> None:
        """There was progress; due after the first wait, or at once without `wait`."""
        self._wait_s = self._first_s
        self.due_at = now + self._first_s if wait else now

    def tried(self, now: float) -> None:
        """It was asked for at `now`."""
        self.due_at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._longest_s)
