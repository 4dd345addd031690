"""Who belongs to a fleet, or to a run without one, and what an operator changes of that; commands need not know which.

A fleet's registry decides, and the aggregator's register follows. In a run without a fleet the register decides alone.
"""

from __future__ import annotations

import contextlib
import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hushfleet.aggregator.fleet.trust import membership_list
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Board, with_blocked
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput
from hushfleet.wire.format.topics import check_name, check_new_name


@dataclass
class Membership:
    """The boards of one folder, which is open.

    :param decides: the fleet's registry; None: there is no fleet.
    :param members: by id, as they were when it was opened, also those that ask to be let in.
    :param asking: the keys that have asked under an id and were not let in, by id.
    """

    path: Path
    activity: ActivityStore
    decides: tuple[FleetFolder, FleetRegistry] | None
    members: dict[str, Board]
    asking: defaultdict[str, list[bytes]]

    def chosen(
        self, named: Sequence[str] | None, file: Path | None, fits: Callable[[Board], object] = lambda _: True
    ) -> list[Board]:
        """Returns the boards that a command names, as `chosen_ids` finds them. Raises `BadInput`."""
        ids = chosen_ids(self.members, named, file, folder=self.path, fits=fits)
        return [self.members[each] for each in ids]

    @property
    def store(self) -> FleetRegistry | DeviceRegister:
        """The store in which boards are approved, locked out and forgotten."""
        if self.decides is not None:
            return self.decides[1]
        assert isinstance(self.activity, DeviceRegister)
        return self.activity

    def done(self) -> str:
        """Carries changes out. Returns a line on what still waits for the operator's signature, or ""."""
        changes = None if self.decides is None else apply(*self.decides, self.activity)
        return (
            f"\n{membership_list.describe_waiting(changes)}: {membership_list.export_command(str(self.path))}"
            if changes
            else ""
        )


def is_fleet(path: Path) -> bool:
    """Returns whether this is a fleet's folder, and not that of a run without a fleet."""
    return (path / FILE_NAME).exists()


@contextlib.contextmanager
def membership(path: Path) -> Iterator[Membership]:
    """Opens the boards of a fleet's folder, or of the folder of a run without one. Raises `BadInput`."""
    with contextlib.ExitStack() as opened:
        asking = defaultdict[str, list[bytes]](list)
        if is_fleet(path):
            folder = FleetFolder(path)
            registry = opened.enter_context(FleetRegistry(folder.path))
            activity = opened.enter_context(ActivityStore(folder.aggregator))
            boards = with_blocked(registry.boards(), activity.blocked())
            for request in registry.refused_requests():
                asking[request.device].append(request.public_key)
            yield Membership(path, activity, (folder, registry), {each.device: each for each in boards}, asking)
        elif DeviceRegister.exists(path) or AggregatorStore.exists(path):
            _refuse_run_of_fleet(path)
            register = opened.enter_context(DeviceRegister(path))
            members = {each.device: each for each in register.devices()}
            for birth in register.refused_births():
                members.setdefault(birth.device, Board(birth.device))
                asking[birth.device].append(birth.public_key)
            yield Membership(path, register, None, members, asking)
        else:
            raise BadInput(f"{path} is not a fleet's folder, which has a {FILE_NAME}, and not a run's folder")


def accept(run: Path, devices: Sequence[str], key: bytes | None) -> None:
    """Accepts devices of a run without a fleet, also those that were locked out. Raises `BadInput`.

    :param run: made if it does not exist, because devices may be accepted before the first start.
    :param key: of the only device; None: the first key that each shows.
    """
    _refuse_run_of_fleet(run)
    for device in devices:
        check_name(device, "the device id")
    with DeviceRegister(run) as register:
        for device in devices:
            if register.device(device) is None:
                check_new_name(device, "the device id")
        register.add(Board(device, public_key=key, standing="pinned" if key is None else "known") for device in devices)
        for device in devices:
            register.unblock(device)


def _refuse_run_of_fleet(path: Path) -> None:
    runs = path.resolve().parent
    if runs.name == "runs" and is_fleet(of := runs.parent):
        raise BadInput(f"{path} is a run of the fleet {of}, which has the boards: name the fleet's folder")


def chosen_ids(
    boards: Mapping[str, Board],
    named: Sequence[str] | None,
    file: Path | None,
    *,
    folder: Path,
    fits: Callable[[Board], object] = lambda _: True,
) -> list[str]:
    """Returns the ids of the named boards, each once. Raises `BadInput` for an id or a pattern that names no board.

    :param boards: all that are known, by id.
    :param named: ids, and patterns such as `gh-*`.
    :param file: more of them, one a line; empty lines and those that begin with # are left out. None: no file.
    :param folder: where the boards are known, for errors.
    :param fits: whether a pattern may match this board; an id names any.
    """
    try:
        lines = [] if file is None else [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    names = [*(named or ()), *(line for line in lines if line and not line.startswith("#"))]
    if not names:
        raise BadInput("name the boards: ids, patterns such as 'greenhouse-0*', or --file FILE with one a line")
    found: dict[str, None] = {}
    for name in names:
        if set(name) & set("*?["):
            matched = [each for each, board in boards.items() if fnmatchcase(each, name) and fits(board)]
            if not matched:
                raise BadInput(f"{name!r} matches no board of {folder} that this is for; {_see(folder)}")
            found |= dict.fromkeys(matched)
        elif name in boards:
            found[name] = None
        else:
            close = difflib.get_close_matches(name, boards, n=3)
            meant = f"did you mean {' or '.join(close)}? " if close else ""
            raise BadInput(f"there is no board {name!r} in {folder}; {meant}{_see(folder)}")
    return list(found)


def _see(folder: Path) -> str:
    return f"see: hushfleet fleet status {folder}"
