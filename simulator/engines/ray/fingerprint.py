"""Determines the versions that two machines must share to compute the same bits.

Version numbers alone are not enough: an editable installation has one version and many states, so the code is hashed.
"""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from hushfleet.errors import HushfleetError

_NESTED = ("aggregator", "edge_client", "firmware_profiles", "models", "simulator")  # as in setup.py
PACKAGES = ("hushfleet", *(f"hushfleet.{name}" for name in _NESTED))
_ARITHMETIC = ("numpy", "onnxruntime", "torch")
_SOURCES = frozenset({".py", ".c", ".h", ".toml"})


@lru_cache(maxsize=2)
def fingerprint(*, compiled: bool = False) -> dict[str, str]:
    """Returns the version of each part of this process: Python, code, arithmetic libraries and processor.

    :param compiled: whether gradients are computed by code that is compiled here, so that the compiler matters too.
    """
    import torch

    parts = {"python": platform.python_version(), "hushfleet": f"{version('hushfleet')}, code {code_digest()[:12]}"}
    parts |= {name: version(name) for name in _ARITHMETIC}
    # The processor determines the kernels, and another kernel sums in another order.
    parts["processor"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if compiled:
        parts["compiler"] = _compiler()
    return parts


def _compiler() -> str:
    from hushfleet.models.native.build import find_compiler  # comes with torch

    try:
        macros = find_compiler().macros  # they describe the compiler and this processor
    except HushfleetError:
        return "none"
    return hashlib.sha256(macros.encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Returns the SHA-256 of all source files of the project's packages, hexadecimal."""
    files = {}  # by name, because a package is inside `hushfleet` or, in a checkout, beside it
    for package in PACKAGES:
        root = Path(str(import_module(package).__file__)).parent
        for path in root.rglob("*"):
            if path.suffix in _SOURCES:
                name = f"{package.replace('.', '/')}/{path.relative_to(root).as_posix()}"
                files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256("".join(f"{name} {files[name]}\n" for name in sorted(files)).encode()).hexdigest()


def differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Lists the differences, as `part: theirs instead of mine`."""
    return [
        f"{part}: {theirs.get(part, 'none')} instead of {mine.get(part, 'none')}"
        for part in dict.fromkeys([*mine, *theirs])
        if mine.get(part) != theirs.get(part)
    ]
