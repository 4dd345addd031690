"""Why a device declines a round, in words that reveal nothing about its data.

The text of an arbitrary error may name the owner's files or the number of samples. So only texts that depend on the
task and on limits alone go over the wire; the rest stays in the local log.
"""

from __future__ import annotations

import errno
import logging
import re
from typing import NamedTuple

from hushfleet.errors import BadInput, BudgetExceeded, GraphRefused, HushfleetError, PrivacyError, StoreError
from hushfleet.wire.format.fields import DeclineCode

_log = logging.getLogger("hushfleet.edge")

# Native code says in words that it got no memory: ONNX Runtime while it loads a graph and while it runs one, the
# dynamic linker, and Python where it cannot start a thread.
_NO_MEMORY = re.compile(
    r"bad_alloc|failed to allocate memory|cannot allocate memory|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


class DeclineReason(NamedTuple):
    """The code and the reason of a `Decline`; both are public."""

    code: DeclineCode
    reason: str


class Declined(Exception):
    """This device will not take part, for a reason that may be public."""

    def __init__(self, code: DeclineCode, reason: str) -> None:
        super().__init__(reason)
        self.reason = DeclineReason(code, reason)


class GivenUp(Exception):
    """Training is given up on purpose, whatever the data are; nothing was spent."""


def decline_reason(error: Exception) -> DeclineReason:
    """The public form of an error; its own text goes to the local log, unexpected ones with a traceback."""
    if ran_out_of_memory(error):
        _log.error("out of memory: %s", error)
        return DeclineReason("memory", "this device ran out of memory")
    match error:
        case Declined():
            return error.reason
        case BudgetExceeded():  # speaks of epsilons, which do not depend on data
            return DeclineReason("budget", str(error))
        case GraphRefused():  # ONNX Runtime's words may have a label or a pixel in them
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
    """Whether a lack of memory is the cause, directly or behind other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if not isinstance(cause, HushfleetError | Declined) and _NO_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
