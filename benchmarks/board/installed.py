"""What is on a board's card: the distributions that the `[edge]` extra needs, and PyTorch's beside them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.board.talk import ROOT

_OWN = "hushfleet"
_OWN_PACKAGES = ("hushfleet", "edge_client", "firmware_profiles", "models", "aggregator", "simulator")


def edge_mib() -> dict[str, float]:
    """MiB of each distribution that a board has, the largest first; what is installed in this environment counts."""
    return _sizes([Requirement(f"{_OWN}[edge]")])


def torch_mib() -> dict[str, float]:
    """The same of PyTorch with all that it needs and no vision package."""
    return _sizes([Requirement("torch")])


def _sizes(wanted: Iterable[Requirement]) -> dict[str, float]:
    sizes = {name: _bytes(found) / (1 << 20) for name, found in _closure(wanted).items()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _closure(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """Each distribution once; optional ones that are not installed are left out."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for line in found[name].requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append(needed)
    return found


def _bytes(found: Distribution) -> int:
    """Of its files as its record lists them; of this project, which may be installed in place, its modules."""
    if canonicalize_name(found.name) == _OWN:
        paths = (path for package in _OWN_PACKAGES for path in (ROOT / package).rglob("*"))
        files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    else:
        files = [Path(str(path.locate())) for path in found.files or []]
    return sum(path.stat().st_size for path in set(files) if path.is_file())
