"""Calls a function in a process that ends, so that a board's guardian does without NumPy and keeps its memory small."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import msgspec

from hushfleet.errors import HushfleetError

_ENTRY = "import sys; sys.path[:] = sys.argv[1:]; from hushfleet.apart import main; main()"


def apart(function: str, *arguments: Any) -> Any:
    """Returns what the function returns for these arguments: values that msgpack keeps.

    :param function: `module:function`. If NumPy is loaded here, as in a simulation, it is called here.

    Raises `HushfleetError` with the text of the function's own.
    """
    if "numpy" in sys.modules:
        return _called(function, arguments)
    flags = ["-I", *(["-B"] if sys.dont_write_bytecode else []), *["-O"] * sys.flags.optimize]
    command = [sys.executable, *flags, "-c", _ENTRY, *filter(None, sys.path)]
    done = subprocess.run(command, input=msgspec.msgpack.encode((function, arguments)), capture_output=True)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise HushfleetError(words or f"{function} ended with status {done.returncode}")
    return msgspec.msgpack.decode(done.stdout)


def main() -> None:
    """Calls the function that standard input names, and writes its result to standard output."""
    function, arguments = msgspec.msgpack.decode(sys.stdin.buffer.read())
    try:
        sys.stdout.buffer.write(msgspec.msgpack.encode(_called(function, arguments)))
    except HushfleetError as error:
        sys.exit(str(error))


def _called(function: str, arguments: Any) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
