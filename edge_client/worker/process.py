"""Starts a worker process for jobs of one task, watches it, and ends it: the guardian's side.

The worker gets a pipe and nothing else: no key, no other descriptor, no environment. A job lies in memory that it reads
once; the pipe carries its descriptor. The worker limits itself before it reads its first job (`limits`), waits for the
next one after an outcome, and dies with its guardian.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from hushfleet.edge_client.worker.frames import Frames, frame
from hushfleet.edge_client.worker.job import Died, Job, Outcome, Told
from hushfleet.errors import Malformed

KEPT_VARIABLES = ("HUSHFLEET_METHOD_FILE", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "TZ")
"""The only variables of the environment that a worker gets."""
MOST_OUTCOME_BYTES = 1 << 28
_PART_BYTES = 1 << 16
_ENTRY = (
    # Python's own hashes, where it has them: OpenSSL's take 4 MiB of memory
    "import importlib.util, sys; sys.modules.update({'_hashlib': None} if importlib.util.find_spec('_sha256') or "
    "importlib.util.find_spec('_sha2') else {}); "
    "pipe = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from hushfleet.edge_client.worker.main import main; main(pipe)"
)


class ChildProcess:
    """A `Workshop` whose jobs run in a process of their own, which stays until `give_up`.

    :param features: the board's file of features, which a worker gets open; None: each worker makes its own.
    """

    def __init__(self, features: Path | None = None) -> None:
        self._features = features
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._frames = Frames(MOST_OUTCOME_BYTES)
        self._heard: list[Told] = []

    @property
    def pid(self) -> int | None:
        """The worker's process id; None without one."""
        return None if self._process is None else self._process.pid

    def begin(self, job: Job) -> None:
        if self._process is not None and not self._is_idle():
            self.give_up()
        with _in_memory(frame(job)) as memory, self._opened(job) as file:
            if self._process is None:
                self._start()
            assert self._pipe is not None
            try:
                socket.send_fds(self._pipe, [b"j"], [memory.fileno(), *file])
            except OSError:
                self.give_up()
                raise

    @contextlib.contextmanager
    def _opened(self, job: Job) -> Iterator[tuple[int, ...]]:
        """Yields the descriptor of the file of features, if the job uses one and it can be opened."""
        try:
            if job.features == "none" or self._features is None:
                yield ()
                return
            access = os.O_RDWR if job.features == "make" else os.O_RDONLY
            file = os.open(self._features, access | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:  # a full disk
            yield ()
            return
        try:
            yield (file,)
        finally:
            os.close(file)

    def _is_idle(self) -> bool:
        """Whether a kept worker waits for a job: it lives, and has sent nothing after its outcome."""
        assert self._pipe is not None
        return self._receive(self._pipe) and self._frames.is_empty

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    _command(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._pipe, self._frames = ours, Frames(MOST_OUTCOME_BYTES)

    def poll(self) -> Outcome | None:
        if self._process is None or self._pipe is None:
            return None
        is_open = self._receive(self._pipe)
        try:
            while (message := self._frames.next()) is not None:
                if isinstance(message, Told):
                    self._heard.append(message)
                elif not isinstance(message, Job):
                    return message
        except Malformed as error:
            self._end()
            return Died(f"sent what no worker sends: {error}")
        if is_open:
            return None
        try:
            code = self._process.wait(timeout=1.0)  # the pipe is closed, so it has ended, or is about to
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self._end()
        return Died(_words_of(code))

    def told(self) -> list[Told]:
        heard, self._heard = self._heard, []
        return heard

    def give_up(self) -> None:
        self._end()
        self._heard = []

    def _receive(self, pipe: socket.socket) -> bool:
        """Reads what has come; returns False once the worker has closed the pipe."""
        while True:
            try:
                data = pipe.recv(_PART_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._frames.add(data)
            if self._frames.is_full:
                return True

    def _end(self) -> None:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Returns the worker's environment; further heaps of glibc would take address space."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | {"MALLOC_ARENA_MAX": "1"}


def _command(pipe: int) -> list[str]:
    """Returns the command of a worker: the same Python, which looks for packages only where this one does."""
    flags = ["-I", *(["-B"] if sys.dont_write_bytecode else []), *["-O"] * sys.flags.optimize]
    return [sys.executable, *flags, "-c", _ENTRY, str(pipe), *filter(None, sys.path)]


@contextlib.contextmanager
def _in_memory(data: bytearray) -> Iterator[FileIO]:
    """Yields a file in memory with these bytes; the card has no part in it."""
    with open(os.memfd_create("hushfleet-job"), "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        yield file


def _words_of(code: int) -> str:
    """Returns how a process ended, in words that depend on no data.

    :param code: as `subprocess.Popen.returncode`.
    """
    if code >= 0:
        return f"ended with status {code}"
    name = {signal.SIGKILL: "was killed, perhaps for its memory", signal.SIGXCPU: "used up its processor time"}
    try:
        return name.get(signal.Signals(-code), f"was ended by {signal.Signals(-code).name}")
    except ValueError:
        return f"was ended by signal {-code}"
