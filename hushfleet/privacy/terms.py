"""The words of a promise: what is protected, whom a device must trust, and how epsilon is computed."""

from __future__ import annotations

from typing import Literal

Unit = Literal["device", "record"]
Accounting = Literal["as-published", "strict", "secure"]
Accountant = Literal["exact", "rdp"]
Trust = Literal["local", "secure-sum", "as-published"]
TRUST: dict[Accounting, Trust] = {"strict": "local", "secure": "secure-sum", "as-published": "as-published"}
"""Whom a device must trust, in words for people: nobody; enough of the other devices; or as the paper has it."""
HONEST_FRACTION, MIN_DEVICES = 0.9, 10
"""Of secure sums, where nobody says otherwise: which share of the boards is honest, and the fewest in a sum."""
