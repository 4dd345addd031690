"""The state of a fleet's secure aggregation: what the server sees, the valid membership list, and what waits for the
operator."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.aggregator.fleet.trust import membership_list
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.keys import sum_facts
from hushfleet.aggregator.fleet.view import SumsView
from hushfleet.aggregator.results.server_sees import server_sees
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.list_file import membership_list_file
from hushfleet.aggregator.storage.membership_list_signing import MembershipListChanges
from hushfleet.schema import read_file
from hushfleet.secure.committee import committee_rule
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.health import Problem


class SumsWatch:
    """Looks at a fleet's membership list; used by one thread."""

    def __init__(self, folder: FleetFolder) -> None:
        self._folder = folder
        self._file = membership_list_file(folder.membership_list)

    def view(self, boards: Sequence[Board]) -> tuple[SumsView | None, list[Problem]]:
        """Returns the present state and its problems. Raises `BadInput` for a task file that cannot be read."""
        privacy = read_file(self._folder.task).get("privacy")
        if not isinstance(privacy, dict) or privacy.get("accounting") != "secure":
            return None, []
        holds = self._file.current()
        asked = membership_list.wanted(self._folder, boards)
        changes = MembershipListChanges.between(holds, holds if asked is None else asked)
        said = server_sees(sum_facts(self._folder), min_devices=self._folder.config.secure_sums.min_devices)
        view = SumsView(
            said,
            roster=holds.name if holds else "",
            boards=len(holds.devices) if holds else 0,
            honest=holds.honest_devices if holds else 0,
            min_devices=holds.min_devices if holds else 0,
        )
        return view, _problems(holds, changes)


def _problems(holds: MembershipList | None, changes: MembershipListChanges) -> list[Problem]:
    """Finds a membership list that waits, and what it costs until it is signed."""
    if not changes:
        return []
    advice = f"{membership_list.export_command()}, and have it signed where the operator's key is."
    found = [Problem(membership_list.describe_waiting(changes), advice, urgent=True)]
    if holds is not None and _opens_none(holds, missing=len(changes.removed) + len(changes.changed)):
        what = (
            "so many boards of the membership list are locked out or have new keys that no sum opens until one is "
            "signed"
        )
        advice = "Stop the aggregator meanwhile: boards are charged for what they send in vain."
        found.append(Problem(what, advice, urgent=True))
    return found


def _opens_none(holds: MembershipList, *, missing: int) -> bool:
    """Returns whether a sum opens with all boards of the membership list, but hardly one without `missing` of them.

    A committee is drawn from the membership list; in a large one it has few of the missing boards.
    """
    boards = len(holds.devices)
    rule = committee_rule(boards, honest_fraction=holds.honest_fraction)
    drawn = missing * rule.members / boards  # on average
    return drawn > rule.may_miss or boards - missing < holds.min_devices <= boards
