"""A device without memory says so, whoever met the lack first: Python, SQLite, ONNX Runtime or the dynamic linker."""

from __future__ import annotations

import errno
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hushfleet.edge_client.storage.declines import Declined, decline_reason
from hushfleet.errors import BadInput, BudgetExceeded, GraphRefused, StoreError
from support.edge import Package

# What native code raises depends on where the last byte was missing, so it is really made to miss some.
AT_ITS_LIMIT = """
import pickle, resource, sys
import numpy as np
import hushfleet.edge_client.agent
from hushfleet.edge_client.storage.declines import decline_reason
from hushfleet.learning.graph_session import GradientGraph

graph, layout, shape, params = pickle.load(sys.stdin.buffer)


def stop_growing():
    pages = int(open("/proc/self/statm").read().split()[0])
    size = (pages + int(sys.argv[2])) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


samples = 8192
images, labels = np.zeros((samples, *shape), np.float32), np.zeros(samples, np.int64)
out = np.empty_like(params)
try:
    if sys.argv[1] == "load":
        stop_growing()
    gradient = GradientGraph(graph, layout)
    if sys.argv[1] == "array":
        stop_growing()
        np.zeros(1 << 25)
    stop_growing()
    gradient(params, images, labels, out=out)
except Exception as error:
    refusal = decline_reason(error)
    print(type(error).__name__, refusal.code, refusal.reason, sep="|")
else:
    print("it was enough")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux only")
@pytest.mark.parametrize(
    ("when", "raised"), [("load", "GraphRefused"), ("run", "GraphRefused"), ("array", "MemoryError")]
)
def test_native_code_without_memory(package: Package, when: str, raised: str) -> None:
    """With so little that ONNX Runtime's own clean-up fails, it ends the process, which only counting attempts helps
    against (`DeviceStore.count_attempt`); so some amounts are tried, and none may be called anything but memory."""
    model = package.spec.model
    graph = package.blobs[model.gradient.digest]
    declined = []
    for spare_pages in (0, 96, 256):
        found = subprocess.run(
            [sys.executable, "-c", AT_ITS_LIMIT, when, str(spare_pages)],
            input=pickle.dumps((graph, model.layout, model.input_shape, package.initial)),
            env={"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=False,
        )
        if found.returncode not in (-signal.SIGABRT, -signal.SIGSEGV):
            assert found.returncode == 0, found.stderr
            declined.append(found.stdout.decode().strip().split("|"))
    assert any(raised in kind for kind, _, _ in declined)
    for _, code, reason in declined:
        assert (code, reason) == ("memory", "this device ran out of memory")


def caused(error: Exception, cause: BaseException) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("with 48 private samples"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("_mt19937.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        caused(GraphRefused("the graph cannot be executed"), RuntimeError("Failed to allocate memory for 16777216")),
        caused(StoreError("the store cannot be read"), MemoryError()),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_declined_as_one(error: Exception) -> None:
    assert decline_reason(error) == ("memory", "this device ran out of memory")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GraphRefused("the operator 'bad_alloc' is not allowed"), "graph"),
        (caused(GraphRefused("cannot load"), RuntimeError("no kernel for Loop")), "graph"),
        (caused(StoreError("full"), OSError(errno.ENOSPC, "No space left on device")), "disk"),
        (BudgetExceeded("epsilon"), "budget"),
        (BadInput("no folder"), "no-data"),
        (Declined("busy", "the deadline; std::bad_alloc"), "busy"),
        (ZeroDivisionError(), "error"),
    ],
    ids=str,
)
def test_other_errors_keep_their_code(error: Exception, code: str) -> None:
    assert decline_reason(error).code == code
