"""`hushfleet flash`: forty cards from one stock image, which differ where they must and nowhere else."""

from __future__ import annotations

import hashlib
import json
import lzma
import time
import tomllib
from pathlib import Path

import pytest

from hushfleet.aggregator.fleet.software.releases import add_release, trust
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.members import counted
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.wire.format.fleet_messages import token_seed
from hushfleet.wire.format.identity import Identity
from support.command import hushfleet
from support.desk import make_folder
from support.slots import AARCH64, pack_files
from support.stock import BOOKWORM, TRIXIE, make_image, needs_mtools, put_root, read_back

pytestmark = needs_mtools
DIFFERENT = {"user-data", "meta-data", "hushfleet/device.toml", "hushfleet/enrol.token"}


def key_of(token: bytes) -> bytes:
    """The public key that the registry keeps of a token."""
    return Identity.from_bytes(token_seed(hashlib.sha256(token).digest())).public_key


def flash(*arguments: object) -> str:
    """What it prints. Raises what the command raises."""
    return hushfleet("flash", *arguments)


@pytest.fixture
def fleet(tmp_path: Path) -> FleetFolder:
    """A fleet of forty boards with a small release for Raspberry Pi OS Trixie and one for Bookworm."""
    folder = make_folder(tmp_path / "greenhouse", boards=0)
    folder.wifi("home").write_text('ssid = "home"\npassword = "correct horse"\ncountry = "DE"\n')
    payload, key = tmp_path / "payload", load_or_create(folder.release_key)
    payload.mkdir()
    (payload / "__main__.py").write_text("print()\n")
    with FleetRegistry(folder.path) as registry:
        registry.add(counted("greenhouse", 40, known=[], board="raspberry-pi-4-4gb", place="", wifi="home"))
        for python in ("cp313", "cp311"):
            out = pack_files(payload, tmp_path / "a.hfr", "1.2.3", key, **AARCH64 | {"python": python})
            add_release(folder, registry, out)
    return folder


def test_forty_cards_differ_only_where_they_must(tmp_path: Path, fleet: FleetFolder) -> None:
    stock, out = make_image(tmp_path / "stock.img", mib=4), tmp_path / "cards"
    before = hashlib.sha256(stock.read_bytes()).digest()
    said = flash("--fleet", fleet.path, "--count", 40, "--image", stock, "--out", out)
    assert "greenhouse-01 to greenhouse-40, 40 cards" in said
    names = [f"greenhouse-{number:02}" for number in range(1, 41)]
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.img" for name in names]
    cards = {name: read_back(out / f"{name}.img", tmp_path / name) for name in names}
    first = cards["greenhouse-01"]
    tokens = set()
    with FleetRegistry(fleet.path) as registry:
        for name, files in cards.items():
            assert files.keys() == first.keys()
            assert {path for path in files if files[path] != first[path]} <= DIFFERENT
            swapped = {path: files[path].replace(name.encode(), b"greenhouse-01") for path in files}
            assert swapped["hushfleet/device.toml"] == first["hushfleet/device.toml"]
            assert swapped["user-data"] == first["user-data"]
            assert json.loads(files["meta-data"])["local-hostname"] == name
            token = files["hushfleet/enrol.token"].strip()
            assert registry.tokens(name, now=time.time()) == [key_of(token)]
            tokens.add(token)
    assert len(tokens) == len({files["meta-data"] for files in cards.values()}) == 40
    kept = b"".join(path.read_bytes() for path in fleet.path.glob("*") if path.is_file())
    assert not any(token in kept for token in tokens)
    assert hashlib.sha256(stock.read_bytes()).digest() == before
    with pytest.raises(BadInput, match="0 boards of the fleet have no card yet"):
        flash("--fleet", fleet.path, "--image", stock, "--out", out)


def test_a_task_that_cannot_be_read_makes_no_card(tmp_path: Path, fleet: FleetFolder) -> None:
    fleet.task.write_text('name = "a"\nmodel.name = "linear"\nmethod.name = "dp-fedavg"\ndata = 5\n')
    stock = make_image(tmp_path / "stock.img", mib=4)
    with pytest.raises(BadInput, match="data = 5: expected a table"):
        flash("--fleet", fleet.path, "--device", "greenhouse-07", "--image", stock, "--out", tmp_path / "cards")


