"""Turns errors into public reasons why a device declines a round, which reveal nothing about its data.

The text of an arbitrary error may name the owner's files or the number of samples. Therefore only texts that depend
only on the task and on limits go over the wire; all others stay in the local log.
"""

from __future__ import annotations

import errno
import logging
import re
from typing import NamedTuple

from hushfleet.errors import BadInput, BudgetExceeded, GraphRefused, HushfleetError, PrivacyError, StoreError
from hushfleet.wire.format.fields import DeclineCode

_log = logging.getLogger("hushfleet.edge")

# Native code reports a lack of memory only in its error text: ONNX Runtime while it loads or runs a graph, the
# dynamic linker, and Python if it cannot start a thread.
_NO_MEMORY = re.compile(
    r"bad_alloc|failed to allocate memory|cannot allocate memory|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


class DeclineReason(NamedTuple):
    """The code and the reason of a `Decline`; both are public."""

    code: DeclineCode
    reason: str


class Declined(Exception):
    """Ends a round in which this device will not take part, for a reason that may be public."""

    def __init__(self, code: DeclineCode, reason: str) -> None:
        super().__init__(reason)
        self.reason = DeclineReason(code, reason)


def decline_reason(error: Exception) -> DeclineReason:
    """Returns the public form of an error; logs its own text locally, with a traceback if it is unexpected."""
    if ran_out_of_memory(error):
        _log.error("out of memory: %s", error)
        return DeclineReason("memory", "this device ran out of memory")
    match error:
        case Declined():
            return error.reason
        case BudgetExceeded():  # its text names epsilons, which do not depend on data
            return DeclineReason("budget", str(error))
        case GraphRefused():  # the text of ONNX Runtime may contain a label or a pixel
            public = DeclineReason("graph", "the task's graph fails on this device")
        case StoreError():
            public = DeclineReason("disk", "the device's store cannot be read or written")
        case BadInput():
            public = DeclineReason("no-data", "this device has no data that fit the task")
        case PrivacyError():
            public = DeclineReason("no-privacy", "the round's privacy would not hold on this device")
        case _:
            _log.error("an unexpected error", exc_info=error)
            return DeclineReason("error", "something unexpected failed on this device; see its log")
    _log.error("%s", error)
    return public


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether a lack of memory is the cause, directly or through other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if not isinstance(cause, HushfleetError | Declined) and _NO_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
