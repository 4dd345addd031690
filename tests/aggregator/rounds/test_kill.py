"""kill -9 at any point, then resume: bit by bit the model of the calm run, and the same ledger.

A small process imports everything once and forks a child for each kill point. The child plays a fixed run with a
profile hook that counts every call of Python and of C (SQLite, fsync, rename) inside the packages and sends itself
SIGKILL at the point it was given. A second child resumes and plays on.

Points are spread over the whole run, and each of `NAMED` is among them, before and after it. Code that moves keeps its
points, since whole packages are watched; code that no longer does what a name says makes the test fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
FLEET = str(TESTS / "support" / "fleet.py")
POINTS = 24

# What is called, and inside of which functions, the innermost first; others may be between them.
NAMED = {
    "the round is opened": ("execute", ("open_round",)),
    "the update is stored": ("execute", ("put_update", "_commit")),
    "the public state is stored": ("execute", ("put_public_state", "_commit")),
    "the charge is stored": ("execute", ("put_charge", "_commit")),
    "the three are committed": ("execute", ("transaction", "__exit__", "_commit")),
    "the checkpoint is synced": ("fsync", ("write_whole", "Checkpoints.write")),
    "the checkpoint is named": ("replace", ("write_whole", "Checkpoints.write")),
    "the checkpoint's folder is synced": ("fsync", ("sync_folder", "write_whole", "Checkpoints.write")),
    "the difference is synced": ("fsync", ("write_whole", "DifferenceFiles.write")),
    "the difference is named": ("replace", ("write_whole", "DifferenceFiles.write")),
    "the difference's folder is synced": ("fsync", ("sync_folder", "write_whole", "DifferenceFiles.write")),
    "the round is closed": ("execute", ("close_round", "close")),
    "the server half is stored": ("execute", ("put", "close")),
    "the close is committed": ("execute", ("transaction", "__exit__", "close")),
}

SCRIPT = r'''
import importlib.util, json, os, random, signal, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("fleet_of_tests", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
sys.modules["fleet_of_tests"] = helpers
spec.loader.exec_module(helpers)
out, points, named = Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
root = Path(sys.argv[1]).parents[2]
WATCHED = tuple(f"{root / package}{os.sep}" for package in ("aggregator", "hushfleet"))
SHOWN = {what for what, _ in named.values()}
FIXED = dict(devices=2, rounds=2, durable=True)

# what the devices send is fixed beforehand: a crash of the aggregator changes nothing on a device
calm = helpers.Fleet(out / "calm", **FIXED)
script = []
while not calm.engine.finished:
    calm.open()
    sent = {name: calm.update(name).data for name in calm.names}
    script.append(sent)
    for name, data in sent.items():
        calm.engine.accept(name, data)
    calm.engine.close()


def play(folder):
    fleet = helpers.Fleet(folder, **FIXED)
    engine = fleet.engine
    while not engine.finished:
        plan = engine.plan or fleet.open()
        for name, data in script[plan.round - 1].items():
            verdict = engine.accept(name, data)
            if not verdict.acknowledged:
                raise SystemExit(f"{folder}: {verdict}")
        engine.close()
    return fleet


def outcome(fleet):
    return [
        fleet.engine.global_digest.hex(),
        fleet.engine.checkpoints.path(2).read_bytes().hex(),
        [repr(row) for row in fleet.store.charges()],
        [repr(row) for row in fleet.store.devices()],
        [repr(row) for row in fleet.store.updates(1) + fleet.store.updates(2)],
        [row.phase for row in fleet.store.rounds()],
        [each.digest.hex() for each in fleet.engine.differences.refs],
        sorted(p.name for p in fleet.folder.iterdir() if p.suffix in (".safetensors", ".bin")),
    ]


def counted(folder, kill_at):
    """Plays with the hook; returns the labels of all points if it is never killed."""
    labels = []

    def hook(frame, event, argument):
        if not frame.f_code.co_filename.startswith(WATCHED):
            return
        name = getattr(argument, "__name__", "") if event.startswith("c_") else frame.f_code.co_name
        labels.append([event, name, chain(frame) if name in SHOWN else []])
        if len(labels) - 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(hook)
    play(folder)
    sys.setprofile(None)
    return labels


def chain(frame):
    """The functions that a call is inside of, the innermost first."""
    functions = []
    while frame is not None and frame.f_code.co_name != "play":
        functions.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return functions


def is_named(label, name):
    what, functions = named[name]
    at = iter(label[2])
    inside = all(any(is_called(found, function) for found in at) for function in functions)
    return label[1] == what and inside and is_called(label[2][0], functions[0])


def is_called(qualified, function):
    return qualified == function or qualified.endswith("." + function)


def forked(work):
    """Runs `work` in a child; its exit status and what it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            os.write(writer, json.dumps(work()).encode())
        except BaseException as error:
            os.write(writer, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(writer)
    data = b"".join(iter(lambda: os.read(reader, 65536), b""))
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), json.loads(data) if data else None


_, labels = forked(lambda: counted(out / "all", -1))
opened = next(i for i, label in enumerate(labels) if label[:2] == ["call", "open_round"])
places = {  # of each name, before and after, one place of all that there are
    f"{event} {name}": [
        i for i, label in enumerate(labels[opened:], opened) if label[0] == event and is_named(label, name)
    ]
    for name in named
    for event in ("c_call", "c_return")
}
random.seed("kill")
chosen = {random.choice(found): name for name, found in places.items() if found}
spread = [opened + i * (len(labels) - opened) // points for i in range(points)]
expected = outcome(calm)
results = []
for point in sorted({*spread, *chosen}):
    folder = out / f"kill-{point}"
    status, _ = forked(lambda: counted(folder, point))
    _, seen = forked(lambda: outcome(play(folder)))
    where = chosen.get(point, " ".join(labels[point][:2]))
    results.append([where, status, seen == expected, "" if seen == expected else repr(seen)[:300]])
print(json.dumps(results))
'''


def test_every_kill_ends_in_the_calm_runs_model(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, FLEET, str(tmp_path), str(POINTS), json.dumps(NAMED)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert len(results) > POINTS
    assert [r for r in results if r[1] != -9] == [], "every child was killed"
    assert [r for r in results if not r[2]] == []
    killed_at = {label for label, *_ in results}
    assert {f"{event} {name}" for name in NAMED for event in ("c_call", "c_return")} - killed_at == set()
