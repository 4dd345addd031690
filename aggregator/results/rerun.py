"""Records how to repeat a run: the command, the task at that time, and digests of its inputs."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.results.result import Rerun
from hushfleet.data.samples import Samples
from hushfleet.toml_text import dotted, toml_value
from hushfleet.version import __version__

_PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "paho-mqtt", "msgpack", "cryptography")
_GIT_S = 10.0


def rerun(prepared: PreparedTask, *, runtime: str = "") -> Rerun:
    """Returns the record of a run of this process.

    :param runtime: the runtime that computed the gradients, if this machine did.
    """
    return Rerun(
        command=command_line(),
        task=toml_of(prepared.task.to_plain()),
        digests={"task package": prepared.spec_ref.digest.hex(), **input_digests(prepared)},
        commit=commit(),
        runtime=runtime,
    )


def input_digests(prepared: PreparedTask) -> dict[str, str]:
    """Returns the SHA-256 in hex of the inputs that a task names but does not contain."""
    digests = {}
    if prepared.dataset is not None:
        parts = {"training images": prepared.dataset.train, "test images": prepared.dataset.test}
        digests = {name: samples_digest(samples) for name, samples in parts.items() if len(samples)}
    method = Path(prepared.task.method.name.rpartition(":")[0])
    if method.suffix == ".py":
        digests["method file"] = hashlib.sha256(method.read_bytes()).hexdigest()
    return digests


def versions() -> dict[str, str]:
    """Returns the versions and the processor of the run: with other instructions, sums are rounded in another order."""
    found = {"hushfleet": __version__, "python": platform.python_version(), "platform": sys.platform}
    found["processor"] = _processor()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """Returns the command as typed, without a password in an address, and without `--resume`, to repeat the whole run.

    It is empty if no command was typed, as in a notebook.
    """
    program, words = Path(sys.argv[0]), [word for word in sys.argv[1:] if word != "--resume"]
    if program.name in ("", "-", "-c") or "ipykernel" in program.name:
        return ""
    is_ours = program.stem == "hushfleet" or program.parts[-3:] == ("aggregator", "commands", "__main__.py")
    typed = ["hushfleet"] if is_ours else ["python"] * (program.suffix == ".py") + [str(program)]
    return shlex.join([re.sub(r"://[^/\s]*@", "://", word) for word in (*typed, *words)])


def commit() -> str | None:
    """Returns the commit of the running source tree, with `-changed` if the tree differs; None outside a repository."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=_GIT_S)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an environment may be inside the repository of another project
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (head := git("rev-parse", "HEAD")) is None:
        return None
    return f"{head}-changed" if git("status", "--porcelain", "--untracked-files=no") else head


def samples_digest(samples: Samples) -> str:
    """Returns the SHA-256 of the shape, the images and the labels, in hex."""
    found = hashlib.sha256(json.dumps(samples.images.shape).encode())
    for each in samples.images:  # sound may still be in its files
        found.update(np.ascontiguousarray(each).data)
    found.update(np.ascontiguousarray(samples.labels.astype(samples.labels.dtype.newbyteorder("<"), copy=False)).data)
    return found.hexdigest()


def toml_of(plain: Mapping[str, Any]) -> str:
    """Returns the task file of a `Task.to_plain` result, with one key per line."""
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in dotted(plain).items())


def _processor() -> str:
    found = np.show_config(mode="dicts")
    extensions = found.get("SIMD Extensions", {}).get("found", []) if isinstance(found, dict) else []
    return f"{platform.machine()} {' '.join(extensions[-1:])}".strip()
