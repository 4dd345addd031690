"""`hushfleet-edge add`: a photograph comes into its class whole, once, and under a label that the task knows."""

from __future__ import annotations

import os
import re
import threading
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import DataUse, read_data_use
from hushfleet.edge_client.labelling.class_folders import ClassFolders, check_label, class_names, move
from hushfleet.errors import BadInput, StoreFull
from support.edge import Bench
from support.image_files import others_than_files
from support.pictures import a_picture


def names(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_photographs_are_added_to_a_class(
    trained: Bench, device_toml: Path, photographs: Path, tmp_path, capsys
) -> None:
    photos = [
        a_picture(tmp_path / "card" / name, seed=seed) for seed, name in enumerate(("1.jpg", "2.png", "leaf.png"))
    ]
    (tmp_path / "card/notes.jpg").write_bytes(b"no image")
    again = a_picture(tmp_path / "card/copy.png", seed=1)
    seen = a_picture(tmp_path / "test/leaf/held.png", seed=9)
    other_class = a_picture(tmp_path / "card/mould.png", seed=101)
    given = [*photos, tmp_path / "card/notes.jpg", again, seen, other_class, tmp_path / "card"]
    assert main(["add", str(device_toml), *map(str, given), "--label", "leaf"]) == 2
    out, err = capsys.readouterr()
    [other] = [name for name in names(photographs) if name.startswith("leaf/leaf-")]
    assert names(photographs) == sorted(["leaf/1.jpg", "leaf/2.png", "leaf/leaf.png", other, "mould/mould.png"])
    assert (photographs / other).read_bytes() == photos[2].read_bytes(), "a name that is taken is not overwritten"
    assert "notes.jpg cannot be read as an image" in err
    assert f"is a folder; name its files: {tmp_path}/card/*" in err
    assert f"copy.png is there already (trained on): {photographs}/leaf/2.png" in out
    assert f"held.png is there already (held out, and never trained on): {seen}\n" in out
    assert f"{photographs}/mould/mould.png; if it is leaf, move that file into {photographs}/leaf\n" in out
    assert "3 of 8 added; the next round trains on them" in out
    assert all(photo.exists() for photo in photos), "they are copied"


def test_a_class_of_the_task_needs_no_folder_yet(
    trained: Bench, device_toml: Path, photographs: Path, tmp_path
) -> None:
    photo = a_picture(tmp_path / "1.jpg")
    assert main(["add", str(device_toml), str(photo), "--label", "stem"]) == 0
    assert (photographs / "stem/1.jpg").read_bytes() == photo.read_bytes()
    os.utime(photographs / "stem/1.jpg", (1e9, 1e9))
    assert read_data_use(trained.store.path.parent) == DataUse(2)
    trained.train(2)
    assert read_data_use(trained.store.path.parent) == DataUse(3), "without a restart"


def test_an_unknown_label_is_refused_with_the_list(
    trained: Bench, device_toml: Path, photographs, tmp_path, capsys
) -> None:
    before = names(photographs)
    assert main(["add", str(device_toml), str(a_picture(tmp_path / "1.jpg")), "--label", "laef"]) == 2
    said = (
        "label 'laef' is no class here (did you mean leaf?); the classes are aphid, beetle, flower, fruit, leaf, mildew"
    )
    assert said in capsys.readouterr().err
    assert names(photographs) == before


def test_before_the_first_task_the_folders_are_the_classes(
    board: DeviceConfig, device_toml: Path, tmp_path, capsys
) -> None:
    assert main(["add", str(device_toml), str(a_picture(tmp_path / "1.jpg")), "--label", "stem"]) == 2
    assert "the classes are leaf, mould" in capsys.readouterr().err
    assert main(["add", str(device_toml), str(tmp_path / "1.jpg"), "--label", "mould"]) == 0
    assert class_names(board, None) == ("leaf", "mould")


def test_no_label_leads_out_of_the_folder(board: DeviceConfig, trained: Bench, monkeypatch) -> None:
    """The names of classes come from the aggregator."""
    hostile = ("../../etc", "/etc", ".", "..", ".hidden", "__pycache__", "a\0b", "a\nb", "", "leaf", "mould")
    model = replace(trained.server.package.spec.model, class_names=hostile)
    digest = trained.server.package.with_spec(model=model).spec.to_bytes()
    monkeypatch.setattr(trained.store, "blob", lambda _: digest)
    assert class_names(board, trained.store) == ("leaf", "mould")
    with pytest.raises(BadInput, match="is no class here"):
        check_label("../../etc", class_names(board, trained.store))


def test_a_folder_that_spells_an_accent_in_another_way_is_the_classes(
    board: DeviceConfig, photographs: Path, tmp_path
) -> None:
    folder = photographs / unicodedata.normalize("NFD", "Blüte")
    folder.mkdir()
    label = check_label(unicodedata.normalize("NFD", "Blüte"), class_names(board, None))
    assert ClassFolders(board.data).add(a_picture(tmp_path / "1.jpg"), label).parent == folder


def test_two_that_add_at_once_lose_nothing(board: DeviceConfig, photographs: Path, tmp_path: Path) -> None:
    photos = [a_picture(tmp_path / str(seed) / "1.png", seed=seed) for seed in range(8)]
    threads = [threading.Thread(target=ClassFolders(board.data).add, args=(photo, "leaf")) for photo in photos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {(photographs / name).read_bytes() for name in names(photographs)}
    assert {photo.read_bytes() for photo in photos} <= found


def test_without_the_right_to_write_the_command_says_who_has_it(
    board: DeviceConfig, tmp_path: Path, monkeypatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "images")

    monkeypatch.setattr("os.rename", refused)
    with pytest.raises(
        BadInput, match="Permission denied; run the command as the client's user, as in sudo -u hushfleet"
    ):
        ClassFolders(board.data).add(a_picture(tmp_path / "1.jpg"), "leaf")
    assert names(Path(board.data.path)) == [] or "leaf/1.jpg" not in names(Path(board.data.path))


def test_the_longest_name_can_be_added(board: DeviceConfig, photographs: Path, tmp_path: Path) -> None:
    photo = a_picture(tmp_path / ("n" * 251 + ".png"))
    assert ClassFolders(board.data).add(photo, "leaf").name == photo.name
    assert [name for name in os.listdir(photographs / "leaf") if name.startswith(".")] == []


def test_a_full_disk_is_said_of_the_photograph(board: DeviceConfig, photographs: Path, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    said = f"{photographs}/leaf/1.jpg cannot be written: No space left on device; free some space"
    with pytest.raises(StoreFull, match=f"^{re.escape(said)}$"):
        ClassFolders(board.data).add(a_picture(tmp_path / "1.jpg"), "leaf")
    assert names(photographs) == ["leaf/leaf.png", "mould/mould.png"]


def test_what_root_makes_belongs_to_the_owner_of_the_folder(board: DeviceConfig, tmp_path: Path, monkeypatch) -> None:
    given: list[Path] = []
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.chown", lambda path, user, group, follow_symlinks: given.append(path))
    move(a_picture(tmp_path / "inbox/1.jpg"), tmp_path / "inbox/not-usable")
    move(a_picture(tmp_path / "inbox/2.jpg"), tmp_path / "inbox/a/b")
    assert ClassFolders(board.data).folder("stem").is_dir()
    made = ("inbox/not-usable", "inbox/a", "inbox/a/b", "images/stem")
    assert given == [tmp_path / name for name in made]


def test_only_images_have_labels(config: DeviceConfig) -> None:
    with pytest.raises(BadInput, match=r"data.kind = 'arrays': labels are given to images"):
        class_names(config, None)


def test_only_files_with_the_name_of_an_image_are_added(
    board: DeviceConfig, device_toml: Path, photographs: Path, tmp_path: Path, capsys
) -> None:
    photo = a_picture(tmp_path / "card/1.JPG")
    for name in ("photo", ".jpg"):
        (tmp_path / "card" / name).write_bytes(photo.read_bytes())
    with others_than_files(tmp_path / "card"):
        given = sorted((tmp_path / "card").iterdir())
        assert main(["add", str(device_toml), *map(str, given), "--label", "leaf"]) == 2
    out, err = capsys.readouterr()
    assert names(photographs) == ["leaf/1.JPG", "leaf/leaf.png", "mould/mould.png"]
    assert "1 of 6 added" in out
    for kind in ("pipe", "socket", "device"):
        assert f"error: {tmp_path}/card/{kind}.jpg cannot be read as an image: it is a {kind}\n" in err
    said = "cannot be read as an image: its name has no ending of an image, such as .jpg or .png\n"
    assert f"error: {tmp_path}/card/photo {said}error" in err
    assert f"error: {tmp_path}/card/.jpg {said}" in err


def test_a_pipe_among_the_images_is_no_copy_of_an_empty_file(
    board: DeviceConfig, photographs: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jpg"
    empty.write_bytes(b"")
    with others_than_files(photographs / "leaf"):
        assert ClassFolders(board.data).take_in(empty, "mould") == photographs / "mould/empty.jpg"
