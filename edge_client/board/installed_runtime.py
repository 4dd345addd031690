"""Imports the ONNX Runtime of the board's own system instead of the release's, if the system's has CUDA.

A release contains what every board needs. CUDA belongs to the system: it fits one version of JetPack, and is ten times
as large. Therefore a build for it is installed in the system (docs/boards/jetson-orin.md), and imported from there.
NumPy and all other packages come from the release.
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
    """Imports that runtime; returns whether this worked. Call it before the first import of `onnxruntime`.

    :param folders: the folders in which packages are searched, as in `sys.path`.
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
