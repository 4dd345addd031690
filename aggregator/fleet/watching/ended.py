"""Notes why a fleet's aggregator has ended with an error, so that status and page can say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.errors import BadInput, HushfleetError

_FILE = "ended"


@contextmanager
def noted_end(folder: FleetFolder | None) -> Iterator[None]:
    """Notes the error with which the block ends; an earlier note is deleted first. Without a fleet nothing is noted."""
    if folder is None:
        yield
        return
    _path(folder).unlink(missing_ok=True)
    try:
        yield
    except HushfleetError as error:
        with suppress(OSError, HushfleetError):  # the error itself is more important
            atomic_file.write_whole(_path(folder), f"{folder.run.name}\n{error}".encode(), durable=False)
        raise


def why_ended(folder: FleetFolder) -> str:
    """Returns the error with which the aggregator of the present run has ended; empty if there was none."""
    try:
        name, _, why = _path(folder).read_text("utf-8", errors="replace").partition("\n")
        return why if name == folder.run.name else ""
    except (OSError, BadInput):
        return ""


def _path(folder: FleetFolder) -> Path:
    return folder.aggregator / _FILE
