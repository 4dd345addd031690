"""Stores the aggregator's durable state in one SQLite file, next to the checkpoints of the global model.

Everything that an accepted update changes is one transaction, and so is the end of a round, so after
`kill -9` at any point the store has the state before or after a step, never a state in between.

The per-device public states (bit masks) are kept here, not in memory, so that memory does not grow with the fleet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hushfleet.aggregator.storage.schema import SCHEMA, SCHEMA_VERSION, UPGRADES
from hushfleet.errors import BadInput
from hushfleet.sqlite_file import Row, SqliteFile

FILE_NAME = "aggregator.sqlite"

_SELECT_DEVICE = "SELECT id, public_key, board, last_session, public_digest FROM devices"
_ADD_DEVICE = """
INSERT INTO devices (id, public_key, board, last_session) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    last_session = CASE WHEN public_key = excluded.public_key
        THEN max(last_session, excluded.last_session) ELSE excluded.last_session END,
    public_digest = CASE WHEN public_key = excluded.public_key THEN public_digest END,
    public_state = CASE WHEN public_key = excluded.public_key THEN public_state END,
    board = excluded.board, public_key = excluded.public_key
"""
_OPEN_ROUND = "SELECT round FROM rounds WHERE round = (SELECT MAX(round) FROM rounds) AND phase != 'closed'"
_SELECT_UPDATE = (
    "SELECT device, digest, payload_digest, bytes, shared, signal_square, noise_square, noise_variance, round "
    "FROM updates WHERE "
)
_READ_AHEAD = """
SELECT devices.id, devices.id, public_key, board, last_session, public_digest, public_state,
    device, digest, payload_digest, bytes, shared, signal_square, noise_square, noise_variance, round
