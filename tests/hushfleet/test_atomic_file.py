"""Files that are there whole or not at all, and for whom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hushfleet.atomic_file import write_whole


@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_mode_holds_whatever_the_umask(tmp_path: Path, mode: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", b"secret", durable=True, mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_secret_is_not_written_into_a_file_that_others_have_open(tmp_path: Path) -> None:
    left = tmp_path / "file.part"
    left.touch(mode=0o666)
    with left.open("rb") as theirs:
        write_whole(tmp_path / "file", b"secret", durable=True, mode=0o600)
        assert theirs.read() == b""
    assert (tmp_path / "file").read_bytes() == b"secret"
