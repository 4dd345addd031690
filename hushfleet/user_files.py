"""Finds the user's own files: folders for keys, data and caches (XDG), and objects in the user's Python files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

from hushfleet.errors import BadInput
from hushfleet.output import one_line

_DIGEST_BYTES = 32


def user_data_dir() -> Path:
    """Returns `$XDG_DATA_HOME/hushfleet`, or `~/.local/share/hushfleet`. Raises `BadInput` without a home folder."""
    return _xdg("XDG_DATA_HOME", ".local/share")


def user_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/hushfleet`, or `~/.cache/hushfleet`. Raises `BadInput` without a home folder."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def user_config_dir() -> Path:
    """Returns `$XDG_CONFIG_HOME/hushfleet`, or `~/.config/hushfleet`. Raises `BadInput` without a home folder."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def _xdg(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable, "")
    if os.path.isabs(base):  # the XDG specification says to ignore a relative path
        return Path(base) / "hushfleet"
    try:
        return Path.home() / fallback / "hushfleet"
    except RuntimeError:  # for example in a container whose image does not know the user id
        raise BadInput(f"this machine knows no home folder of user {os.getuid()}: set HOME, or {variable}") from None


def from_file(name: str, *, key: str) -> object:
    """Returns the object that `path/to/file.py:NAME` names. The file is run.

    :param key: the key of the task that has the name. Raises `BadInput` if the file or its code fails, or lacks NAME.
    """
    path, _, attribute = name.rpartition(":")
    module_name = f"hushfleet_{key.partition('.')[0]}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up their module there
    try:
        # Its bytecode may be stale: Python knows an edit by the file's size and second.
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    except OSError as error:
        raise BadInput(f"{key} = {name!r}: cannot read {path}: {error.strerror}") from error
    except Exception as error:  # from the user's own code
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        raise BadInput(f"{path}, line {line}, cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise BadInput(f"{key} = {name!r}: {path} has no {attribute!r}")
    return getattr(module, attribute)


def checked_folder(folder: Path, option: str = "--out") -> Path:
    """Returns the folder, which need not exist yet. Raises `BadInput` if nothing can be written into it."""
    _check_place(folder, (folder, *folder.absolute().parents), option)
    return folder


def checked_file(file: Path, option: str = "--out") -> Path:
    """Returns the file, which need not exist yet. Raises `BadInput` if it cannot be written."""
    if os.path.isdir(file) or str(file) == "-":
        what = "is no file: nothing is printed in its place" if str(file) == "-" else "is a folder"
        raise BadInput(f"{option} {file} {what}; give the name of a file")
    _check_place(file, file.absolute().parents, option)
    return file


def _check_place(place: Path, folders: Sequence[Path], option: str) -> None:
    """:param folders: the enclosing folders, innermost first; the first that exists must accept a new entry."""
    if one_line(str(place)) != str(place):  # devices' files could not name it, and a graph is not found in it
        raise BadInput(f"{option} {place}: the name has characters that do not show; choose another")
    existing = next(each for each in folders if os.path.lexists(each))
    if not existing.is_dir():
        what = "a link to nothing" if existing.is_symlink() else "a file, not a folder"
        raise BadInput(f"{option} {place}: {existing} is {what}; choose another place")
    import tempfile  # a board's guardian needs none of it

    try:
        with contextlib.suppress(FileNotFoundError):
            place.stat()  # its name may be too long
        with tempfile.TemporaryFile(dir=existing):  # permissions do not show this for root, see /proc
            pass
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise BadInput(
            f"{option} {place}: nothing can be written to {existing} ({why}); choose another place"
        ) from None


def refuse_others(folder: Path, ours: Collection[str]) -> None:
    """Raises `BadInput` if the folder has files that are not from a run, because the run's files would mix with them.

    :param ours: names that a run may have left; hidden files are ignored.
    """
    if not folder.exists():
        return
    others = sorted(each.name for each in folder.iterdir() if not each.name.startswith(".") and each.name not in ours)
    if others:
        shown = ", ".join(others[:5]) + f" and {len(others) - 5} more" * (len(others) > 5)
        raise BadInput(f"{folder} has other files: {shown}. A run needs a folder of its own; choose another --out")


def read_cached(path: Path) -> bytes | None:
    """Reads the content that `write_cached` wrote; None if it is missing, or damaged (for example by a power cut)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def write_cached(path: Path, content: bytes) -> None:
    """Writes the content and its SHA-256 to a file that appears whole or not at all. Raises `OSError`."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
