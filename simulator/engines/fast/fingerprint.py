"""What a machine would have to share with another one for both to compute the same bits.

Versions alone do not tell: an editable installation has one version and many states, so the code itself is digested.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from hushfleet.errors import HushfleetError

PACKAGES = ("hushfleet", "models", "edge_client", "aggregator", "simulator")
ARITHMETIC = ("numpy", "onnxruntime", "torch")
_SOURCES = frozenset({".py", ".c", ".h", ".toml"})


@lru_cache(maxsize=4)
def fingerprint(*, compiled: bool = False) -> Mapping[str, str]:
    """Part -> its version here, of this process's Python, code, arithmetic and processor.

    :param compiled: gradients are computed by code that is compiled here, so the compiler counts too.
    """
    import torch  # slow to load, and the one who only compares has no need of it

    parts = {"python": platform.python_version(), "hushfleet": f"{version('hushfleet')}, code {code_digest()[:12]}"}
    parts |= {name: version(name) for name in ARITHMETIC}
    # Kernels are chosen by it, and another one sums in another order.
    parts["processor"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if compiled:
        parts["compiler"] = _compiler()
    return parts


def _compiler() -> str:
    from hushfleet.models.native.build import find_compiler  # comes with torch

    try:
        macros = find_compiler().macros  # what it says of itself and of this very processor
    except HushfleetError:
        return "none"
    return hashlib.sha256(macros.encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 of all source files of the project's packages, hexadecimal."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        for root in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(file for file in Path(root).rglob("*") if file.suffix in _SOURCES):
                name = f"{package}/{path.relative_to(root).as_posix()}"
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What the other one has otherwise, as `part: theirs instead of mine`."""
    return [
        f"{part}: {theirs.get(part, 'none')} instead of {mine.get(part, 'none')}"
        for part in dict.fromkeys([*mine, *theirs])
        if mine.get(part) != theirs.get(part)
    ]
