"""C source to a loaded library: built where a compiler is found, kept in the user's cache, never required.

The key of a library covers its source, the flags and what the compiler says of itself and of this machine's processor
(its predefined macros), so a cache that travels to another machine is no danger, and nothing is invalidated by hand.
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
from pathlib import Path

from hushfleet.errors import HushfleetError
from hushfleet.progress import doing
from hushfleet.user_files import read_cached, user_cache_dir, write_cached

COMPILERS = ("cc", "gcc", "clang")
BUILD_TIMEOUT_S = 300
# Not -ffast-math: it would assume that no value is NaN, and where GCC links with it, denormals of the whole process
# become zeros. What the kernels reorder, they reorder themselves.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NATIVE = ("-march=native", "-mcpu=native")  # one of them, or neither, is what a compiler understands


@dataclass(frozen=True)
class Compiler:
    """A compiler that makes code for this machine's processor.

    :param macros: what it predefines there, as text; also its version.
    """

    path: str
    tuning: tuple[str, ...]
    macros: str

    @cached_property
    def defined(self) -> frozenset[str]:
        return frozenset(line.split()[1] for line in self.macros.splitlines() if line.startswith("#define "))


def find_compiler() -> Compiler:
    """The first of cc, gcc and clang on the path that works. Raises `HushfleetError` with the reason if none does."""
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


def load_library(source: str, *, flags: tuple[str, ...] = (), cache_dir: Path | None = None) -> ctypes.CDLL:
    """The library of one C source text, from the cache if it was built before.

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
        with contextlib.suppress(OSError):  # where nothing can be written, builds take longer
            write_cached(cached, built.read_bytes())
        try:
            return ctypes.CDLL(str(built))
        except OSError as error:
            if (library := _load_cached(cached)) is not None:  # many a /tmp forbids execution
                return library
            raise HushfleetError(f"the compiled library cannot be loaded: {error}") from error


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """Loads a cached library; None if it is missing or cannot be loaded, as from a folder that forbids execution."""
    if read_cached(path) is not None:  # loaders do not mind the digest after a library's end
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