FROM json_each(?) AS wanted JOIN devices ON devices.id = wanted.value
LEFT JOIN updates ON round = ? AND device = devices.id
"""


@dataclass(frozen=True)
class DeviceRow:
    """A device as the aggregator knows it.

    :param public_key: the key that verifies its messages and updates.
    :param last_session: the newest session number seen; a death message of an older session is ignored.
    :param public_digest: the digest of its stored public state, 16 bytes; None for a new device.
    """

    device: str
    public_key: bytes
    board: str
    last_session: int
    public_digest: bytes | None


@dataclass(frozen=True)
class StoredRound:
    """One round.

    :param phase: `open`, `unmask` or `closed`.
    :param cohort: device -> digest of its stored public state when the round opened; empty with secure aggregation.
    :param secure: the plan's `SecurePlan`, packed; None without secure aggregation.
    """

    round: int
    phase: str
    cohort: dict[str, bytes]
    global_digest: bytes
    result_digest: bytes | None
    opened_at: float
    closed_at: float | None
    metrics: dict[str, Any] | None
    secure: bytes | None


@dataclass(frozen=True)
class UpdateRow:
    """An accepted update without its bytes.

    :param digest: SHA-256 of the blob as it was received.
    :param payload_digest: SHA-256 of the blob without the public state and the signature.
    :param shared: how many values it has.
    :param signal_square: its squared norm minus the part of noise and quantisation; may be negative.
    :param noise_square: the expected squared norm of its noise.
    :param noise_variance: the variance of that squared norm.
    :param round: the round that it was trained for; 0 until it is stored.
    """

    device: str
    digest: bytes
    payload_digest: bytes
    size: int
    shared: int
    signal_square: float
    noise_square: float
    noise_variance: float
    round: int = 0


@dataclass(frozen=True)
class ChargeRow:
    """One charged round of a device, and the totals that the device itself reported with it.

    :param raw: values that the method sends without noise in addition to the update, one per line; see `Charge.raw`.
    """

    round: int
    device: str
    unit: str
    adjacency: str
    noise_multiplier: float
    noise_split: int
    sample_rate: float
    steps: int
    device_rounds: int
    device_epsilon: float
    raw: str = ""


class AggregatorStore(SqliteFile):
    """The store in a folder, for one thread of one process: a second process cannot open it.

    :param folder: created if it does not exist.
    :param durable: False leaves syncing to the operating system, for simulations only.

    Raises `StoreError` for a store that is damaged, locked or of another version.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = Path(folder)
        super().__init__(
            self.folder / FILE_NAME, schema=SCHEMA, version=SCHEMA_VERSION, upgrades=UPGRADES, durable=durable,
            exclusive=True, page_bytes=16384, timeout_s=2.0,
        )  # fmt: skip
        self._ahead: dict[str, tuple[Row, bytes | None, Row]] = {}
        self._ahead_round = self._ahead_changes = 0

    @staticmethod
    def exists(folder: Path) -> bool:
        """Returns whether a run was stored in `folder` before."""
        return (Path(folder) / FILE_NAME).exists()

    @contextmanager
    def read_ahead(self, round: int, devices: Iterable[str]) -> Iterator[None]:
        """Reads what `device`, `public_state` and `update` of this round return for these devices, in one query; they
        return it until something is written."""
        listed = json.dumps(list(devices))
        found = {row[0]: (row[1:6], row[6], row[7:]) for row in self.rows(_READ_AHEAD, (listed, round))}
        self._ahead, self._ahead_round, self._ahead_changes = found, round, self.changes
        try:
            yield
        finally:
            self._ahead = {}

    def _read(self, device: str) -> tuple[Row, bytes | None, Row] | None:
        """Returns the rows of a device and of its update that were read ahead."""
        return self._ahead.get(device) if self._ahead and self.changes == self._ahead_changes else None

    # the run

    def get(self, key: str) -> bytes | None:
        """Returns a value of the run; None if it was never put."""
        row = self.row("SELECT value FROM run WHERE key = ?", (key,))
        return None if row is None else bytes(row[0])

    def put(self, key: str, value: bytes) -> None:
        """Stores a value of the run."""
        self.write("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

    def check_same_task(self, task: str, spec_digest: bytes) -> None:
        """Binds the store to one task package: mixing two would spend privacy on a model that belongs to neither.

        Raises `BadInput` for another package.
        """
        known = self.get("spec_digest")
        if known is None:
            with self.transaction():
                self.put("task", task.encode())
                self.put("spec_digest", spec_digest)
        elif known != spec_digest:
            raise BadInput(
                f"{self.folder} holds the run {(self.get('task') or b'').decode()}, and the task file or the software "
                "has changed since; resume with the former ones, or start a new run in another folder"
            )

    # devices

    def device(self, device: str) -> DeviceRow | None:
        """Returns a device by id; None if it was never seen."""
        ahead = self._read(device)
        row = self.row(f"{_SELECT_DEVICE} WHERE id = ?", (device,)) if ahead is None else ahead[0]
        return None if row is None else DeviceRow(*row)

    def devices(self) -> list[DeviceRow]:
        """Returns all devices that were ever seen, by id."""
        return [DeviceRow(*row) for row in self.rows(f"{_SELECT_DEVICE} ORDER BY id")]

    def add_device(self, device: str, *, public_key: bytes, board: str = "", session: int = -1) -> None:
        """Adds one device, as `add_devices` does."""
        self.write(_ADD_DEVICE, (device, public_key, board, session))

    def add_devices(self, rows: Iterable[tuple[str, bytes, str, int]], *, replaced: Collection[str] = ()) -> None:
        """Adds devices (ids, keys, boards and sessions) in one transaction.

        For a device that is stored with the same key, only board and session are updated. With another key it is
        another device: the data of the former device are dropped.

        :param replaced: the devices with another key. The open round stores them as new cards, and drops the declines
            of the former devices.
        """
        with self.transaction():
            self.write_all(_ADD_DEVICE, rows)
            for device in replaced:
                self.write(f"INSERT OR IGNORE INTO new_cards SELECT round, ? FROM ({_OPEN_ROUND})", (device,))
                self.write(f"DELETE FROM declines WHERE device = ? AND round = ({_OPEN_ROUND})", (device,))

    def public_state(self, device: str) -> bytes | None:
        """Returns `PublicState.to_bytes()` of the device's stored public state; None for a new device."""
        if (ahead := self._read(device)) is not None:
            return ahead[1]
        row = self.row("SELECT public_state FROM devices WHERE id = ?", (device,)) or (None,)
        found: bytes | None = row[0]
        return found

    def put_public_state(self, device: str, *, digest: bytes, state: bytes) -> None:
        """Stores the public state of a device that `add_device` has added."""
        self.write("UPDATE devices SET public_digest = ?, public_state = ? WHERE id = ?", (digest, state, device))

    # rounds

    def open_round(
        self,
        round: int,
        *,
        cohort: Mapping[str, bytes],
        global_digest: bytes,
        at: float,
        secure: bytes | None = None,
    ) -> None:
        """Stores a round that opens.

        :param cohort: device -> digest of its public state; empty with secure aggregation.
        :param at: unix seconds.
        :param secure: the packed `SecurePlan`; None without secure aggregation.
        """
        listed = json.dumps({device: digest.hex() for device, digest in cohort.items()})
        self.write(
            "INSERT INTO rounds VALUES (?, 'open', ?, ?, NULL, ?, NULL, NULL, ?)",
            (round, listed, global_digest, at, secure),
        )

    def fix_sum(self, round: int, *, secure: bytes) -> None:
        """Ends the adding of updates to secure aggregation: `secure` says which devices are in the sum."""
        self.write("UPDATE rounds SET phase = 'unmask', secure = ? WHERE round = ?", (secure, round))

    def close_round(self, round: int, *, result_digest: bytes, metrics: Mapping[str, Any], at: float) -> None:
        """Marks a round closed and drops the bytes of its updates; call it inside `transaction`."""
        self.write(
            "UPDATE rounds SET phase = 'closed', result_digest = ?, metrics = ?, closed_at = ? WHERE round = ?",
            (result_digest, json.dumps(metrics), at, round),
        )
        self.write("UPDATE updates SET data = NULL, public_before = NULL WHERE summed_in = ?", (round,))
        self.write("UPDATE answers SET data = NULL WHERE round = ?", (round,))

    def rounds(self) -> list[StoredRound]:
        """Returns all rounds, oldest first."""
        return [_stored_round(row) for row in self.rows("SELECT * FROM rounds ORDER BY round")]

    def last_round(self) -> StoredRound | None:
        """Returns the newest round; None before the first."""
        row = self.row("SELECT * FROM rounds ORDER BY round DESC LIMIT 1")
        return None if row is None else _stored_round(row)

    @property
    def last_closed_round(self) -> int:
        """The number of the last closed round; 0 before the first."""
        ((last,),) = self.rows("SELECT MAX(round) FROM rounds WHERE phase = 'closed'")
        return int(last or 0)

    def put_controls(self, round: int, controls: Mapping[str, float], *, since: int) -> None:
        """Stores the controls of a buffered round that opens; its late updates are checked against them.

        :param since: the oldest round whose updates may still come.
        """
        kept = {number: each for number, each in self.controls().items() if number >= since}
        self.put("controls", json.dumps(kept | {round: dict(controls)}).encode())

    def controls(self) -> dict[int, dict[str, float]]:
        """Returns the controls of the buffered rounds whose updates may still come, by round."""
        return {int(round): controls for round, controls in json.loads(self.get("controls") or b"{}").items()}

    # differences between global models

    def differences(self) -> list[tuple[bytes, bytes]]:
        """Returns SHA-256 and bytes of the kept differences, newest first."""
        rows = self.rows("SELECT value FROM run WHERE key LIKE 'difference %' ORDER BY key DESC")
        return [(value[:32], value[32:]) for (value,) in rows]

    def put_difference(self, round: int, digest: bytes, data: bytes) -> None:
        """Stores the difference that leads to the model after `round` rounds."""
        self.put(f"difference {round:09d}", digest + data)

    def drop_differences(self, *, before: int | None) -> None:
        """Drops the differences of rounds before this one; None drops all."""
        end = "difference :" if before is None else f"difference {before:09d}"  # ":" comes after the digits
        self.write("DELETE FROM run WHERE key >= 'difference ' AND key < ?", (end,))

    # updates

    def put_update(
        self, round: int, row: UpdateRow, *, data: bytes, public_before: bytes, summed_in: int | None = None
    ) -> None:
        """:param round: the round that the update was trained for.
        :param public_before: the public state that is needed to read `data`, kept until the sum is closed.
        :param summed_in: the round that sums it, if that is a later one: a buffered round accepts older updates.
        """
        columns = (round, *_columns(row)[:-1], data, public_before, round if summed_in is None else summed_in)
        self.write("INSERT INTO updates VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", columns)

    def update(self, round: int, device: str) -> UpdateRow | None:
        """Returns a device's accepted update for a round, also after the round was closed; None without one."""
        ahead = self._read(device) if round == self._ahead_round else None
        row = self.row(f"{_SELECT_UPDATE} round = ? AND device = ?", (round, device)) if ahead is None else ahead[2]
        return None if row is None or row[0] is None else UpdateRow(*row)

    def updates(self, round: int) -> list[UpdateRow]:
        """Returns the accepted updates in the sum of a round, ordered by device, without their bytes."""
        rows = self.rows(f"{_SELECT_UPDATE} summed_in = ? ORDER BY device, round", (round,))
        return [UpdateRow(*row) for row in rows]

    def newest_update(self, device: str, *, after: int) -> int:
        """Returns the newest round for which an update of the device was accepted; 0 if there is none.

        :param after: only later rounds are searched, because a year has many rounds.
        """
        ((last,),) = self.rows("SELECT MAX(round) FROM updates WHERE round > ? AND device = ?", (after, device))
        return int(last or 0)

    def count_summed(self, round: int, device: str) -> int:
        """Counts the updates of a device in the sum of a round."""
        ((count,),) = self.rows("SELECT COUNT(*) FROM updates WHERE summed_in = ? AND device = ?", (round, device))
        return int(count)

    def update_data(self, round: int, device: str) -> tuple[bytes, bytes] | None:
        """Returns blob and public state of a device's update for a round; None after its sum is closed."""
        query = "SELECT data, public_before FROM updates WHERE round = ? AND device = ? AND data IS NOT NULL"
        row = self.row(query, (round, device))
        return None if row is None else (row[0], row[1])

    def has_open_update(self, device: str) -> bool:
        """Returns whether an update of the device was accepted in the open round."""
        query = f"SELECT 1 FROM updates WHERE summed_in = ({_OPEN_ROUND}) AND device = ?"
        return self.row(query, (device,)) is not None

    def held_models(self, *, until: int) -> dict[str, bytes]:
        """Returns device -> SHA-256 of the global model of its last update among the sums up to round `until`."""
        latest = "SELECT device, MAX(round) AS round FROM updates WHERE summed_in <= ? GROUP BY device"
        return dict(self.rows(f"SELECT device, global_digest FROM rounds JOIN ({latest}) USING (round)", (until,)))

    def summed_models(self, round: int) -> list[tuple[str, bytes]]:
        """Returns the device and the SHA-256 of its training's global model for each update in the sum of a round,
        each device's older updates first."""
        query = "SELECT device, global_digest FROM updates JOIN rounds USING (round) WHERE summed_in = ?"
        return [(device, digest) for device, digest in self.rows(f"{query} ORDER BY device, round", (round,))]

    def latest_updates(self) -> dict[str, tuple[int, bytes]]:
        """Returns device -> round and digest of its last accepted update, for devices with a stored public state."""
        rows = self.rows(
            "SELECT device, MAX(round), digest FROM updates JOIN devices ON id = device "
            "WHERE public_digest IS NOT NULL GROUP BY device"
        )
        return {device: (round, digest) for device, round, digest in rows}

    # answers of a committee's members

    def put_answer(self, round: int, device: str, data: bytes, *, digest: bytes) -> None:
        """:param digest: SHA-256 of `data`, which is kept until the round is closed."""
        self.write("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", (round, device, digest, len(data), data))

    def answer_digest(self, round: int, device: str) -> bytes | None:
        """Returns the SHA-256 of a device's accepted answer, also after the round was closed; None without one."""
        row = self.row("SELECT digest FROM answers WHERE round = ? AND device = ?", (round, device))
        return None if row is None else row[0]

    def answers(self, round: int) -> dict[str, bytes]:
        """Returns member -> its answer, for a round that is not closed."""
        return dict(self.rows("SELECT device, data FROM answers WHERE round = ? ORDER BY device", (round,)))

    def answer_sizes(self, round: int) -> list[int]:
        """Returns the size of each accepted answer in bytes, also after the round was closed."""
        return [size for (size,) in self.rows("SELECT bytes FROM answers WHERE round = ? ORDER BY device", (round,))]

    # declines, refusals, privacy

    def put_decline(self, round: int, device: str, *, code: str, reason: str) -> None:
        """Stores that a device will send no update in a round."""
        self.write("INSERT OR REPLACE INTO declines VALUES (?, ?, ?, ?)", (round, device, code, reason))

    def declines(self, round: int | None = None) -> list[Row]:
        """Returns (round, device, code, reason) of each decline in one round or in all."""
        return self.rows("SELECT * FROM declines WHERE ?1 IS NULL OR round = ?1 ORDER BY round, device", (round,))

    def new_cards(self, round: int) -> set[str]:
        """Returns the devices that came with another key while the round was open."""
        return {device for (device,) in self.rows("SELECT device FROM new_cards WHERE round = ?", (round,))}

    def count_refusal(self, device: str, code: str, *, count: int = 1) -> None:
        """Adds `count` to the number of refusals of a device with this code."""
        self.write(
            "INSERT INTO refusals VALUES (?1, ?2, ?3) ON CONFLICT (device, code) DO UPDATE SET count = count + ?3",
            (device, code, count),
        )

    def refusals(self) -> dict[str, dict[str, int]]:
        """Returns device -> code -> number of refusals."""
        counted: dict[str, dict[str, int]] = {}
        for device, code, count in self.rows("SELECT * FROM refusals ORDER BY device, code"):
            counted.setdefault(device, {})[code] = count
        return counted

    def put_fault(self, round: int, device: str, *, code: str) -> int:
        """Stores that an update signed by the device itself was refused.

        Returns in how many rounds this has happened; 0 if it was already stored for this round.
        """
        if not self.write("INSERT OR IGNORE INTO faults VALUES (?, ?, ?)", (round, device, code)):
            return 0
        return int(self.rows("SELECT COUNT(*) FROM faults WHERE device = ?", (device,))[0][0])

    def faults(self) -> dict[str, int]:
        """Returns device -> in how many rounds an update signed by it was refused."""
        return dict(self.rows("SELECT device, COUNT(*) FROM faults GROUP BY device"))

    def put_charge(self, row: ChargeRow) -> None:
        """Stores the charge of one device in one round."""
        self.write("INSERT INTO privacy VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _columns(row))

    def charge(self, device: str, round: int) -> ChargeRow:
        """Returns the charge of an accepted update."""
        return ChargeRow(*self.rows("SELECT * FROM privacy WHERE device = ? AND round = ?", (device, round))[0])

    def charged_before(self, device: str, round: int) -> tuple[int, int]:
        """Returns the newest earlier round with an accepted update of the device, and the number of rounds that the
        device reported as charged by then; zeros without one."""
        query = "SELECT round, device_rounds FROM privacy WHERE device = ? AND round < ? ORDER BY round DESC LIMIT 1"
        row = self.row(query, (device, round))
        return (0, 0) if row is None else (row[0], row[1])

    def charges(self, round: int | None = None) -> list[ChargeRow]:
        """Returns all charges, ordered by device and round; or the charges of the updates in one sum."""
        query, order = "SELECT privacy.* FROM privacy", "ORDER BY device, round"
        if round is None:
            return [ChargeRow(*row) for row in self.rows(f"{query} {order}")]
        summed = "JOIN updates USING (round, device) WHERE summed_in = ?"
        return [ChargeRow(*row) for row in self.rows(f"{query} {summed} {order}", (round,))]


def _columns(row: UpdateRow | ChargeRow) -> Row:
    return tuple(vars(row).values())


def _stored_round(row: Row) -> StoredRound:
    number, phase, cohort, global_digest, result_digest, opened_at, closed_at, metrics, secure = row
    listed = {device: bytes.fromhex(digest) for device, digest in json.loads(cohort).items()}
    parsed = None if metrics is None else json.loads(metrics)
    return StoredRound(number, phase, listed, global_digest, result_digest, opened_at, closed_at, parsed, secure)


def refuse_used(folder: Path) -> None:
    """Raises `BadInput` if a run is stored there already, so that a new run cannot overwrite it."""
    if AggregatorStore.exists(folder):
        raise BadInput(f"{folder} holds a run already; go on with it by --resume, or choose another --out")
