"""The ONNX Runtime of the board's own system in place of the release's, where that one has CUDA.

A release brings what every board needs. CUDA is of the system: of one version of JetPack, and ten times as large. So a
build for it is installed there (docs/boards/jetson-orin.md), and taken from there. NumPy and all others stay the
release's.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

_CUDA = "capi/libonnxruntime_providers_cuda.so"

_log = logging.getLogger("hushfleet.edge")


def use_installed_runtime(folders: Iterable[str]) -> bool:
    """Whether there is one that can be imported. Called before `onnxruntime` is imported for the first time.

    :param folders: where packages are looked for, as in `sys.path`.
    """
    for package in (Path(folder) / "onnxruntime" for folder in folders):
        spec = importlib.util.spec_from_file_location("onnxruntime", package / "__init__.py")
        if not (package / _CUDA).is_file() or spec is None or spec.loader is None:
            continue
        module = sys.modules["onnxruntime"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # it may be for another Python or NumPy
            for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
                del sys.modules[name]
            _log.warning("the ONNX Runtime in %s cannot be used: %s", package, error)
            return False
        _log.info("ONNX Runtime %s with CUDA is taken from %s", getattr(module, "__version__", "?"), package)
        return True
    return False
