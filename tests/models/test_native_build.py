"""Finding a compiler, keeping what it built, and saying why not. The compilers here are scripts on a path of ours."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from pathlib import Path

import pytest

from hushfleet.errors import HushfleetError
from hushfleet.models import get_model, native
from hushfleet.models.native.build import COMPILERS, find_compiler, load_library
from hushfleet.models.native.gradient import NativeGradient
from support.tools import need

SEVEN = "int seven(void) { return 7; }\n"


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """`on_path(script)`: the only compiler is a shell script of this text."""

    def install(script: str) -> Path:
        folder = tmp_path / f"bin-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        compiler = folder / "cc"
        compiler.write_text(f"#!/bin/sh\n{script}")
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin" if "exec" in script else str(folder))
        return folder

    return install


@pytest.fixture
def real_compiler() -> str:
    found = [path for path in map(shutil.which, COMPILERS) if path]
    if not found:
        assert "none of cc, gcc, clang" in str(native.unavailable())
        need("compiler")
    return found[0]


def test_without_a_compiler_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native.optimizers, "_library", native.optimizers._library.__wrapped__)
    reason = "there is no C compiler: none of cc, gcc, clang is on the path"
    assert native.unavailable() == reason
    assert native.unavailable(get_model("digits-cnn")) == reason
    for build in (lambda: NativeGradient(get_model("digits-cnn")), lambda: native.NativeAdam(0.1)):
        with pytest.raises(HushfleetError, match="there is no C compiler"):
            build()


def test_a_compiler_that_fails_is_quoted(on_path, tmp_path):
    on_path("echo 'cc: fatal error: no such CPU' >&2; exit 1\n")
    with pytest.raises(HushfleetError, match="cc failed: cc: fatal error: no such CPU"):
        load_library(SEVEN, cache_dir=tmp_path / "cache")
    assert "no such CPU" in native.unavailable(get_model("digits-cnn"))


def test_a_build_that_fails_is_quoted(on_path, tmp_path):
    on_path('case "$*" in *-dM*) echo "#define __GNUC__ 1";; *) echo "out of disk: error" >&2; exit 1;; esac\n')
    assert find_compiler().defined == {"__GNUC__"}
    with pytest.raises(HushfleetError, match="out of disk: error"):
        load_library(SEVEN, cache_dir=tmp_path / "cache")


def test_a_compiler_that_knows_no_native_flag_builds_without(on_path, tmp_path, real_compiler):
    on_path(f'case "$*" in *=native*) echo "error: what?" >&2; exit 1;; esac\nexec {real_compiler} "$@"\n')
    assert find_compiler().tuning == ()
    assert load_library(SEVEN, cache_dir=tmp_path / "cache").seven() == 7


def test_wrong_source_names_the_error(tmp_path, real_compiler):
    with pytest.raises(HushfleetError, match=r"error: .*eight"):
        load_library("int seven(void) { return eight; }\n", cache_dir=tmp_path)


def test_a_library_is_built_once(on_path, tmp_path, real_compiler):
    log, cache = tmp_path / "log", tmp_path / "cache"
    on_path(f'echo "$*" >> {log}\nexec {real_compiler} "$@"\n')
    for _ in range(2):
        assert load_library(SEVEN, cache_dir=cache).seven() == 7
    builds = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert len(builds) == 1
    assert len(os.listdir(cache)) == 1
    load_library(SEVEN, cache_dir=cache, flags=("-DOTHER",))
    assert load_library(SEVEN.replace("7", "8"), cache_dir=cache).seven() == 8
    assert len(os.listdir(cache)) == 3


def test_a_torn_library_is_built_again(tmp_path, real_compiler):
    assert load_library(SEVEN, cache_dir=tmp_path).seven() == 7
    (library,) = tmp_path.iterdir()
    whole = library.read_bytes()
    for torn in (b"", whole[:40], whole[:-1], whole.replace(b"\x7fELF", b"\x7fELG")):
        library.write_bytes(torn)
        assert load_library(SEVEN, cache_dir=tmp_path).seven() == 7
        assert library.stat().st_size == len(whole)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, real_compiler):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert load_library(SEVEN, cache_dir=blocked / "native").seven() == 7
    assert os.listdir(tmp_path) == ["file"]


def test_a_temporary_folder_that_forbids_execution_is_not_needed(tmp_path, monkeypatch, real_compiler):
    loaded = ctypes.CDLL

    def load(name):
        if not Path(name).is_relative_to(tmp_path):
            raise OSError(f"{name}: failed to map segment from shared object")
        return loaded(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert load_library(SEVEN, cache_dir=tmp_path).seven() == 7
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(HushfleetError, match=r"cannot be loaded: .* failed to map segment"):
        load_library(SEVEN, cache_dir=blocked / "native")
