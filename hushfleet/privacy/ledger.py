"""The privacy ledger of a device: written before the first byte leaves, and never rewritten.

It uses the caller's SQLite connection and transaction, so that the entry ("this was spent") and the payload
("these bytes are to be sent") commit together or not at all. Even after a crash, no update can leave without
its entry, and epsilon can never be too small. There is one entry for each (task, round, unit): a round that is
repeated after a crash must send the stored bytes, because the noise of two noised copies of an update averages out.

Each row holds the SHA-256 of the previous row's hash together with its own fields, and one more row holds the
number of entries and the last hash. The whole chain is verified at the first reading, by whoever lists entries, and
after another connection has written (`PRAGMA data_version`); then it must also contain what this process has verified
before. Each other reading compares the head, verifies the new entries, and adds them to totals: it takes the same time
after 10,000 rounds as after one. So an entry that somebody else changed, removed or added through SQLite is detected at
the next reading, and the device then stops taking part. A change of the file's bytes that SQLite does not see, such as
a flipped bit, changes no totals in memory; it is detected at the next start.

An entry also names the values that left without noise (`Charge.raw`). They make epsilon infinite from then on.

An entry has the time at which it was charged (`LedgerEntry.at`), and the window of samples that it trained on. Entries
of earlier versions have neither, and keep their hashes. `privacy.budget` computes what a period has spent. No entry may
count earlier than it was made. If its time is not sure when it is written, it moves with the counted time when that is
set forward; a table beside the entries, which are never rewritten, has these later times.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from array import array
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgpack

from hushfleet.durations import Period
from hushfleet.errors import BudgetExceeded, LedgerError, PrivacyError
from hushfleet.privacy.accountant import Adjacency, Step, epsilon
from hushfleet.privacy.charge import Charge, Totals, merged
from hushfleet.privacy.terms import Accountant

DIGEST_BYTES = 32
_CHARGE = ("unit", "adjacency", "mechanism", "noise_multiplier", "noise_split", "sample_rate", "steps")
_LATER = {
    "raw": "TEXT NOT NULL DEFAULT ''",
    **dict.fromkeys(("at", "arrived_from", "arrived_until"), "INTEGER NOT NULL DEFAULT 0"),
}
"""Columns that later versions have added."""
_WITHOUT = ("", 0, 0, 0)
_COLUMNS = ("seq", "task", "round", *_CHARGE, "payload_digest", "hash", *_LATER)
_GENESIS = bytes(DIGEST_BYTES)
_RAW_SEPARATOR = "\n"

_LATER_OF_TIME = {"lag": "INTEGER DEFAULT 0", "waits_until": "INTEGER NOT NULL DEFAULT 0"}
"""Columns that later versions have added to the counted time."""
_TIME = (
    f"""CREATE TABLE IF NOT EXISTS privacy_ledger_time (
        only INTEGER PRIMARY KEY CHECK (only = 1), began INTEGER NOT NULL, now INTEGER NOT NULL,
        {", ".join(f"{name} {kind}" for name, kind in _LATER_OF_TIME.items())})""",
    """CREATE TABLE IF NOT EXISTS privacy_ledger_unsure (
        seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, sure INTEGER NOT NULL)""",
)
_SCHEMA = (
    f"""CREATE TABLE IF NOT EXISTS privacy_ledger (
        seq INTEGER PRIMARY KEY,
        task TEXT NOT NULL,
        round INTEGER NOT NULL,
        unit TEXT NOT NULL,
        adjacency TEXT NOT NULL,
        mechanism TEXT NOT NULL,
        noise_multiplier REAL NOT NULL,
        noise_split INTEGER NOT NULL,
        sample_rate REAL NOT NULL,
        steps INTEGER NOT NULL,
        payload_digest BLOB NOT NULL,
        hash BLOB NOT NULL,
        {", ".join(f"{name} {kind}" for name, kind in _LATER.items())},
        UNIQUE (task, round, unit))""",
    """CREATE TABLE IF NOT EXISTS privacy_ledger_head (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        device TEXT NOT NULL,
        entries INTEGER NOT NULL,
        hash BLOB NOT NULL)""",
    *_TIME,
    """CREATE TRIGGER IF NOT EXISTS privacy_ledger_keep BEFORE DELETE ON privacy_ledger
        BEGIN SELECT RAISE(ABORT, 'the privacy ledger is append-only'); END""",
    """CREATE TRIGGER IF NOT EXISTS privacy_ledger_fix BEFORE UPDATE ON privacy_ledger
        BEGIN SELECT RAISE(ABORT, 'the privacy ledger is append-only'); END""",
)


class CountedTime(NamedTuple):
    """The time that a device counts for its budget, whole unix seconds.

    :param began: the time at the first count, as far as is known. Earlier entries get this time.
    :param now: the time that was stored last.
    :param confirmed: True if a statement of the time was heard since.
    :param lag: how far `now` is behind the true time at most, seconds; None if that is not known.
    :param waits_until: the counted time before which nothing may be spent.
    """

    began: int
    now: int
    confirmed: bool = False
    lag: int | None = 0
    waits_until: int = 0


@dataclass(frozen=True)
class LedgerEntry:
    """One release: its charge, and the SHA-256 of the bytes that were stored for sending.

    :param at: the latest time, as far as is known, at which it was charged, unix seconds; 0: no time was counted yet.
    :param window: when the samples arrived that were used for training; None: it may have used all samples.
    """

    task: str
    round: int
    charge: Charge
    payload_digest: bytes
    at: int = 0
    window: Period | None = None


class LedgerView:
    """The spending of one device, for any storage. A storage implements `totals`; with a clock also the rest.

    Nothing here lists entries, so that a round costs the same however many have been before.
    """

    device: str

    def totals(self, task: str | None = None) -> Totals:
        """Returns the totals of all entries, or of the entries of one task."""
        raise NotImplementedError

    def counted(self) -> CountedTime | None:
        """Returns the time that was counted last; None if none was counted yet. Raises `LedgerError`."""
        return None

    def charged_since(self, at: int) -> list[Charge]:
        """Returns the charges that may have been made at this time or later, merged by kind: all without a clock."""
        return self.totals().charges

    def latest(self) -> int:
        """Returns the latest time at which an entry may have been charged, unix seconds; 0 without entries."""
        return 0

    def rounds_charged(self, task: str | None = None) -> int:
        """Returns the number of (task, round) pairs in which something was released."""
        return self.totals(task).rounds

    def weight(self) -> float:
        """Returns the sum of `Charge.weight` over all entries, by which two ledgers can be compared."""
        return self.totals().weight

    def unit(self, task: str | None = None, *, extra: Charge | None = None) -> str:
        """Returns the unit that `epsilon_server` protects: `"device"` if all charges do, else `"record"`."""
        charges = self._charges(task, extra)
        return "record" if any(charge.unit == "record" for charge in charges) else "device"

    def epsilon_server(
        self,
        *,
        delta: float,
        task: str | None = None,
        extra: Charge | None = None,
        accountant: Accountant = "exact",
    ) -> float:
        """Returns epsilon of this device against anyone who sees its updates, over all tasks or one of them.

        With `extra`, it is the value after one more charge. It is infinite once a raw value has left.
        """
        return epsilon_server_of(self._charges(task, extra), delta=delta, accountant=accountant)

    def raw_values(self, task: str | None = None, *, extra: Charge | None = None) -> tuple[str, ...]:
        """Returns the names of the values that left without noise, in the order of first appearance."""
        return tuple(dict.fromkeys(words for charge in self._charges(task, extra) for words in charge.raw))

    def epsilon_noised(self, *, delta: float) -> float:
        """Returns `epsilon_server` of the noised values alone; it guarantees nothing if raw values left, too.

        If any entry protects records, the number is for a record (see `unit`): a device-level release then counts
        with half its multiplier, because a changed record can move the update from one end of the clipping ball to the
        other.
        """
        return _epsilon_of(self._charges(None, None), delta, "exact")

    def check_budget(self, charge: Charge, *, delta: float, epsilon_limit: float) -> None:
        """Raises `BudgetExceeded`, before any training, if `charge` would lead above `epsilon_limit`.

        Always uses the exact accountant, also if a task prints its numbers with another one.
        """
        if math.isnan(epsilon_limit) or epsilon_limit < 0:
            raise PrivacyError(f"a privacy budget must be zero or more, got {epsilon_limit!r}")
        if epsilon_limit == math.inf:
            self.totals()
            return
        after = self.epsilon_server(delta=delta, extra=charge)
        if after == math.inf and (raw := self.raw_values(extra=charge)):
            when = "this round would send" if charge.raw else "earlier rounds have sent"
            raise BudgetExceeded(
                f"device {self.device!r} has a limit of epsilon {epsilon_limit:g} against the server, and {when} "
                f"without noise: {', '.join(charge.raw or raw)}. That makes epsilon infinite, so no finite limit "
                f'allows it: run the task with privacy.accounting = "strict", or let the device\'s owner set '
                f"limits.epsilon_server = inf"
            )
        if after > epsilon_limit:
            spent = self.epsilon_server(delta=delta)
            raise BudgetExceeded(
                f"device {self.device!r} has spent epsilon {spent:.3f} against the server, delta {delta:g}; "
                f"this round would make it {after:.3f}, above its limit of {epsilon_limit:g}. It sits the "
                f"round out; to let it take part, put more noise into the task or raise the device's limit"
            )

    def _charges(self, task: str | None, extra: Charge | None) -> list[Charge]:
        return self.totals(task).charges + ([extra] if extra is not None else [])


class Tally:
    """Adds up entries; each takes the same time."""

    def __init__(self) -> None:
        self._kinds: Counter[Charge] = Counter()
        self._rounds = 0
        self._window: Period | None = None

    def add(self, entry: LedgerEntry, *, new_round: bool) -> None:
        """:param new_round: whether it is the first entry of its task and round."""
        self._kinds[entry.charge] += 1
        self._rounds += new_round
        self._window = entry.window or self._window

    def totals(self) -> Totals:
        """Returns what was added so far."""
        return Totals(tuple(self._kinds.items()), self._rounds, self._window)


@dataclass
class _Verified:
    """The part of a chain that this process has verified, added up.

    :param count: number of entries; `hash`: of the last one.
    :param version: of the data, as other connections have left it; None: the times of entries have changed since.
    :param tallies: by task; None: of all tasks.
    :param times: sorted times of the entries, by their charge, before the first count of the time is applied.
    """

    count: int
    hash: bytes
    version: int | None = None
    tallies: dict[str | None, Tally] = field(default_factory=lambda: defaultdict(Tally))
    times: dict[Charge, array[int]] = field(default_factory=lambda: defaultdict(lambda: array("q")))

    def add(self, entry: LedgerEntry, row_hash: bytes, *, at: int, new_round: bool) -> None:
        self.count, self.hash = self.count + 1, row_hash
        for task in (None, entry.task):
            self.tallies[task].add(entry, new_round=new_round)
        insort(self.times[entry.charge], at)


class Ledger(LedgerView):
    """The ledger of one device on the caller's connection and in its transaction; only `keep_counted` has its own.

    Every reading raises `LedgerError` if it finds that the chain is not intact; see the top of this file.
    """

    def __init__(self, connection: sqlite3.Connection, *, device: str) -> None:
        """Opens the ledger of `device`; a database keeps the ledger of one device only."""
        self._connection = connection
        self.device = device
        self._known = self._nothing()

    @property
    def count(self) -> int:
        """The number of entries, by the head alone: the chain is not verified. Raises `LedgerError`."""
        return self._head()[0]

    def create_schema(self) -> None:
        """Creates missing tables. Raises `LedgerError` if the database holds another device's ledger."""
        try:
            for statement in _SCHEMA:
                self._connection.execute(statement)
            head = self._connection.execute("SELECT device FROM privacy_ledger_head").fetchone()
            if head is None:
                self._connection.execute(
                    "INSERT INTO privacy_ledger_head VALUES (1, ?, 0, ?)", (self.device, self._first_hash())
                )
            elif head[0] != self.device:
                raise LedgerError(
                    f"this store holds the privacy ledger of device {head[0]!r}, not of {self.device!r}; "
                    f"what a device has spent cannot be handed on: give each device its own store"
                )
        except sqlite3.Error as error:
            raise LedgerError(f"the privacy ledger could not be created: {error}") from error

    def upgrade_schema(self) -> None:
        """Adds the columns that a ledger of an earlier version lacks; its entries stay as they are."""
        try:
            for statement in _TIME:
                self._connection.execute(statement)
            for table, later in (("privacy_ledger", _LATER), ("privacy_ledger_time", _LATER_OF_TIME)):
                columns = self._connection.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchall()
                for name, kind in later.items():
                    if (name,) not in columns:
                        self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
        except sqlite3.Error as error:
            raise LedgerError(f"the privacy ledger could not be brought to this version: {error}") from error

    def charge(
        self,
        charge: Charge,
        *,
        task: str,
        round: int,
        payload_digest: bytes,
        at: int = 0,
        window: Period | None = None,
    ) -> None:
        """Writes one entry into the caller's open transaction; the caller commits it with the payload.

        :param payload_digest: SHA-256 (32 bytes) of the stored update.
        :param at: counted unix seconds; 0: the time that was stored last.
        :param window: as in `LedgerEntry`.

        Raises `LedgerError` for a second charge of the same (task, round, unit), if no transaction is open that
        can hold it together with the payload, or if the database refuses.
        """
        if not task or type(round) is not int or round < 0 or len(payload_digest) != DIGEST_BYTES:
            raise LedgerError(
                f"an entry needs a task, a round of 0 or more and a {DIGEST_BYTES}-byte digest, got "
                f"{task!r}, {round!r} and {len(payload_digest)} bytes"
            )
        if at < 0 or (window is not None and not 0 <= window.start < window.stop):
            raise LedgerError(f"an entry is charged at a time of 0 or more, got {at!r} and the window {window!r}")
        connection = self._connection
        commits_alone = connection.isolation_level is None or getattr(connection, "autocommit", -1) is True
        if commits_alone and not connection.in_transaction:
            raise LedgerError("no transaction is open: begin one, charge, store the payload, commit both")
        try:
            count, previous = self._head()
            fields = _fields(task, round, charge, payload_digest)
            counted = self.counted()
            at = int(at) or (0 if counted is None else counted.now)
            if counted is not None:
                connection.execute("UPDATE privacy_ledger_time SET now = MAX(now, ?)", (at,))
                at += counted.lag or 0
            later = _RAW_SEPARATOR.join(charge.raw), at, *(window or (0, 0))
            row_hash = _link(previous, count + 1, fields, later)
            connection.execute(
                f"INSERT INTO privacy_ledger ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})",
                (count + 1, *fields, row_hash, *later),
            )
            connection.execute("UPDATE privacy_ledger_head SET entries = ?, hash = ?", (count + 1, row_hash))
            if counted is not None and counted.lag is None:
                connection.execute("INSERT INTO privacy_ledger_unsure VALUES (?, ?, 0)", (count + 1, at))
        except sqlite3.IntegrityError as error:
            raise LedgerError(
                f"round {round} of task {task!r} is already charged for unit {charge.unit!r} ({error}); "
                f"send the stored bytes again, never noise a second time"
            ) from error
        except sqlite3.Error as error:
            raise LedgerError(f"round {round} of task {task!r} could not be charged: {error}") from error

    def entries(self, task: str | None = None) -> list[LedgerEntry]:
        """Returns all entries, or the entries of one task, in the order of writing, from a verified chain."""
        listed: list[LedgerEntry] = []
        self._verified(listed)
        return listed if task is None else [entry for entry in listed if entry.task == task]

    def totals(self, task: str | None = None) -> Totals:
        tally = self._verified().tallies.get(task)
        return Totals() if tally is None else tally.totals()

    def charged_since(self, at: int) -> list[Charge]:
        times, counted = self._verified().times, self.counted()
        if counted is not None and counted.began >= at:  # no entry counts earlier
            return self.totals().charges
        return merged((charge, len(each) - bisect_left(each, at)) for charge, each in times.items())

    def latest(self) -> int:
        times, counted = self._verified().times, self.counted()
        began = 0 if counted is None else counted.began
        return max((max(each[-1], began) for each in times.values()), default=0)

    def charges_of(self, task: str, round: int) -> list[Charge]:
        """Returns the charges of one round."""
        self._verified()
        rows = self._read("SELECT * FROM privacy_ledger WHERE task = ? AND round = ?", task, round)
        return [_entry(*_columns(row), not_before=0).charge for row in rows]

    def _verified(self, listed: list[LedgerEntry] | None = None) -> _Verified:
        """Returns the verified entries, added up, after it has verified what was not.

        :param listed: gets all entries, which are then all verified.
        """
        known, within = self._known, self._connection.in_transaction
        version, count, head = self._state()
        if listed is None and (known.version, known.count, known.hash) == (version, count, head):
            return known
        grown = listed is None and not within and known.version == version and known.count < count
        found = known if grown else self._nothing()
        rows, later_times, counted = self._rows(found.count), self._later_times(found.count), self.counted()
        began, found.version = 0 if counted is None else counted.began, None
        for new_round, *row in rows:
            (seq, *fields, row_hash), later = _columns(row)
            if seq != found.count + 1 or _link(found.hash, seq, tuple(fields), later) != row_hash:
                raise self._changed(found.count + 1)
            if seq == known.count and row_hash != known.hash:  # linked anew, or another ledger
                raise self._changed(seq)
            at = max(later[1], later_times.get(seq, 0))
            entry = _entry((seq, *fields, row_hash), later, not_before=max(began, at))
            found.add(entry, row_hash, at=at, new_round=bool(new_round))
            if listed is not None:
                listed.append(entry)
        if (found.count, found.hash) != (count, head) or found.count < known.count:
            raise LedgerError(
                f"the privacy ledger of device {self.device!r} has {found.count} entries where "
                f"{max(count, known.count)} were written: what was spent is no longer known, so this device must not "
                "take part any more"
            )
        found.version = version
        if not within:  # what is not committed may be taken back
            self._known = found
        return found

    def _state(self) -> tuple[int, int, bytes]:
        """Returns the version of the data as other connections have left it, and the head."""
        try:
            return *self._connection.execute("PRAGMA data_version").fetchone(), *self._head()
        except sqlite3.Error as error:
            raise LedgerError(f"the privacy ledger cannot be read: {error}") from error

    def _nothing(self) -> _Verified:
        return _Verified(0, self._first_hash())

    def _rows(self, after: int) -> list[tuple[Any, ...]]:
        """Returns the later rows in order, each after whether it is the first of its round."""
        earlier = "earlier.task = this.task AND earlier.round = this.round AND earlier.seq < this.seq"
        return self._read(
            f"SELECT NOT EXISTS (SELECT 1 FROM privacy_ledger AS earlier WHERE {earlier}), this.* "
            "FROM privacy_ledger AS this WHERE seq > ? ORDER BY seq",
            after,
        )

    def _read(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"the privacy ledger cannot be read: {error}") from error

    def _changed(self, entry: int) -> LedgerError:
        return LedgerError(
            f"the privacy ledger of device {self.device!r} was changed at entry {entry}: what was spent is no longer "
            "known, so this device must not take part any more"
        )

    def counted(self) -> CountedTime | None:
        rows = self._rows_of_time("SELECT * FROM privacy_ledger_time")
        if not rows:
            return None
        row = (*rows[0][1:], 0, 0)[:4]  # a ledger of an earlier version that is only read lacks the last two
        began, now, lag, waits_until = row
        if not all(type(value) is int for value in (began, now, waits_until, 0 if lag is None else lag)):
            raise self._damaged_time(row)  # one flipped bit in the file can turn a number into a text
        return CountedTime(abs(began), now, began > 0, lag, waits_until)

    def keep_counted(self, time: CountedTime, *, moved: int = 0) -> None:
        """Stores the counted time, in a transaction of its own. Raises `LedgerError`.

        :param moved: seconds by which the entries move whose times are not sure. If the lag is known, they then are.
        """
        began = time.began if time.confirmed else -time.began  # the sign stores `confirmed`
        row, sure, run = (began, time.now, time.lag, time.waits_until), time.lag is not None, self._connection.execute
        try:
            run("SAVEPOINT counted")
            try:
                done = run("UPDATE privacy_ledger_unsure SET at = at + ?, sure = ? WHERE NOT sure", (moved, sure))
                if done.rowcount and moved:
                    self._known.version = None
                run("INSERT OR REPLACE INTO privacy_ledger_time VALUES (1, ?, ?, ?, ?)", row)
            except BaseException:
                run("ROLLBACK TO counted")
                raise
            finally:
                run("RELEASE counted")
        except sqlite3.Error as error:
            raise LedgerError(f"the counted time could not be kept: {error}") from error

    def doubt_times(self) -> None:
        """Marks the times of all entries as not sure: no statement of the time was ever heard. Raises `LedgerError`."""
        began = 0 if (counted := self.counted()) is None else counted.began
        try:
            self._connection.execute(
                "INSERT OR IGNORE INTO privacy_ledger_unsure SELECT seq, MAX(at, ?), 0 FROM privacy_ledger", (began,)
            )
        except sqlite3.Error as error:
            raise LedgerError(f"the times of the entries could not be kept: {error}") from error

    def _later_times(self, after: int) -> dict[int, int]:
        """Returns the times of later entries whose own were not sure, by the entry's number. Raises `LedgerError`."""
        rows = self._rows_of_time("SELECT seq, at FROM privacy_ledger_unsure WHERE seq > ?", after)
        for row in rows:
            if not all(type(value) is int for value in row):
                raise self._damaged_time(row)
        return dict(rows)

    def _rows_of_time(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if "no such table" in str(error):  # a ledger of an earlier version that is only read
                return []
            raise LedgerError(f"the counted time cannot be read: {error}") from error

    def _damaged_time(self, row: tuple[Any, ...]) -> LedgerError:
        return LedgerError(
            f"the counted time of device {self.device!r} is damaged ({row!r}): how much of a period is over is no "
            "longer known, so this device must not take part any more"
        )

    def _head(self) -> tuple[int, bytes]:
        row = self._connection.execute("SELECT device, entries, hash FROM privacy_ledger_head").fetchone()
        if row is None or row[0] != self.device:
            raise LedgerError(
                f"the head of the privacy ledger of device {self.device!r} is missing or another device's; "
                f"a new store needs create_schema() first"
            )
        return row[1], row[2]

    def _first_hash(self) -> bytes:
        return hashlib.sha256(_GENESIS + self.device.encode()).digest()


def epsilon_server_of(
    charges: Sequence[Charge],
    *,
    delta: float,
    accountant: Accountant = "exact",
    adjacency: Adjacency = "add-or-remove",
) -> float:
    """Returns epsilon as `Ledger.epsilon_server` does, for charges from any source."""
    return math.inf if any(charge.raw for charge in charges) else _epsilon_of(charges, delta, accountant, adjacency)


def _epsilon_of(
    charges: Sequence[Charge], delta: float, accountant: Accountant, adjacency: Adjacency = "add-or-remove"
) -> float:
    """Returns epsilon of the noised values of these charges.

    If a record is replaced, an update also moves by at most two clip norms, which `replace-one` already counts.
    """
    halves = adjacency == "add-or-remove" and any(charge.unit == "record" for charge in charges)
    steps = [
        Step(
            charge.noise_multiplier / 2 if halves and charge.unit == "device" else charge.noise_multiplier,
            charge.sample_rate,
            charge.steps,
        )
        for charge in charges
    ]
    return epsilon(steps, delta=delta, accountant=accountant, adjacency=adjacency)


def _fields(task: str, round: int, charge: Charge, payload_digest: bytes) -> tuple[Any, ...]:
    """Returns one entry's columns, in the order of the schema."""
    exact = replace(charge, noise_multiplier=float(charge.noise_multiplier), sample_rate=float(charge.sample_rate))
    return task, round, *(getattr(exact, name) for name in _CHARGE), bytes(payload_digest)


def _columns(row: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns a row's columns, and those that later versions have added; a ledger that is only read may lack some."""
    lacking = len(_COLUMNS) - len(row)
    full = (*row, *_WITHOUT[len(_WITHOUT) - lacking :])
    return full[: -len(_LATER)], full[-len(_LATER) :]


def _entry(columns: tuple[Any, ...], later: tuple[Any, ...], *, not_before: int) -> LedgerEntry:
    (_, task, round, *values, payload_digest, _), (raw, at, *window) = columns, later
    charge = dict(zip(_CHARGE, values, strict=True))
    named = tuple(raw.split(_RAW_SEPARATOR)) if raw else ()
    trained_on = Period(*window) if any(window) else None
    return LedgerEntry(task, round, Charge(**charge, raw=named), payload_digest, max(at, not_before), trained_on)


def _link(previous: bytes, seq: int, fields: tuple[Any, ...], later: tuple[Any, ...]) -> bytes:
    """Returns the hash of one entry: over the previous hash, the entry's number and its columns (doubles, exactly).

    Later columns are included only if they are used, so that entries of earlier versions keep their hashes.
    """
    raw, *times = later
    used = later if any(times) else (raw,) if raw else ()
    return hashlib.sha256(previous + msgpack.packb([seq, *fields, *used])).digest()
