"""The device's process in a real round: nothing of the server's packages is imported, and what memory it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.world.live import LiveFleet

pytestmark = pytest.mark.slow

# Refuses, and remembers, every attempt to import what `pip install hushfleet[edge]` does not bring.
GUARDED_CLIENT = """
import json, sys

REFUSED = {"torch", "torchvision", "onnx", "onnxscript", "opacus", "typer", "rich", "pydantic", "sklearn", "scipy",
           "matplotlib", "safetensors", "amqtt", "hushfleet.models", "hushfleet.aggregator", "hushfleet.simulator"}
tried = []


def refused(name):
    return name.partition(".")[0] in REFUSED or ".".join(name.split(".")[:2]) in REFUSED


class Guard:
    def find_spec(self, name, path=None, target=None):
        if refused(name):
            tried.append(name)
            raise ModuleNotFoundError(f"a device has no {name}", name=name)


sys.meta_path.insert(0, Guard())
from hushfleet.edge_client.__main__ import main

status = main(sys.argv[2:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
loaded = sorted(filter(refused, sys.modules))
with open(f"{sys.argv[1]}/{sys.argv[2].rpartition('devices/')[2].partition('/')[0]}.json", "w") as out:
    json.dump({"tried": tried, "loaded": loaded, "peak_kib": int(peak.split()[1])}, out)
sys.exit(status)
"""

# PyTorch takes half of the time that an aggregator needs to start with, and known networks' graphs are in the cache.
GUARDED_AGGREGATOR = """
import sys


class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"this aggregator has no {name}", name=name)


sys.meta_path.insert(0, Guard())
sys.argv += ["--device", "cpu"]
from hushfleet.aggregator.commands.main import main

main()
"""


def test_a_device_imports_nothing_of_the_server_and_the_server_no_torch(
    short_task: Any, audit: Any, finish: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = short_task(data={"devices": 2, "limit": 400}, round={"rounds": 2, "min_updates": 2})
    simulation = begin(task, tmp_path / "run", data_dir=None)
    reports = tmp_path / "reports"
    reports.mkdir()
    client = (sys.executable, "-c", GUARDED_CLIENT, str(reports))
    aggregator = (sys.executable, "-c", GUARDED_AGGREGATOR, "aggregator")
    fleet = LiveFleet(simulation, client=client, aggregator=aggregator)
    with fleet.running():
        finish(fleet)
    audit.check(simulation)
    found = {path.stem: json.loads(path.read_text()) for path in reports.iterdir()}
    assert set(found) == {"device-0", "device-1"}
    for device, report in found.items():
        assert report["tried"] == []
        assert report["loaded"] == []
        assert report["peak_kib"] > 1 << 14, "a process with NumPy and ONNX Runtime takes more than 16 MiB"
        with capsys.disabled():
            print(f"\n{device}: peak resident memory {report['peak_kib'] / 1024:.1f} MiB, {task.model.name}, 2 rounds")