def test_card_holds_what_its_board_needs(tmp_path: Path, fleet: FleetFolder) -> None:
    stock = make_image(tmp_path / "stock.img", mib=4)
    flash("--fleet", fleet.path, "--device", "greenhouse-07", "--image", stock, "--out", tmp_path / "cards")
    files = read_back(tmp_path / "cards/greenhouse-07.img", tmp_path / "card")
    device = tomllib.loads(files["hushfleet/device.toml"].decode())
    assert device["device"]["id"] == "greenhouse-07"
    assert files["hushfleet/ca.pem"] == (fleet.ca / "ca.pem").read_bytes()
    trusted = trust(fleet)
    assert files["hushfleet/root_key"].decode().strip() == load_or_create(fleet.root_key).public_key.hex()
    assert files["hushfleet/release_keys"].decode() == f"{trusted.line}\n"
    assert trusted.in_force().keys == (load_or_create(fleet.release_key).public_key.hex(),)
    assert files["hushfleet/python"] == b"3.13\n"
    secret = [path for path in fleet.path.rglob("*.key") if path.is_file()]
    assert len(secret) >= 5
    every = b"".join(files.values())
    assert not any(path.read_bytes() in every for path in secret)


def test_data_in_one_file_get_no_folder_of_that_name(tmp_path: Path, fleet: FleetFolder) -> None:
    text = (fleet.path / "fleet.toml").read_text()
    written = text.replace('"folder"', '"csv"').replace("/var/lib/hushfleet-images", "/srv/meter.csv")
    (fleet.path / "fleet.toml").write_text(written)
    stock, out = make_image(tmp_path / "stock.img", mib=4), tmp_path / "cards"
    arguments = ("--fleet", fleet.path, "--device", "greenhouse-07", "--image", stock, "--out", out)
    (tmp_path / "greenhouse-07").mkdir()
    with pytest.raises(BadInput, match="in one file"):
        flash(*arguments, "--images", tmp_path)
    assert "charged for noise" not in flash(*arguments)
    files = read_back(out / "greenhouse-07.img", tmp_path / "card")
    assert tomllib.loads(files["hushfleet/device.toml"].decode())["data"] == {"kind": "csv", "path": "/srv/meter.csv"}
    assert files["hushfleet/images_path"].strip() == files["hushfleet/classes"].strip() == b""
    assert (out / "greenhouse-07.img").stat().st_mode & 0o777 == 0o600, "a token is in it"
    (fleet.path / "fleet.toml").write_text(text.replace('"folder"', '"sound"'))
    assert "get data.kind = 'sound': such boards are charged for noise alone" in flash(*arguments, "--force")


@pytest.mark.parametrize("path", ["/home/pi/photos", "/tmp/photos", "photos"])
def test_images_that_the_client_would_never_see_are_refused(tmp_path: Path, fleet: FleetFolder, path: str) -> None:
    """Its unit hides homes and temporary files; the board would say that there is no such folder."""
    file = fleet.path / "fleet.toml"
    file.write_text(file.read_text().replace("/var/lib/hushfleet-images", path))
    stock, out = make_image(tmp_path / "stock.img", mib=4), tmp_path / "cards"
    with pytest.raises(BadInput, match=r"\[device.data\] path in fleet.toml"):
        flash("--fleet", fleet.path, "--device", "greenhouse-07", "--image", stock, "--out", out)
    assert not list(out.glob("*"))


