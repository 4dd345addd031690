"""The system's ONNX Runtime goes before the release's where it has CUDA, and never where it cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from hushfleet.edge_client import __main__
from hushfleet.edge_client.board.installed_runtime import use_installed_runtime
assert "onnxruntime" not in sys.modules, "it would be too late"
print(use_installed_runtime(sys.argv[1:]))
import onnxruntime
print(onnxruntime.__version__ == "7.7")
from hushfleet.learning import graph_session as session
print(session.ort is onnxruntime)
"""

WORKS = """
from onnxruntime.part import x
__version__ = '7.7'
class NodeArg: ...
def disable_telemetry_events(): ...
"""


@pytest.mark.parametrize(
    ("text", "cuda", "said"),
    [
        (WORKS, True, "True True True"),
        ("__version__ = '7.7'", False, "False False True"),
        ("import onnxruntime.part\nraise ImportError('compiled for NumPy 1')", True, "False False True"),
    ],
)
def test_it_is_taken_where_it_works(tmp_path: Path, text: str, cuda: bool, said: str) -> None:
    package = tmp_path / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    (package / "part.py").write_text("x = 1")
    if cuda:
        (package / "capi/libonnxruntime_providers_cuda.so").touch()
    command = [sys.executable, "-c", CODE, str(tmp_path / "nothing"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == said.split(), done.stderr
