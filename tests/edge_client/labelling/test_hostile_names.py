"""Names of files and classes that command a terminal, through each command of a board."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.data.form import one_form
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import notes_in
from hushfleet.edge_client.labelling.desk import Desk
from support.edge import Bench
from support.hostile import HOSTILE, HOSTILE_FILE, SHOWN, SHOWN_FILE, assert_harmless
from support.pictures import a_picture


def said_by(capsys: Any, *words: object, code: int = 0) -> str:
    """What a command writes to both streams."""
    assert main([str(word) for word in words]) == code
    said = "".join(capsys.readouterr())
    assert_harmless(said)
    return said


def test_add(trained: Bench, device_toml: Path, photographs: Path, tmp_path: Path, capsys) -> None:
    photo = a_picture(tmp_path / "card" / f"{HOSTILE_FILE}.png")
    said = said_by(capsys, "add", device_toml, photo, "--label", "leaf")
    name = f"{SHOWN_FILE}.png"
    assert f"{tmp_path}/card/{name}: added as {photographs}/leaf/{name}\n" in said
    assert (photographs / "leaf" / photo.name).read_bytes() == photo.read_bytes(), "its name is the true one"
    assert f"{name} is there already" in said_by(capsys, "add", device_toml, photo, "--label", "leaf")
    photo.write_bytes(b"no image")
    assert f"error: {tmp_path}/card/{name} cannot" in said_by(
        capsys, "add", device_toml, photo, "--label", "leaf", code=2
    )
    assert f"label {HOSTILE!r} is no" in said_by(capsys, "add", device_toml, photo, "--label", HOSTILE, code=2)


def test_status(trained: Bench, device_toml: Path, photographs: Path, capsys) -> None:
    broken = photographs / "leaf" / f"{HOSTILE_FILE}.png"
    broken.write_bytes(b"no image")
    os.utime(broken, (1, 1))
    a_picture(photographs / HOSTILE_FILE / "1.png")
    trained.train(2)
    training = notes_in(trained.store.path.parent)[1]
    training.keep(f"training failed at {HOSTILE_FILE}")
    trained.store.close()
    said = said_by(capsys, "status", device_toml, "--details")
    assert f"as leaf/{SHOWN_FILE}.png" in said
    assert f"as {SHOWN_FILE}/1.png" in said
    assert f"training failed at {SHOWN_FILE}" in said
    report = json.loads(said_by(capsys, "status", device_toml, "--json"))
    assert f"as leaf/{HOSTILE_FILE}.png" in report["data"]["why"]


def test_predict(trained: Bench, device_toml: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    classes = tuple(f"{place}{HOSTILE}" for place in range(10))
    model = replace(trained.server.package.spec.model, class_names=classes, input_shape=(1, 8, 8))
    package, blob = trained.server.package.with_spec(model=model).spec.to_bytes(), trained.store.blob
    digest = trained.store.task_digest
    monkeypatch.setattr(
        "hushfleet.edge_client.storage.store.DeviceStore.blob",
        lambda store, asked: package if asked == digest else blob(asked),
    )
    photo = a_picture(tmp_path / f"{HOSTILE_FILE}.png")
    said = said_by(capsys, "predict", device_toml, photo)
    assert f"{tmp_path}/{SHOWN_FILE}.png: by " in said
    assert f"%  {said.split('%  ')[1][0]}{SHOWN}\n" in said
    answer = json.loads(said_by(capsys, "predict", device_toml, photo, "--json", "--top", "10"))
    assert {one_form(name) for name in answer["classes"]} == set(classes)
    photo.write_bytes(b"no image")
    assert f"error: {tmp_path}/{SHOWN_FILE}.png cannot" in said_by(capsys, "predict", device_toml, photo, code=2)


def test_label(trained: Bench, board: DeviceConfig, photographs: Path, tmp_path: Path, capsys) -> None:
    inbox = tmp_path / "inbox"
    same = a_picture(inbox / "1.png").read_bytes()
    (photographs / "leaf" / f"{HOSTILE_FILE}.png").write_bytes(same)
    (inbox / f"{HOSTILE_FILE}.png").write_bytes(same)
    os.utime(inbox / f"{HOSTILE_FILE}.png", (1, 1))
    desk = Desk(board)
    shown = desk.next()
    assert shown.image == "1.png"
    assert shown.unreadable == (
        f"{HOSTILE_FILE + '.png'!a}: the name has characters that cannot be shown; rename the file",
    )
    shown = desk.tap("1.png", "leaf", shown.version)
    assert f"1.png is there already (trained on): {photographs}/leaf/{SHOWN_FILE}.png. This copy was put" in shown.said


def test_arguments(device_toml: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["status", str(device_toml), f"--{HOSTILE_FILE}"])
    said = capsys.readouterr().err
    assert SHOWN_FILE.split(r"\n")[0] in said
    assert_harmless(said.replace("\nERROR   all", ""))
    assert f"there is no file {SHOWN_FILE}.toml" in said_by(capsys, "status", f"{HOSTILE_FILE}.toml", code=2)