def test_a_fleet_file_without_limits_or_data(tmp_path: Path, fleet: FleetFolder) -> None:
    """Class folders are the default; a limit is the owner's word. Without either there was a traceback."""
    file, stock, out = fleet.path / "fleet.toml", make_image(tmp_path / "stock.img", mib=4), tmp_path / "cards"
    arguments = ("--fleet", fleet.path, "--device", "greenhouse-07", "--image", stock, "--out", out)
    plain = file.read_text().partition("[device")[0]
    file.write_text(plain)
    with pytest.raises(BadInput, match=r"fleet.toml: \[device\] makes .* limits: missing field `epsilon_server`"):
        flash(*arguments)
    file.write_text(f'{plain}[device.limits]\nepsilon_server = 2.0\n[device.data]\nkeep = "90d"\n')
    with pytest.raises(BadInput, match="data: missing field `kind`"):
        flash(*arguments)
    assert not list(out.glob("*"))
    file.write_text(f"{plain}[device.limits]\nepsilon_server = 2.0\n")
    flash(*arguments)
    written = read_back(out / "greenhouse-07.img", tmp_path / "card")["hushfleet/device.toml"]
    assert tomllib.loads(written.decode())["data"] == {"kind": "folder", "path": "/var/lib/hushfleet-images"}


def test_written_again(tmp_path: Path, fleet: FleetFolder) -> None:
    """The former token holds no longer, and nothing is on the card twice."""
    mount = tmp_path / "bootfs"
    mount.mkdir()
    for name, text in TRIXIE.items():
        (mount / name).write_text(text)
    arguments = ("--fleet", fleet.path, "--device", "greenhouse-02", "--boot", mount)
    flash(*arguments)
    first = {path.relative_to(mount): path.read_bytes() for path in mount.rglob("*") if path.is_file()}
    flash(*arguments, "--force")
    again = {path.relative_to(mount): path.read_bytes() for path in mount.rglob("*") if path.is_file()}
    assert {str(path) for path in again if again[path] != first[path]} == {"meta-data", "hushfleet/enrol.token"}
    with FleetRegistry(fleet.path) as registry:
        token = again[Path("hushfleet/enrol.token")].strip()
        assert registry.tokens("greenhouse-02", now=time.time()) == [key_of(token)]


def test_a_card_that_waits_is_not_made_worthless_without_a_word(tmp_path: Path, fleet: FleetFolder) -> None:
    """`flash --count 14`, and later `--device` for one of these, left a card that no server knew."""
    stock, out, later = make_image(tmp_path / "stock.img", mib=4), tmp_path / "cards", tmp_path / "later"
    flash("--fleet", fleet.path, "--count", 3, "--image", stock, "--out", out)
    arguments = ("--fleet", fleet.path, "--device", "greenhouse-02", "--image", stock, "--out", later)
    with FleetRegistry(fleet.path) as registry:
        before = registry.tokens("greenhouse-02", now=time.time())
        with pytest.raises(BadInput, match=r"greenhouse-02 has a card that no board has used yet, .* --force writes"):
            flash(*arguments)
        assert registry.tokens("greenhouse-02", now=time.time()) == before
        assert not list(later.glob("*.img"))
        assert "stop working: greenhouse-02\n" in flash(*arguments, "--force")
        assert registry.tokens("greenhouse-02", now=time.time()) != before
    assert "stop working" not in flash("--fleet", fleet.path, "--count", 1, "--image", stock, "--out", later)


def test_cards_by_patterns_and_by_a_file(tmp_path: Path, fleet: FleetFolder) -> None:
    stock, out, ids = make_image(tmp_path / "stock.img", mib=4), tmp_path / "cards", tmp_path / "ids.txt"
    ids.write_text("# the second shelf\ngreenhouse-03\n\ngreenhouse-05\n")
    flash("--fleet", fleet.path, "--file", ids, "--image", stock, "--out", out)
    said = flash("--fleet", fleet.path, "--device", "greenhouse-0[2-4]", "--image", stock, "--out", out)
    assert "greenhouse-02 to greenhouse-04, 2 cards" in said, "the third has one already"
    assert [path.stem[-2:] for path in sorted(out.iterdir())] == ["02", "03", "04", "05"]
    with pytest.raises(BadInput, match=r"did you mean greenhouse-0\d"):
        flash("--fleet", fleet.path, "--device", "grenhouse-06", "--image", stock, "--out", out)


