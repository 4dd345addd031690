"""What the owner of a fleet asks, in four sentences: the same on the terminal and on the page.

Are the boards well; how many photographs are used; is the fleet's model better than a board's own; how much privacy is
left, and for how many rounds. What follows from a board's photographs without a charge stays on the board
(docs/privacy.md, "Health"), so the second and the third say where to read it.
"""

from __future__ import annotations

from hushfleet.aggregator.fleet import words
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.results.report.words import number, percent
from hushfleet.privacy.protection import protection

ON_THE_BOARD = "sudo -u hushfleet hushfleet-edge status /etc/hushfleet/device.toml"


def sentences(view: FleetView) -> dict[str, str]:
    """By name: `boards`, `photographs`, `model` and `privacy`."""
    return {
        "boards": words.summary(view),
        "photographs": photographs(view),
        "model": model(view),
        "privacy": privacy(view),
    }


def photographs(view: FleetView) -> str:
    where = f"How many a board uses or leaves out, and why, is private and stays on it; read it there: {ON_THE_BOARD}"
    without = [board.device for board in view.boards if board.decline is not None and board.decline.code == "no-data"]
    if not without:
        return where
    who = f"{len(without)} boards have" if len(without) > 1 else "1 board has"
    cure = "look at data.path there, and at the names of its folders"
    return f"{who} none that fit the task: {words.named(without)}; {cure}. {where}"


def model(view: FleetView) -> str:
    better, where = "is better on a board than the board's own", "is private, too, and told by the same command there"
    if view.run is None or view.run.accuracy is None:
        return f"Whether the fleet's {better} {where}"
    right = f"The fleet's model is right on {percent(view.run.accuracy)} of the public test images"
    return f"{right}. Whether it {better} {where}"


def privacy(view: FleetView) -> str:
    left = view.privacy_left
    if left is None:
        return "Nothing is spent yet"
    told = f"{left.device}, which has spent most, stands at {number(left.spent)}"
    above = left.limit is not None and left.spent > left.limit
    if left.limit is not None:
        told += f"{', above' if above else ' of'} the {number(left.limit)} that its card allows"
    told += f" (epsilon; {protection(left.spent)})"
    if above:
        return f"{told}; its owner alone can allow more"
    if left.rounds is None:
        return told
    more = f"enough for {left.rounds} more round{'s' * (left.rounds > 1)}"
    told += f"; the rest is {more if left.rounds else 'not enough for another round'} of this task"
    if view.run is None or view.run.finished:
        return told
    return f"{told}, which has {view.run.rounds - view.run.rounds_closed} to come"
