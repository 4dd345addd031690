"""A folder into which this user may not look, also where the tests run as root."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses to say what is in the folder, as the system does where its mode is 700 and another user's."""
    stat = os.stat

    def refused(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refused)
