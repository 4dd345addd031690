"""Defines every error that Hushfleet raises on purpose, as one tree.

HushfleetError                  exit code 1
├── BadInput                    exit code 2: a file, flag or value that a person can correct
├── GraphRefused                a received ONNX graph that the device will not run
├── PrivacyError                the mechanism or its accounting would not hold
│   ├── BudgetExceeded          the round would spend more than the device's owner allows
│   └── LedgerError             the ledger cannot be trusted or written
├── StoreError                  the store on disk is corrupt, full or not writable
│   ├── StoreFull               there is no room; the operation may be tried again
│   └── LostStore               exit code 2: a device's store, with its ledger, is gone, empty or damaged
├── CopiedStore                 exit code 2: a device's store is an old copy, or one of two
└── WireError                   received data is wrong, or data could not be sent
    ├── Malformed               bytes that do not parse, or break a rule of docs/wire.md
    │   ├── NotFinite           an update with a value that is infinite or not a number
    │   └── OtherVersion        a message of a sender with another version of the wire format
    ├── TooLarge                a length above its cap
    ├── BadSignature            the sender is not the one that the topic names
    ├── Replayed                an earlier message of the right sender, published again
    └── LinkLost                there is no connection to the broker at present

Messages say what happened, which value, and what to do about it.
"""

from __future__ import annotations


class HushfleetError(Exception):
    """Base of all errors below.

    :cvar exit_code: what a command line returns for it.
    :param code: the stable names of the broken rules between settings (`hushfleet.rules`), with spaces between.
    """

    exit_code = 1

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code


class BadInput(HushfleetError):
    """A person gave a file, flag or value that cannot be used, and can correct it."""

    exit_code = 2


class GraphRefused(HushfleetError):
    """A received ONNX graph broke a rule (size, operators, external data, shapes)."""


class PrivacyError(HushfleetError):
    """A privacy mechanism or its accounting would not hold."""


class BudgetExceeded(PrivacyError):
    """Taking part would spend more privacy than the device's owner allows."""


class LedgerError(PrivacyError):
    """The ledger is inconsistent, or an entry could not be written."""


class StoreError(HushfleetError):
    """The store on disk is corrupt, full or not writable."""


class StoreFull(StoreError):
    """The disk has no room for the data; nothing was written, and the write may be tried again."""


class LostStore(StoreError):
    """A device's store, with its ledger, is gone, empty or damaged; a new ledger would count from zero."""

    exit_code = 2


class CopiedStore(HushfleetError):
    """A device's store is an older copy of itself, or another client uses a copy of it; the device must not train."""

    exit_code = 2


class WireError(HushfleetError):
    """Base of errors in the communication between device and aggregator."""


class Malformed(WireError):
    """Bytes that do not parse, or that break a rule of the wire format."""


class NotFinite(Malformed):
    """An update with a value that is infinite or not a number."""


class OtherVersion(Malformed):
    """A message of a sender with another version of the wire format."""


class TooLarge(WireError):
    """A length above its cap; raised before anything is allocated for it."""


class BadSignature(WireError):
    """A message whose signature does not belong to the sender that it names."""


class Replayed(WireError):
    """An earlier message of the right sender, published again by somebody."""


class LinkLost(WireError):
    """There is no connection to the broker at present; nothing was queued."""


def format_value(value: object) -> str:
    """Writes a value for an error's text, which is for a person: a long one is cut short.

    >>> format_value("leaf")
    "'leaf'"
    """
    try:
        text = repr(value)
    except ValueError:  # from Python, for an integer of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
