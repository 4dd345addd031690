"""Starts child processes that never outlive their parent, no matter how it dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# A small Python process sets this between fork and exec, because `preexec_fn` is unsafe in a process with threads.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys;"
    "ctypes.CDLL(None).prctl(1, 9);"
    "os.getppid() == int(sys.argv[1]) or os._exit(1);"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def dies_with_parent(command: Sequence[str]) -> list[str]:
    """Returns the command so that the kernel kills it when its parent dies; unchanged if the kernel is not Linux.

    For the kernel the parent is the thread that starts the command, so that thread must stay alive.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
