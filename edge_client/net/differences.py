"""Applies the differences of a global model, in a process that ends: the client itself loads no NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from hushfleet.errors import Malformed, WireError

_ENTRY = "import sys; sys.path[:] = sys.argv[1:]; from hushfleet.edge_client.net.differences import main; main()"


def applied(base: bytes, chain: Sequence[bytes], *, task: str, counts: Sequence[int]) -> bytes:
    """Returns the model that results from `base`, both little-endian float32. Raises `WireError`.

    :param chain: each is a difference to the result of the one before it.
    :param counts: how many values each layer has, in order.
    """
    if "numpy" in sys.modules:  # in a simulation, whose boards share a process
        return _applied(base, chain, task, counts)
    flags = ["-I", *(["-B"] if sys.dont_write_bytecode else []), *["-O"] * sys.flags.optimize]
    command = [sys.executable, *flags, "-c", _ENTRY, *filter(None, sys.path)]
    done = subprocess.run(command, input=msgspec.msgpack.encode((base, chain, task, counts)), capture_output=True)
    if done.returncode:
        raise Malformed(done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "it could not be applied")
    return done.stdout


def main() -> None:
    """Applies the differences on standard input, and writes the model to standard output."""
    try:
        sys.stdout.buffer.write(_applied(*msgspec.msgpack.decode(sys.stdin.buffer.read())))
    except WireError as error:
        sys.exit(str(error))


def _applied(base: bytes, chain: Sequence[bytes], task: str, counts: Sequence[int]) -> bytes:
    import numpy as np

    from hushfleet.wire.format.difference import apply_difference

    params = np.frombuffer(base, "<f4").astype(np.float32, copy=False)
    for difference in chain:
        params = apply_difference(difference, params, task=task, counts=counts)
    return params.astype("<f4", copy=False).tobytes()
