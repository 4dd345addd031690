"""Refuses settings of the data by which one sample would decide which others train, where a task promises otherwise.

With the unit `record`, and with windows of data, the ledger counts what one record, or one window, changes by itself.
So nothing else may follow from it: neither how other samples are read, nor whether they are still there
(docs/privacy.md, "Each record is read alone").
"""

from __future__ import annotations

import os

from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.errors import BadInput
from hushfleet.wire.format.spec import TaskSpec

FORM_OF_ARRAYS = (
    "it is not said what its values are, and one sample of another type would change it for all; give the task, or the "
    'DEVICE.toml of this board, data.values = "pixels" (0 to 255) or "numbers" (as they are)'
)
FORM_OF_FOLDERS = (
    "no columns are named, and the first file would decide their order for all; give the task, or the DEVICE.toml of "
    'this board, data.columns = ["first", "second", ...], in the order in which the network takes them'
)


def check_by_content(section: OwnDataSection, spec: TaskSpec) -> None:
    """Raises `BadInput` if these data cannot be read and kept sample by sample, as the task needs it.

    It depends on the settings, and on whether the path is a folder; never on what the files contain.
    """
    if not spec.by_content:
        return
    form, records = section.here(spec.model).form, spec.privacy.unit == "record"
    promise = "protects single records" if records else "protects the persons of one window of data"
    if section.max_mib and (records or section.kind == "csv"):
        raise BadInput(
            f"data.max_mib = {section.max_mib}: one large file would decide which others are deleted, and the task "
            f"{promise}; leave it out, and limit the age of files with data.keep"
        )
    if section.keep and section.kind == "csv" and records:
        raise BadInput(
            f"data.keep = {section.keep!r}: the last line of a CSV file would decide how long all others stay, and the "
            f"task {promise}; leave it out, or give each sample a file of its own (kind 'folder')"
        )
    if section.kind == "arrays" and not (form.values or form.bit_depth):
        raise BadInput(f"data.kind = 'arrays': {FORM_OF_ARRAYS}")
    if section.kind == "csv" and os.path.isdir(section.path) and not form.columns:
        raise BadInput(f"data.kind = 'csv', data.path is a folder: {FORM_OF_FOLDERS}")
