"""Limits a worker's process: its memory, its processor time, its files, and what it can reach.

`begin` limits what no import needs. `close` comes after the imports: memory is counted from there, so that the limit is
what DEVICE.toml gives to training, whatever the libraries have mapped. Then no new socket can be made, and no program
started (seccomp), and only the data and the installed software can be read (Landlock). Both need no privilege. Where a
kernel lacks one of them, the worker goes on without it (docs/security.md). `allow` comes before each job.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path

from hushfleet.edge_client.worker.job import Job

NICE = 5
MAX_FILES = 256
MAX_FILE_BYTES = 1 << 28
SPARE_CPU_S = 60
"""Beyond the round's deadline, at which the guardian ends a worker anyway."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22


def begin() -> None:
    """Ends this process with its guardian, and limits files and priority."""
    guardian = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian or guardian == 1:
        os._exit(1)  # it has ended before
    os.nice(NICE)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_FILES)
    _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)


def close(job: Job) -> None:
    """Limits memory to what the board gives, and closes what no job needs."""
    memory_bytes = job.config.memory_mib << 20
    uses_gpu = job.config.simulation is None and "onnxruntime" in sys.modules and _has_gpu()
    if not uses_gpu:  # CUDA maps more address space than any board has memory
        _lower(resource.RLIMIT_AS, _address_space_bytes() + memory_bytes)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if job.config.simulation is None:
        _restrict_files(job)
    _forbid_calls()


def allow(job: Job) -> None:
    """Gives a job its processor time, from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time() + (os.cpu_count() or 1) * job.plan.deadline_s) + SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _has_gpu() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _lower(kind: int, most: int) -> None:
    """Lowers a limit, and never raises one."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * resource.getpagesize()


def _prctl(option: int, *arguments: int) -> int:
    return int(_libc().prctl(option, *map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:4])))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# seccomp. In this order: socket, socketpair, connect, bind, execve, execveat, ptrace, process_vm_readv,
# process_vm_writev, io_uring_setup, unshare, mount, kill, tkill, tgkill, pidfd_open, pidfd_send_signal
_CALLS = {
    ("x86_64", 8): (0xC000003E, (41, 53, 42, 49, 59, 322, 101, 310, 311, 425, 272, 165, 62, 200, 234, 434, 424)),
    ("aarch64", 8): (0xC00000B7, (198, 199, 203, 200, 221, 281, 117, 270, 271, 425, 97, 40, 129, 130, 131, 434, 424)),
    ("arm", 4): (0x40000028, (281, 288, 283, 282, 11, 387, 26, 376, 377, 425, 337, 21, 37, 238, 268, 434, 424)),
}
_X32_CALLS = 0x40000000
_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000


def _forbid_calls() -> bool:
    """Refuses new sockets, other programs and other processes' memory; returns whether the kernel agreed."""
    name, pointer_bytes = os.uname().machine, struct.calcsize("P")
    if pointer_bytes == 4 and name.startswith(("arm", "aarch64")):  # 32 bits also run on a kernel of 64
        name = "arm"
    if (name, pointer_bytes) not in _CALLS:
        return False
    machine, calls = _CALLS[name, pointer_bytes]
    rows = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),  # a call of another machine's numbers
        (_LOAD, 0, 0, 0),
        (_ABOVE, len(calls) + 1, 0, _X32_CALLS),
        *((_EQUAL, len(calls) - place, 0, call) for place, call in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = b"".join(struct.pack("<HBBI", *row) for row in rows)
    program = ctypes.create_string_buffer(code)
    filter_ = struct.pack("@HP", len(rows), ctypes.addressof(program))
    held = ctypes.create_string_buffer(filter_)
    return _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(held)) == 0


# Landlock
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ALL_FILES = (1 << 13) - 1  # every right of the first version
_READ = 1 << 2 | 1 << 3  # read a file, list a folder
_EXECUTE = 1 << 0  # also to map a library
_OF_FILE = 1 << 2 | 1 << 0
_O_PATH = 0o10000000
_OF_THE_SYSTEM = ("/usr", "/lib", "/lib64", "/proc", "/sys", "/dev", "/etc/ld.so.cache", "/etc/localtime")
"""Nothing else of /etc, where a client that was installed by hand may have its key."""


def _restrict_files(job: Job) -> bool:
    """Lets this process read the data and the installed software, and write nothing; returns whether it holds."""
    call = _libc().syscall
    attributes = ctypes.create_string_buffer(struct.pack("<Q", _ALL_FILES), 8)
    ruleset = call(_CREATE_RULESET, attributes, ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    data = job.config.data
    places = (sys.prefix, sys.base_prefix, *sys.path, *_OF_THE_SYSTEM)
    loaded = {os.path.dirname(os.path.realpath(file)) for file in map(_file_of, list(sys.modules.values())) if file}
    own = [place for place in (data.path, data.held_out, data.unlabelled) if place]
    for place in {*places, *own, *loaded} - {""}:
        try:
            at = os.open(place, _O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = _READ | _EXECUTE if os.path.isdir(place) else _OF_FILE
        rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, at), 12)
        call(_ADD_RULE, ruleset, 1, rule, 0)
        os.close(at)
    held = call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return bool(held == 0)


def _file_of(module: object) -> str | None:
    """Returns the file of a package or module, which may be a link to another place than `sys.path` names."""
    return getattr(module, "__file__", None)
