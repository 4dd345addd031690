"""Builds a library from C source and loads it, if there is a compiler; it is stored in the cache and never required.

The key of a library covers its source, the flags and the compiler's predefined macros, which describe the compiler and
this machine's processor. So a cache from another machine does no harm, and nobody has to clear the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from hushfleet.errors import HushfleetError
from hushfleet.progress import doing
from hushfleet.user_files import read_cached, user_cache_dir, write_cached

COMPILERS = ("cc", "gcc", "clang")
BUILD_TIMEOUT_S = 300
# Not -ffast-math: it would assume that no value is NaN, and if GCC links with it, denormals of the whole process
# become zeros. The kernels do their reordering themselves.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NATIVE = ("-march=native", "-mcpu=native")  # a compiler knows one of them, or neither


@dataclass(frozen=True)
class Compiler:
    """A compiler that makes code for this machine's processor.

    :param macros: its predefined macros for this processor, as text; they include its version.
    """

    path: str
    tuning: tuple[str, ...]
    macros: str

    @cached_property
    def defined(self) -> frozenset[str]:
        return frozenset(line.split()[1] for line in self.macros.splitlines() if line.startswith("#define "))


def find_compiler() -> Compiler:
    """Returns the first of cc, gcc and clang on the path that works. Raises `HushfleetError` if none works."""
    return _first_compiler(os.environ.get("PATH", ""))


@lru_cache(maxsize=4)
def _first_compiler(search_path: str) -> Compiler:
    reason = f"there is no C compiler: none of {', '.join(COMPILERS)} is on the path"
    for name in COMPILERS:
        path = shutil.which(name, path=search_path)
        if path is None:
            continue
        for tuning in (*((flag,) for flag in NATIVE), ()):
            try:
                return Compiler(path, tuning, _run([path, *tuning, "-dM", "-E", "-x", "c", "-"], ""))
            except HushfleetError as error:
                reason = str(error)
    raise HushfleetError(reason)


def kernels(*names: str) -> str:
    """Returns the C source text of these files of `kernels/`."""
    folder = resources.files("hushfleet.models.native") / "kernels"
    return "\n".join((folder / name).read_text("utf-8") for name in names)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Returns an argument of compiled code: where the array's values begin."""
    return ctypes.c_void_p(array.ctypes.data)


def load_library(source: str, *, flags: tuple[str, ...] = (), cache_dir: Path | None = None) -> ctypes.CDLL:
    """Returns the library of one C source text, from the cache if it was built before.

    :param cache_dir: default `$XDG_CACHE_HOME/hushfleet/native`, or `~/.cache/hushfleet/native`.
    :raises HushfleetError: there is no compiler, or it refuses; the text says which and why.
    """
    compiler = find_compiler()
    command = [compiler.path, *FLAGS, *compiler.tuning, *flags]
    key = hashlib.sha256("\0".join((*command, compiler.macros, source)).encode()).hexdigest()
    cached = (cache_dir or user_cache_dir() / "native") / f"{key[:32]}.so"
    if (library := _load_cached(cached)) is not None:
        return library
    compiling = doing("compiling for this processor, once")
    with tempfile.TemporaryDirectory(prefix="hushfleet-native-") as folder, compiling:
        built = Path(folder) / "library.so"
        _run([*command, "-x", "c", "-", "-o", str(built), "-lm"], source)
        with contextlib.suppress(OSError):  # if nothing can be written, the next start builds again
            write_cached(cached, built.read_bytes())
        try:
            return ctypes.CDLL(str(built))
        except OSError as error:
            if (library := _load_cached(cached)) is not None:  # /tmp may forbid execution
                return library
            raise HushfleetError(f"the compiled library cannot be loaded: {error}") from error


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """Loads a cached library; None if it is missing or cannot be loaded (the folder may forbid execution)."""
    if read_cached(path) is not None:  # loaders ignore the digest after a library's end
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return None


def _run(command: list[str], text: str) -> str:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HushfleetError(f"the C compiler {command[0]} cannot be used: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        reason = errors[0] if errors else f"exit status {done.returncode}"
        raise HushfleetError(f"the C compiler {command[0]} failed: {reason}")
    return done.stdout
