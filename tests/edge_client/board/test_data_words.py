"""What a device says of its data folder when it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.data_place import describe_data
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.errors import BadInput
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, ModelSpec
from support.closed import close

MODEL = ModelSpec(
    "own",
    ParamLayout(("w",), ((2,),)),
    (1, 4, 4),
    ("cat", "dog"),
    (0.5,),
    (0.25,),
    (),
    BlobRef(bytes(32), 1),
    BlobRef(bytes(32), 1),
)


def made(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"1")


@pytest.mark.parametrize(
    ("kind", "path", "held_out", "words"),
    [
        ("folder", "images", None, None),
        ("folder", "images", "images", None),
        ("arrays", "a.npz", "a.npz", None),
        ("folder", "imagse", None, "data.path = .*imagse.*no such folder.* nothing to train on"),
        ("folder", "empty", None, "no images in class folders"),
        ("folder", "linked", None, None),
        ("folder", "flat", None, "no images in class folders"),
        ("arrays", "b.npz", None, "no such .npz file"),
        ("csv", "a.npz", None, None),
        ("csv", "b.csv", None, "no such CSV file.*`label`"),
        ("csv", "empty", None, None),
        ("folder", "images", "held", "data.held_out = .*held.*no such folder.*each class$"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, kind: str, path: str, held_out: str | None, words: str | None) -> None:
    made(tmp_path, "images/cat/1.jpg", "flat/1.jpg", "a.npz")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "linked" / "cat").mkdir(parents=True)
    (tmp_path / "linked" / "cat" / "disk").symlink_to(tmp_path / "images")
    held = None if held_out is None else str(tmp_path / held_out)
    said = describe_data(OwnDataSection(kind, str(tmp_path / path), held))  # type: ignore[arg-type]
    assert said is None if words is None else re.search(words, said or "")


@pytest.mark.parametrize("key", ["path", "held_out", "inbox", "unlabelled"])
def test_a_closed_home_is_said(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raspberry Pi OS closes the homes of users; the client starts all the same."""
    made(tmp_path, "images/cat/1.jpg")
    home = tmp_path / "home"
    close(home, monkeypatch)
    places = {"path": str(tmp_path / "images"), key: str(home / "images")}
    assert re.search(
        f"data.{key} = .*home/images.*: a folder above it is closed",
        describe_data(OwnDataSection("folder", **places)) or "",
    )
    data = LocalData(OwnDataSection("folder", str(home / "images")), MODEL)
    with pytest.raises(BadInput, match="does not exist or is not a folder"):
        data.samples()


def test_what_cannot_be_deleted_or_labelled_is_said(tmp_path: Path) -> None:
    made(tmp_path, "images/cat/1.jpg", "a.csv")
    said = describe_data(OwnDataSection("csv", str(tmp_path / "a.csv"), keep="9d"))
    assert "is one file, of which data.keep and data.max_mib delete nothing" in (said or "")
    said = describe_data(OwnDataSection("folder", str(tmp_path / "images"), inbox=str(tmp_path / "new")))
    assert re.search(r"data.inbox = .*new.*: there is no such folder of images", said or "")
