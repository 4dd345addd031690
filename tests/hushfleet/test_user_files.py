"""The user's own folders, and files in them that are whole or nothing."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.paths import no_file
from hushfleet.user_files import read_cached, user_cache_dir, user_config_dir, user_data_dir, write_cached
from support.image_files import others_than_files


def test_the_folders_follow_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, folder, fallback in (
        ("XDG_CACHE_HOME", user_cache_dir, ".cache"),
        ("XDG_CONFIG_HOME", user_config_dir, ".config"),
        ("XDG_DATA_HOME", user_data_dir, ".local/share"),
    ):
        monkeypatch.setenv(variable, str(tmp_path / "own"))
        assert folder() == tmp_path / "own" / "hushfleet"
        for ignored in ("", "relative"):
            monkeypatch.setenv(variable, ignored)
            assert folder() == tmp_path / fallback / "hushfleet"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run for an id that its image does not know."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    folders = {"XDG_CACHE_HOME": user_cache_dir, "XDG_CONFIG_HOME": user_config_dir, "XDG_DATA_HOME": user_data_dir}
    for variable, folder in folders.items():
        for unset in ("HOME", variable):
            monkeypatch.delenv(unset, raising=False)
        with pytest.raises(BadInput, match=f"set HOME, or {variable}"):
            folder()


def test_a_damaged_file_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    assert read_cached(path) is None
    for content in (b"", b"abc", b"other"):
        write_cached(path, content)
        assert read_cached(path) == content
    whole = path.read_bytes()
    for torn in (b"", whole[:3], whole[:-1], b"x" + whole[1:]):
        path.write_bytes(torn)
        assert read_cached(path) is None


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", no_room)
    with pytest.raises(OSError, match="no room"):
        write_cached(tmp_path / "file", b"abc")
    assert list(tmp_path.iterdir()) == []


def test_only_regular_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with others_than_files(tmp_path):
        for name in ("pipe.jpg", "socket.jpg", "device.jpg", "folder", "file", "gone"):
            (tmp_path / f"link-to-{name}").symlink_to(tmp_path / name)
            kind = "" if name in ("file", "gone") else f"a {name.removesuffix('.jpg')}"
            assert no_file(tmp_path / name) == no_file(str(tmp_path / f"link-to-{name}")) == kind
