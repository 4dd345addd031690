"""Runs `hushfleet-edge listen` until its sound ends, or somebody stops it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hushfleet.data.form import SampleForm
from hushfleet.data.sound import Pcm
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.process import return_freed_memory
from hushfleet.edge_client.listen import sources
from hushfleet.edge_client.listen.kept_clips import KeptClips
from hushfleet.edge_client.listen.listener import SegmentListener
from hushfleet.edge_client.listen.model_in_use import ModelInUse
from hushfleet.errors import BadInput
from hushfleet.output import say

_log = logging.getLogger("hushfleet.edge")


def listen(config: DeviceConfig, file: Path, *, given: str | None, top: int) -> bool:
    """Returns whether Ctrl-C has ended it. Raises `BadInput`.

    :param file: the configuration's; that it has changed is said, because only a new start reads it.
    :param given: a sound file, or `-` for a pipe, in place of the microphone.
    :param top: classes to print of each segment.
    """
    if config.data.kind != "sound":
        raise BadInput(f"data.kind = {config.data.kind!r}: to listen needs kind = 'sound'")
    return_freed_memory()
    stop, key, caught = threading.Event(), threading.Event(), list[int]()

    def on_signal(number: int, frame: object) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGUSR1, lambda *_: key.set())
    if config.listen.keep == "key" and given != "-" and sys.stdin.isatty():
        threading.Thread(target=_press, args=(key,), daemon=True).start()
    clips, model, read = KeptClips(config), ModelInUse(config), _stamp_of(file)
    owners_broker: AbstractContextManager[Any] = nullcontext()
    if config.listen.mqtt is not None:
        from hushfleet.edge_client.listen.owners_broker import OwnersBroker

        owners_broker = OwnersBroker(config, config.listen.mqtt)
    with owners_broker as broker:
        while not stop.is_set():
            form = model.form
            listener = SegmentListener(form, config.listen, model, clips, key)

            def hear(pcm: Pcm | None, listener: SegmentListener = listener) -> None:
                for heard in listener.hear(pcm, time.time()):
                    at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
                    say(json.dumps({"at": at, **model.about, **heard.to_json(top)}))
                    if broker is not None and pcm is not None:
                        broker.tell(heard)

            with closing(_source(config, given, form, stop)) as source:
                for pcm in source:
                    hear(pcm)
                    model.look()
                    if read != (read := _stamp_of(file)):
                        _log.warning("%s has changed: start `listen` again, it still uses the old settings", file)
                    if stop.is_set() or model.form != form:  # a new task may have another sample rate
                        break
                hear(None)
            if model.form == form:
                break
    return signal.SIGINT in caught


def _source(config: DeviceConfig, given: str | None, form: SampleForm, stop: threading.Event) -> sources.SoundSource:
    if given is None:
        return sources.of_microphone(config.listen.microphone, form.sample_rate, stop)
    if given == "-":
        return sources.of_pipe(stop)
    return sources.of_file(Path(given), form.sample_rate, round(form.segment_s * form.sample_rate), form.hop)


def _stamp_of(file: Path) -> int | None:
    """Returns when a file was changed; None if it cannot be seen."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


def _press(key: threading.Event) -> None:
    """Sets the key at each Enter. The file is read, not the stream: its lock would outlive this thread at the end."""
    while os.read(0, 1024):
        key.set()
