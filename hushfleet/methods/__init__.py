"""Finds methods of personalized federated learning by name: the published ones, and those of other packages and files.

Another package offers methods by entry points of the group `hushfleet.methods`, each a `Published`. In a simulation a
method may also be in a file, with the name `path/to/file.py:NAME`. Such a name runs only if `allow_file` has allowed
exactly this name, so that nothing a board reads from the network can make it execute a file. A Python program adds its
own method by `offer`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushfleet.errors import BadInput, format_value
from hushfleet.methods.method import Method, Published, TrainingConfig
from hushfleet.methods.personal import Personal
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.paths import OFFERED, in_file, is_offered
from hushfleet.schema import from_plain
from hushfleet.wire.format.spec import PrivacySpec, TaskSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

GROUP = "hushfleet.methods"
ALLOWED_FILE = "HUSHFLEET_METHOD_FILE"
"""The environment variable by which a simulation tells its processes which one file they may run."""

_OFFERED: dict[str, Published] = {}

GROUPS = {
    "baselines": ("fedavg", "fedprox", "fednova", "scaffold", "feddyn", "moon", "fedopt"),
    "personalized": (
        *("fedper", "lg-fedavg", "fedrep", "fedbn", "ditto", "pfedme", "apfl"),
        *("fedala", "perfreezeclip", "pfedsd", "dkd-pfed"),
    ),
    "private": (
        *("dp-fedavg", "blur-lus", "dp-fedsam", "fedglp-adp", "acdp-pfsd", "dp-fedsim"),
        *("feddpa", "fedaddp", "apdp-fl"),
    ),
    "ours": ("hush", "second-moments"),
}
"""The published methods by group: `private` ones were published for privacy, and all but `fedavg` can add noise."""
# The file of each method. A board imports only the one that it runs, because all together take two megabytes.
_FILES = {
    **{name: f"papers.{name.replace('-', '_')}" for names in GROUPS.values() for name in names},
    **dict.fromkeys(("fedavg", "dp-fedavg", "fedprox"), "fedavg"),
    **dict.fromkeys(("fedper", "lg-fedavg", "fedrep"), "heads"),
    "hush": "hush",
    "second-moments": "second_moments",
}


_OF_FEDOPT = ("fedadam", "fedyogi", "fedadagrad")


class _Ours(Mapping[str, Published]):
    """The published methods by name; each is imported at its first use."""

    def __getitem__(self, name: str) -> Published:
        module = importlib.import_module(f"{__name__}.{_FILES[name]}")
        found: Published = getattr(module, name.replace("-", "_"))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


METHODS: Mapping[str, Published] = _Ours()


def find_method(name: str) -> Published:
    """Returns the method of this name. Raises `BadInput` for an unknown name, or a file that may not be run."""
    if name in METHODS:
        return METHODS[name]
    if name in _OFFERED:
        return _OFFERED[name]
    if is_offered(name):
        raise BadInput(
            f"method.name = {name!r} is a method of a Python program; go on from there, with "
            "hushfleet.simulate(task, method=..., out=..., resume=True)"
        )
    if in_file(name):
        return _from_file(name)
    for entry in _installed():
        if entry.name == name:
            return _published(entry.load(), f"the entry point {entry.value}")
    from hushfleet.refusals import meant

    names = sorted(all_names())
    of_fedopt = f" (write name = 'fedopt', server_optimizer = {name.removeprefix('fed')!r})"
    hint = of_fedopt if name in _OF_FEDOPT else meant(name, names)
    raise BadInput(
        f"method.name = {format_value(name)}{hint}: must be one of {', '.join(names)}. A simulation takes one "
        "from a file: --method FILE.py:NAME. One of another package must be installed on the aggregator and on each "
        f"board: pip install PACKAGE, with an entry point of the group {GROUP!r} that has this name (docs/methods.md)"
    )


def all_names() -> set[str]:
    """Returns the names of all methods that are installed here."""
    return {*METHODS, *(entry.name for entry in _installed())}


def _installed() -> EntryPoints:
    """Returns the entry points of other packages. Their reader takes a board more than a megabyte."""
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def offer(method: Published) -> str:
    """Returns a name for `method.name` by which only this process knows a method of a Python program."""
    name = f"{OFFERED}{method.name}"
    _OFFERED[name] = method
    return name


def title_of(name: str) -> str:
    """Returns the name for tables and reports. A method in a file or of a Python program has its own name.

    >>> title_of("hush")
    'hush'
    """
    return find_method(name).name if in_file(name) or is_offered(name) else name


def allow_file(name: str) -> str:
    """Allows this process, and the processes that it starts, to run one method of a file. FOR SIMULATION ONLY.

    :param name: `path/to/file.py:NAME`.
    :return: the name for `method.name`, with the whole path.
    """
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not attribute.isidentifier():
        raise BadInput(f"--method {name}: must be like path/to/file.py:NAME")
    full = f"{Path(path).absolute()}:{attribute}"
    os.environ[ALLOWED_FILE] = full
    _loaded.cache_clear()  # a notebook's file may have changed
    find_method(full)
    return full


def allowed_file() -> dict[str, str]:
    """Returns the environment variables that allow a process on another machine to run the allowed file, if it exists
    there."""
    return {key: value for key, value in os.environ.items() if key == ALLOWED_FILE}


def _from_file(name: str) -> Published:
    if os.environ.get(ALLOWED_FILE) != name:
        raise BadInput(
            f"method.name = {name!r}: a method in a file runs in simulations only, by hushfleet simulate --method. On "
            f"boards it must be installed: make a package with an entry point of the group {GROUP!r} (docs/methods.md)"
        )
    return _loaded(name)


@cache
def _loaded(name: str) -> Published:
    from hushfleet.user_files import from_file

    return _published(from_file(name, key="method.name"), name)


def _published(found: object, where: str) -> Published:
    if not isinstance(found, Published):
        raise BadInput(f"{where} is not a method: it must be a hushfleet.methods.Published, not {type(found).__name__}")
    return found


def make_method(
    name: str, config: dict[str, Any], privacy: PrivacySpec, layout: ParamLayout, *, rounds: int
) -> TaskMethod:
    """Returns a task's method from its plain configuration. Raises `Malformed` for a bad field, `BadInput` for a bad
    name, and `PrivacyError` for a method that cannot be used with the task's accounting.

    :param rounds: T, the length of the task.
    """
    published = find_method(name)
    settings = from_plain(published.config, config, where="method")
    parts = published.parts(settings, privacy, rounds)
    if privacy.secure is not None:
        from hushfleet.methods.sums import check_sums

        check_sums(parts, privacy, settings)
    return bind(parts, settings, privacy, layout, name=name, rounds=rounds)


def method_of(spec: TaskSpec) -> TaskMethod:
    """Returns the method of a task package, as `make_method` does."""
    rounds = max(1, spec.training_rounds)
    return make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=rounds)


def is_shared_whole(spec: TaskSpec) -> bool:
    """Returns whether devices predict with the global model.

    An autoencoder that was last trained on few own samples judges everything that they do not contain as unusual.
    """
    return spec.model.targets.are_inputs and type(method_of(spec).parts.personal) is Personal


__all__ = [
    "GROUP",
    "GROUPS",
    "METHODS",
    "Method",
    "Published",
    "TaskMethod",
    "TrainingConfig",
    "all_names",
    "allow_file",
    "allowed_file",
    "find_method",
    "is_shared_whole",
    "make_method",
    "method_of",
    "offer",
    "title_of",
]
