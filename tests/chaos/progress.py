"""What has happened in a live run, as anybody can read it from its files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chaos.plan import Moment
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.simulator.run_folder import Simulation

_COMMITTED = b": trained and committed"
_DECLINED = re.compile(rb"round (\d+) declined \(([a-z-]+)\)")


class Progress:
    """:param simulation: its event log may lose lines in a power cut; what was seen once has happened.
    :param sent: how many updates of a device have passed the broker.
    """

    def __init__(self, simulation: Simulation, sent: Callable[[str], int]) -> None:
        self._folder = simulation.folder
        self._sent = sent
        self._seen: Counter[tuple[str, str]] = Counter()
        self._sizes: dict[Path, int] = {}
        self.declines: set[tuple[int, str, str, str]] = set()
        """(round, device, code, reason)."""

    def reached(self, moment: Moment) -> bool:
        if moment.what == "sent":
            return self._sent(moment.of) >= moment.count
        return moment.what == "seconds" or self._seen[moment.what, moment.of] >= moment.count

    def has_come(self, device: str) -> bool:
        """Whether the aggregator has accepted it, and so knows its key."""
        return self._seen["presence", device] > 0

    @property
    def finished(self) -> bool:
        """The last round is closed, and the store has it."""
        return self._seen["finished", ""] > 0

    def look(self) -> None:
        """Reads what is new."""
        if self._has_changed(self._folder.events):
            seen: Counter[tuple[str, str]] = Counter()
            for event in iterate_events(self._folder.events):
                about = ""
                name = event["event"]
                if name == "presence":
                    about = event["device"]
                    name = "training" if event["state"] == "training" else name
                elif name == "decline":
                    self.declines.add((event["round"], event["device"], event["code"], event["reason"]))
                seen[name, about] += 1
            self._seen |= seen
        for log in self._folder.path.glob("devices/*/log.txt"):
            if self._has_changed(log):
                text, name = log.read_bytes(), log.parent.name
                self._seen["committed", name] = text.count(_COMMITTED)
                for number, code in _DECLINED.findall(text):
                    self.declines.add((int(number), name, code.decode(), "as its log says"))

    def _has_changed(self, path: Path) -> bool:
        size = path.stat().st_size if path.exists() else 0
        changed = size != self._sizes.get(path, 0)
        self._sizes[path] = size
        return changed
