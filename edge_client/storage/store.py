"""The persistent state of a device, in one SQLite file that survives a power cut at any moment.

Clipping and noising happen once: the encoded update, its ledger entry and the next state are written in one synced
transaction before the first byte leaves the device. Two noises on one update would average out, and an update without
its ledger entry would make epsilon too small; after a crash either all three rows are there or none is.

The file also holds the device's key, the aggregator's pinned key, the session counter and the blobs of the current
task. If the file is damaged, or missing although other files of the client exist, this is reported, and the file is
never replaced, because an empty ledger would be wrong. A file that was found to be an old copy stores this finding, and
can only be opened for inspection.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.arrivals import Arrivals
from hushfleet.edge_client.storage.kept import ChosenAccelerator, KeptModel, MembershipListMark
from hushfleet.edge_client.storage.round_commit import (
    CodedRound,
    OutboxEntry,
    StoredState,
)
from hushfleet.edge_client.storage.store_file import (
    advice,
    checked_key,
    connect,
    create,
    held,
    is_there,
    way_on,
)
from hushfleet.errors import CopiedStore, LedgerError, LostStore, Malformed, StoreError
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import Ledger
from hushfleet.schema import pack, unpack
from hushfleet.wire.format.identity import Identity

if TYPE_CHECKING:
    import numpy as np

    from hushfleet.edge_client.storage.round_commit import RoundCommit
    from hushfleet.methods.state import DeviceState
    from hushfleet.wire.format.fleet_messages import CarriedRounds

KEPT_TASKS = 4  # states and models of older tasks are dropped, so that years of tasks do not fill the card


K = TypeVar("K")


class DeviceStore(AbstractContextManager["DeviceStore"]):
    """The store of one device; one process at a time.

    :param path: the SQLite file; its folder is created.
    :param device: the device's id; a store that belongs to another device is refused.
    :param durable: False only in simulations: commits are then atomic but not synced to the disk.
    :param inspect: open an existing store read-only, beside a running client.
    :param in_fleet: whether an operator can give the device a new card; it changes the advice in errors.
    :param identity: FOR SIMULATION ONLY: the key of a store that is created now; by default a random one.

    Raises `StoreError` with advice if the file is locked, corrupt or not writable, `LostStore` if the ledger is missing
    or damaged, and `CopiedStore` if it was found that there is, or was, another copy of it.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str,
        durable: bool = True,
        inspect: bool = False,
        in_fleet: bool = False,
        identity: Identity | None = None,
    ) -> None:
        self.path = Path(path)
        self.device = device
        self.way_on = way_on(self.path, device=device, in_fleet=in_fleet)
        """The steps that a person takes if this store must not be used."""
        self._advice = advice(self.way_on)
        try:
            with ExitStack() as opened:
                if not inspect:
                    made = partial(create, device=device, durable=durable, identity=identity)
                    opened.enter_context(held(self.path, made, way_on=self.way_on, durable=durable))
                elif not is_there(self.path, way_on=self.way_on):
                    raise StoreError(f"there is no store at {self.path} yet; start the client once")
                self._connection = opened.enter_context(closing(connect(self.path)))
                self._key = checked_key(self._connection, self.path, device=device, inspect=inspect)
                self.ledger = Ledger(self._connection, device=device)
                self.answers = Answers(self._connection, self._transaction)
                self.arrivals = Arrivals(self._connection, self._transaction)
                if not inspect:
                    self._prepare_to_write(durable=durable)
                self._opened = opened.pop_all()
        except OSError as error:
            raise StoreError(f"the store {self.path} cannot be opened: {error}") from error
        except sqlite3.OperationalError as error:  # an error of the disk, which may be readable later
            raise StoreError(f"the store {self.path} is damaged or not readable: {error}. {self._advice}") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the second if SQLite's message quotes damaged text
            raise LostStore(f"the store {self.path} is damaged: {error}. {self._advice}") from error

    def close(self) -> None:
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # keys and counters

    @cached_property
    def identity(self) -> Identity:
        """The device's Ed25519 key, made when the store was created; it never leaves the store."""
        return Identity.from_bytes(self._key)

    @property
    def last_session(self) -> int:
        """The number of the last session that was counted; 0 before the first."""
        return int(self._fact("session") or 0)

    def next_session(self) -> int:
        """Returns a new session number, one more than the last; it is stored first."""
        session = self.last_session + 1
        self._set_facts("count a session", session=str(session).encode())
        return session

    @property
    def server_key(self) -> bytes | None:
        """The aggregator's pinned public key, or None before the first meeting."""
        return self._fact("server_key")

    def pin_server_key(self, key: bytes) -> None:
        self._set_facts("pin the aggregator's key", server_key=key)

    def epoch(self, scope: str) -> int:
        """Returns the newest start of an aggregator that was seen; 0 before the first.

        :param scope: its federation and key.
        """
        return int(self._fact(f"epoch {scope}") or 0)

    def pin_epoch(self, scope: str, epoch: int) -> None:
        self._set_facts("note the aggregator's start", **{f"epoch {scope}": str(epoch).encode()})

    def newest_membership_list(self, scope: str) -> MembershipListMark | None:
        """Returns the newest membership list that was accepted; None before the first. Raises `StoreError`.

        :param scope: its federation and the operator's key.
        """
        return self._kept(MembershipListMark, f"membership list {scope}", "mark of the newest membership list")

    def pin_membership_list(self, scope: str, mark: MembershipListMark) -> None:
        self._set_facts("note the newest membership list", **{f"membership list {scope}": pack(mark)})

    @property
    def is_enrolled(self) -> bool:
        """True if this store is enrolled in its fleet: earlier charges of its id are then in the ledger."""
        return self._fact("enrolled") is not None

    def note_enrolled(self, carried: Sequence[CarriedRounds] = ()) -> None:
        """Adds the charges of earlier cards with this id to the ledger, once, together with the note of the enrolment.

        Rounds that this store has charged itself do not change.
        """
        with self._transaction("note the enrolment"):
            if not self.is_enrolled:
                known = {(entry.task, entry.round) for entry in self.ledger.entries()}
                for each in carried:
                    charge = Charge(**{field.name: getattr(each, field.name) for field in fields(Charge)})
                    digest = hashlib.sha256(pack(each)).digest()
                    for round in (round for start, stop in each.rounds for round in range(start, stop)):
                        if (each.task, round) not in known:
                            self.ledger.charge(charge, task=each.task, round=round, payload_digest=digest)
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES ('enrolled', x'31')")

    def is_charged(self, task: str, round: int) -> bool:
        """Returns whether the ledger has an entry of this round, possibly of an earlier card."""
        return self._row("SELECT 1 FROM privacy_ledger WHERE task = ? AND round = ?", task, round) is not None

    @property
    def stopped_because(self) -> str | None:
        """The reason why this store must not train any more; None if it may."""
        reason = self._fact("stopped_because")
        return None if reason is None else reason.decode()

    def stop_for_good(self, reason: str) -> None:
        """Stops this store for good; nothing can undo this."""
        self._set_facts("note why this device has stopped", stopped_because=reason.encode())

    @property
    def task_digest(self) -> bytes | None:
        """The digest of the task package in use."""
        return self._fact("task_digest")

    @property
    def global_digest(self) -> bytes | None:
        """The digest of the global model that was used last."""
        return self._fact("global_digest")

    def set_current(self, *, task_digest: bytes, global_digest: bytes | None) -> None:
        self._set_facts("note the current task", task_digest=task_digest, global_digest=global_digest)

    def personalized_models(self) -> list[KeptModel]:
        """Returns the models of the last tasks that the device predicts with, the newest first. Raises `StoreError`."""
        with self._whole("personalized model"):
            found = self._rows("SELECT kept FROM own_models ORDER BY rowid DESC")
            return [unpack(KeptModel, data, what="the personalized model") for (data,) in found]

    def personalized_head(self, task: str | None = None) -> KeptModel | None:
        """Returns the head that was chosen last, of this task or, if none is given, of any. Raises `StoreError`."""
        heads = (kept for kept in self.personalized_models() if kept.choice is not None)
        return next((kept for kept in heads if task in (None, kept.task)), None)

    def keep_model(self, kept: KeptModel) -> None:
        """Stores the model of a task; it is the newest one."""
        with self._transaction("keep a personalized model"):
            self._connection.execute("INSERT OR REPLACE INTO own_models VALUES (?, ?)", (kept.task, pack(kept)))
            self._connection.execute(
                "DELETE FROM own_models WHERE rowid NOT IN (SELECT rowid FROM own_models ORDER BY rowid DESC LIMIT ?)",
                (KEPT_TASKS,),
            )

    @property
    def awaited(self) -> str:
        """Why the announced task has no model here yet, in words; empty if it has one."""
        return (self._fact("awaited") or b"").decode()

    def note_awaited(self, words: str) -> None:
        if words != self.awaited:
            self._set_facts("note why the task has no model", awaited=words.encode() or None)

    def accelerator(self) -> ChosenAccelerator | None:
        """Returns the last choice; None if there was nothing to choose. Raises `StoreError`."""
        return self._kept(ChosenAccelerator, "accelerator", "choice of an accelerator")

    def keep_accelerator(self, chosen: ChosenAccelerator) -> None:
        self._set_facts("keep the choice of an accelerator", accelerator=pack(chosen))

    def count_attempt(self, kind: str, what: str) -> int:
        """Counts how often `what` was started since it last ended normally, including this time.

        A crash that nobody can catch (out of memory, a fault in native code) must not repeat for ever.
        """
        before, _, count = (self._fact(f"attempt.{kind}") or b"").decode().rpartition(" ")
        attempts = int(count) + 1 if before == what else 1
        self._set_facts("count an attempt", **{f"attempt.{kind}": f"{what} {attempts}".encode()})
        return attempts

    def end_attempt(self, kind: str) -> None:
        """Notes that it ended, with or without success, and the process is alive."""
        self._set_facts("end an attempt", **{f"attempt.{kind}": None})

    # content-addressed blobs

    def blob(self, digest: bytes) -> bytes | None:
        """Returns stored bytes, or None if they are missing or do not match (bits in flash memory do flip)."""
        row = self._row("SELECT data FROM blobs WHERE digest = ?", digest)
        data: bytes | None = None if row is None else row[0]
        return data if data is not None and hashlib.sha256(data).digest() == digest else None

    def blob_digests(self) -> set[bytes]:
        """Returns the SHA-256 of every stored blob."""
        return {digest for (digest,) in self._rows("SELECT digest FROM blobs")}

    def put_blob(self, digest: bytes, data: bytes) -> None:
        if hashlib.sha256(data).digest() != digest:
            raise StoreError(f"the bytes given are not the blob {digest.hex()[:16]}; nothing was stored")
        with self._transaction("store a blob"):
            self._connection.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?)", (digest, data))
        self._connection.execute("PRAGMA shrink_memory")  # otherwise its pages would stay in the cache

    def drop_blobs(self, keep: Collection[bytes]) -> None:
        """Deletes all blobs but those in `keep`."""
        marks = ",".join("?" * len(keep))
        with self._transaction("drop old blobs"):
            self._connection.execute(f"DELETE FROM blobs WHERE digest NOT IN ({marks})", tuple(keep))

    # rounds

    def load_state(self, task: str) -> DeviceState | None:
        """Returns the state after the last committed round of the task, or None before the first."""
        stored = self.stored_state(task)
        if stored is None:
            return None
        from hushfleet.edge_client.storage.arrays import decoded_state

        with self._whole(f"state of task {task}"):
            return decoded_state(stored)

    def stored_state(self, task: str) -> StoredState | None:
        """Returns the bytes of the state after the last committed round of the task, or None before the first."""
        row = self._row("SELECT size, public, own, private FROM states WHERE task = ?", task)
        return None if row is None else StoredState(*row)

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        """Returns the encoding error that the updates have left so far, float32 `[size]`; zeros before the first."""
        from hushfleet.edge_client.storage.arrays import residual_of

        with self._whole(f"residual of task {task}"):
            return residual_of(self.stored_state(task), size=size)

    def package_of(self, task: str) -> bytes | None:
        """Returns SHA-256 of the package for which the rounds of this task were trained; None before the first."""
        return self._fact(f"package {task}")

    def own_params(self, task: str) -> np.ndarray | None:
        """Returns the model for predictions, float32 `[d]`: the head that the device chose, or its last training."""
        head = self.personalized_head(task)
        if head is not None:
            return head.params
        state = self.load_state(task)
        return None if state is None else state.own

    def has_been(self, task: str, public_digest: bytes) -> bool:
        """Returns whether the device once had the public state with this digest; a newcomer's is not stored."""
        query = "SELECT 1 FROM public_digests WHERE task = ? AND digest = ?"
        return self._row(query, task, public_digest) is not None

    def last_round(self, task: str) -> int | None:
        """Returns the last round of the task that this device committed."""
        ((last,),) = self._rows("SELECT MAX(round) FROM outbox WHERE task = ?", task)
        return None if last is None else int(last)

    def commit_round(self, commit: RoundCommit[DeviceState]) -> OutboxEntry:
        """Stores a round as `commit_coded` does."""
        from hushfleet.edge_client.storage.arrays import coded

        return self.commit_coded(coded(commit))

    def commit_coded(self, commit: CodedRound) -> OutboxEntry:
        """Stores ledger entry, encoded update and new state in one synced transaction: all or nothing.

        Raises `LedgerError` if this round was charged before, and `StoreError` if the disk is full; then nothing has
        changed, and nothing may be sent.
        """
        task, round, state, update = commit.task, commit.round, commit.state, commit.update
        from hushfleet.methods.public_bytes import public_digest

        known = public_digest(state.public, size=state.size)
        digest = hashlib.sha256(update).digest()
        with self._transaction(f"commit round {round} of task {task}"):
            self.ledger.charge(
                commit.charge, task=task, round=round, payload_digest=digest, at=commit.at, window=commit.window
            )
            run = self._connection.execute
            run(
                "INSERT INTO outbox VALUES (?, ?, ?, ?, ?, 'pending', NULL, ?)",
                (task, round, digest, update, commit.public_before, commit.context),
            )
            run("INSERT OR IGNORE INTO public_digests VALUES (?, ?)", (task, known))
            if commit.package is not None:
                run("INSERT OR IGNORE INTO facts VALUES (?, ?)", (f"package {task}", commit.package))
            run(
                "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?, ?)",
                (task, round, state.size, state.public, state.own, state.private),
            )
            # The aggregator asks only for the round that is open: older bytes will not be sent again. A public state
            # has up to a bit for each parameter, and those of all rounds would fill the card.
            run(
                "UPDATE outbox SET data = NULL, public_before = x'' "
                "WHERE (data IS NOT NULL OR length(public_before)) AND NOT (task = ? AND round = ?)",
                (task, round),
            )
            # Tasks that only ask have states without a personalized model: these must not displace states with one.
            run(
                "DELETE FROM states WHERE rowid NOT IN (SELECT rowid FROM states AS alike "
                "WHERE (alike.own IS NULL) = (states.own IS NULL) ORDER BY rowid DESC LIMIT ?)",
                (KEPT_TASKS,),
            )
        return OutboxEntry(task, round, update, digest, commit.public_before, "pending", context=commit.context)

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        """Returns the stored update of a round, or None if there is none."""
        columns = "data, digest, public_before, status, attached_digest, context"
        row = self._row(f"SELECT {columns} FROM outbox WHERE task = ? AND round = ?", task, round)
        if row is None:
            return None
        data, digest, *more = row
        if data is not None and hashlib.sha256(data).digest() != digest:
            raise StoreError(f"the update of round {round} in {self.path} is damaged. {self._advice}")
        return OutboxEntry(task, round, data or b"", digest, *more)

    def waiting(self) -> list[tuple[str, int]]:
        """Returns (task, round) of the updates that can still be sent and are not acknowledged."""
        query = "SELECT task, round FROM outbox WHERE status = 'pending' AND data IS NOT NULL ORDER BY rowid"
        return [(task, round) for task, round in self._rows(query)]

    def set_status(self, task: str, round: int, status: str) -> None:
        """Stores the status of an update: `pending`, `acked` or `refused:<code>`."""
        with self._transaction("note what became of an update"):
            self._connection.execute("UPDATE outbox SET status = ? WHERE task = ? AND round = ?", (status, task, round))

    def note_attached(self, task: str, round: int, digest: bytes) -> None:
        """Stores the digest of an update with the public state attached, before it is sent."""
        with self._transaction("note the digest of an update"):
            self._connection.execute(
                "UPDATE outbox SET attached_digest = ? WHERE task = ? AND round = ?", (digest, task, round)
            )

    # internal

    def _prepare_to_write(self, *, durable: bool) -> None:
        if self.stopped_because is not None:
            raise CopiedStore(self.stopped_because)
        # Both survive any crash of the process. With a log, a commit also survives a power cut at low cost; without it,
        # each byte is written once.
        run = self._connection.execute
        run(f"PRAGMA journal_mode = {'WAL' if durable else 'PERSIST'}")
        run(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        run("PRAGMA journal_size_limit = 8388608")
        # KiB. Without a log, a model that does not fit is written twice; with one, more memory has no benefit.
        run(f"PRAGMA cache_size = -{256 if durable else 16384}")

    def _fact(self, name: str) -> bytes | None:
        row = self._row("SELECT value FROM facts WHERE name = ?", name)
        if row is not None and not isinstance(row[0], bytes):  # one flipped bit in the file turns bytes into text
            raise LostStore(
                f"the store {self.path} is damaged: its {name} is a {type(row[0]).__name__}. {self._advice}"
            )
        return None if row is None else row[0]

    def _kept(self, kind: type[K], name: str, what: str) -> K | None:
        """Unpacks a fact; returns None if there is none. Raises `StoreError`."""
        data = self._fact(name)
        if data is None:
            return None
        with self._whole(what):
            return unpack(kind, data, what=f"the {what}")

    def _set_facts(self, purpose: str, /, **facts: bytes | None) -> None:
        """Stores facts; None deletes one."""
        with self._transaction(purpose):
            for name, value in facts.items():
                if value is None:
                    self._connection.execute("DELETE FROM facts WHERE name = ?", (name,))
                else:
                    self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _rows(self, query: str, *values: str | int | bytes) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the store {self.path} cannot be read: {error}. {self._advice}") from error

    def _row(self, query: str, *values: str | int | bytes) -> tuple[Any, ...] | None:
        return next(iter(self._rows(query, *values)), None)

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Turns the errors of unpacking into a `StoreError`."""
        try:
            yield
        except (Malformed, ValueError, TypeError) as error:
            raise StoreError(f"the {what} in {self.path} is damaged: {error}. {self._advice}") from error

    @contextmanager
    def _transaction(self, purpose: str) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            of_ledger = isinstance(error, LedgerError)
            cause = error.__cause__ if of_ledger else error
            if not isinstance(cause, sqlite3.Error) or (of_ledger and isinstance(cause, sqlite3.IntegrityError)):
                raise
            raise StoreError(
                f"could not {purpose} in {self.path}: {cause}; nothing was changed. "
                "Free some disk space, or check the card"
            ) from error
