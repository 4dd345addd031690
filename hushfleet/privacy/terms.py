"""The terms of a privacy guarantee: what is protected, whom a device must trust, and how epsilon is computed."""

from __future__ import annotations

from typing import Literal

Unit = Literal["device", "record"]
Accounting = Literal["as-published", "strict", "secure"]
Accountant = Literal["exact", "rdp"]
TrustModel = Literal["local", "secure-sum", "as-published"]
TRUST: dict[Accounting, TrustModel] = {"strict": "local", "secure": "secure-sum", "as-published": "as-published"}
"""Names for whom a device must trust: nobody; enough of the other devices; or as the paper assumes."""
AS_PUBLISHED = (
    'accounting = "as-published" repeats a paper: against the server, which sees each update, epsilon may be many '
    'times what the task asks for, or infinite; "strict" keeps it'
)
"""The line that a run of such a task prints at its start."""
HONEST_FRACTION, MIN_DEVICES = 0.9, 10
"""Defaults of secure aggregation: the assumed share of honest boards, and the smallest number of boards in a sum."""