def test_packed_images(tmp_path: Path, fleet: FleetFolder) -> None:
    packed = tmp_path / "stock.img.xz"
    packed.write_bytes(lzma.compress(make_image(tmp_path / "stock.img", mib=4).read_bytes(), preset=0))
    out = tmp_path / "cards"
    said = flash("--fleet", fleet.path, "--count", 2, "--image", packed, "--python", "3.11", "--out", out)
    assert "for Python 3.11" in said
    assert sorted(path.name for path in out.iterdir()) == ["greenhouse-01.img", "greenhouse-02.img"]
    files = read_back(out / "greenhouse-02.img", tmp_path / "card")
    assert json.loads(files["meta-data"])["local-hostname"] == "greenhouse-02"


def test_another_format_of_cards_is_refused(tmp_path: Path, fleet: FleetFolder) -> None:
    image = make_image(tmp_path / "a.img", BOOKWORM, mib=4)
    arguments = ("--fleet", fleet.path, "--count", 1, "--image", image, "--out", tmp_path / "b")
    with pytest.raises(BadInput, match="no cloud-init"):
        flash(*arguments)
    with pytest.raises(BadInput, match=r"`hushfleet flash --writer` went after 0.3; .*hushfleet push"):
        flash(*arguments, "--writer=firstrun")


def test_nothing_is_kept_of_a_card_that_was_not_written(tmp_path: Path, fleet: FleetFolder) -> None:
    stock = make_image(tmp_path / "stock.img", mib=4)
    images = tmp_path / "images"
    (images / "greenhouse-01" / "cat").mkdir(parents=True)
    (images / "greenhouse-01" / "cat" / "large.jpg").write_bytes(bytes(5 << 20))
    with pytest.raises(BadInput, match="has room for"):
        flash("--fleet", fleet.path, "--count", 1, "--image", stock, "--out", tmp_path / "cards", "--images", images)
    assert list((tmp_path / "cards").iterdir()) == []
    with FleetRegistry(fleet.path) as registry:
        assert registry.tokens("greenhouse-01", now=time.time()) == []


@pytest.mark.needs("e2fsprogs")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name the stock image"),
        (("--image", "stock.img"), "go together"),
        (("--boot", "bootfs"), "one --device"),
        (("--boot", "/dev/null", "--device", "greenhouse-01"), "is a device"),
        (("--image", "missing.img", "--out", "cards"), "no image file"),
        (
            ("--image", "stock.img", "--out", "cards", "--count", "41"),
            "40 boards .* no card yet, not 41",
        ),
        (("--image", "stock.img", "--out", "cards", "--device", "nobody"), "nobody"),
        (("--image", "stock.img", "--out", "cards", "--python", "2.7"), "there is no release for Python '2.7'"),
        (("--image", "stock.img", "--out", "cards", "--ssh-key", "stock.img"), "public SSH key|cannot be read"),
        (("--image", "empty.img", "--out", "cards"), "no cloud-init"),
        (
            ("--image", "missing.img", "--out", "cards", "--python", "3.14"),
            "no release for Python '3.14', only for 3.10",
        ),
        (
            ("--image", "ubuntu.img", "--out", "cards"),
            "Ubuntu 26.04 LTS has Python 3.14, and releases are made for 3.10",
        ),
        (("--image", "stock.img", "--out", "cards", "--python", "3.11"), "has Python 3.13, and not 3.11"),
        (("--image", "haos.img", "--out", "cards"), "no cloud-init.* ext4 without Python"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    tmp_path: Path, fleet: FleetFolder, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    make_image(tmp_path / "stock.img", mib=4)
    make_image(tmp_path / "empty.img", {"photo.txt": ""}, mib=4)
    put_root(tmp_path / "stock.img", "bin/python3.13")
    put_root(make_image(tmp_path / "haos.img", mib=4), "bin/busybox")
    ubuntu = {"lib/os-release": 'PRETTY_NAME="Ubuntu 26.04 LTS"', "bin/python3.14": ""}
    put_root(make_image(tmp_path / "ubuntu.img", mib=4), files=ubuntu)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HushfleetError, match=said):
        flash("--fleet", fleet.path, *arguments)
    assert not list(tmp_path.glob("cards/*"))
