"""DEVICE.toml: what is accepted, and that every mistake is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.errors import BadInput, HushfleetError, Malformed
from hushfleet.field_types import hints
from hushfleet.refusals import bare
from hushfleet.schema import from_plain
from hushfleet.toml_text import to_toml
from hushfleet.wire.format.identity import Identity
from support.written_keys import Key, changed, changes, check_text, keys_of

GOOD = """\
[device]
id = "greenhouse-07"
state_dir = "state"
board = "raspberry-pi-zero-2-w"

[broker]
url = "mqtts://broker.example:8883"
ca_file = "certs/ca.pem"

[data]
kind = "folder"
path = "images"

[limits]
epsilon_server = 8
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "device.toml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.store_path == tmp_path / "state" / "store.sqlite"
    assert config.broker.ca_file == str(tmp_path / "certs" / "ca.pem")
    assert config.broker.cert_file is None
    assert config.data.path == str(tmp_path / "images")
    assert config.device.federation == "default"
    assert config.limits.epsilon_server == 8.0
    assert config.limits.delta == 1e-5
    assert config.simulation is None
    assert config.memory_mib == 307  # 60 % of the board's 512 MiB


def test_absolute_paths_and_given_memory_stay(tmp_path: Path) -> None:
    text = GOOD.replace('"images"', '"/srv/images"').replace("= 8\n", "= inf\nmemory_mib = 77\n")
    config = load_config(write(tmp_path, text))
    assert config.data.path == "/srv/images"
    assert config.memory_mib == 77
    assert config.limits.epsilon_server == math.inf


def test_the_home_of_an_unknown_user_is_named(tmp_path: Path) -> None:
    for old, key in (('"state"', "device.state_dir"), ('"images"', "data.path"), ('"certs/ca.pem"', "broker.ca_file")):
        path = write(tmp_path, GOOD.replace(old, '"~nobody-of-this-name/x"'))
        with pytest.raises(
            BadInput, match=f"device.toml: {key} = '~nobody-of-this-name/x': this machine knows no home"
        ):
            load_config(path)


def test_the_simulation_section(tmp_path: Path) -> None:
    text = GOOD + '[simulation]\nseed = 3\nindex = 1\nmetrics = "m.jsonl"\n'
    config = load_config(write(tmp_path, text))
    assert config.simulation.metrics == str(tmp_path / "m.jsonl")
    assert config.simulation.common_test is None
    assert not config.is_durable
    assert load_config(write(tmp_path, text + "durable = true\n")).is_durable
    assert load_config(write(tmp_path, GOOD)).is_durable, "what a board has spent survives a power cut"
    for key in ("slowdown = 24.2", "write_mb_s = 20.0"):
        with pytest.raises(BadInput, match=f"simulation: the field '{key.split()[0]}' is gone: .*simulate --boards"):
            load_config(write(tmp_path, f"{text}{key}\n"))


def test_the_password_file(tmp_path: Path) -> None:
    login = 'username = "ali"\npassword_file = "secret"\n[data]'
    config = load_config(write(tmp_path, GOOD.replace('ca_file = "certs/ca.pem"\n', "").replace("[data]", login)))
    with pytest.raises(BadInput, match="password_file"):
        _ = config.broker.address
    (tmp_path / "secret").write_text("open sesame\n")
    assert config.broker.address.password == "open sesame"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('id = "greenhouse-07"', 'id = "Green/house"', "device.id = 'Green/house'"),
        ('id = "greenhouse-07"', "", "missing field `id`"),
        ('kind = "folder"', 'kind = "ftp"', "data.kind"),
        ("epsilon_server = 8", "epsilon_server = -1", "epsilon_server = -1"),
        ("epsilon_server = 8", 'epsilon_server = "8"', "limits.epsilon_server = '8': must be positive"),
        ("epsilon_server = 8", "epsilon_server = 8\ndelta = 2", "delta = 2"),
        ("epsilon_server = 8", "", "missing field `epsilon_server`"),
        ("epsilon_server = 8", 'epsilon_server = 2\nper = "90d"', "epsilon_lifetime = None"),
        ("epsilon_server = 8", "epsilon_server = 2\nepsilon_lifetime = 8", "given together with epsilon_lifetime"),
        ("epsilon_server = 8", 'epsilon_server = 2\nper = "90d"\nepsilon_lifetime = 1', "at least epsilon_server = 2"),
        ("epsilon_server = 8", 'epsilon_server = 2\nper = "quarter"\nepsilon_lifetime = 8', "per = 'quarter'"),
        ("epsilon_server = 8", 'epsilon_server = 2\nper = "5min"\nepsilon_lifetime = 8', "an hour or more"),
        ("[limits]", "[limit]", "unknown field 'limit'"),
        ("mqtts://", "http://", "mqtt://HOST"),
        ("raspberry-pi-zero-2-w", "raspberry-pi-zero-3", "did you mean"),
        ("[data]", 'server_key = "abc"\n[data]', "64 hex digits"),
        ("[data]", 'cert_file = "a.pem"\n[data]', "given together with cert_file"),
        ("[data]", "[data", "not valid TOML"),
        ("[limits]", 'keep = "90"\n[limits]', "data.keep = '90' is no duration: write a number above 0"),
        ("[limits]", "max_mib = -1\n[limits]", "data.max_mib = -1"),
        ("[limits]", 'inbox = "images/new"\n[limits]', "one lies in the other; give the images that wait for a label"),
        ("[limits]", 'inbox = "."\n[limits]', "one lies in the other"),
        ('"folder"', '"arrays"\nkeep = "9d"', "keep = '9d': must be left out with kind 'arrays'"),
        ('"folder"', '"csv"\ninbox = "new"', "inbox = 'new': must be left out unless kind is 'folder'"),
        ('id = "greenhouse-07"', 'id = "a\\Users"', "write a Windows path between single quotes, or with /"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(write(tmp_path, GOOD.replace(old, new)))
    assert named in str(caught.value)


def test_an_inbox_that_a_link_leads_into_the_images_is_refused(tmp_path: Path) -> None:
    """What waits there would be trained on before anybody has said what it is."""
    (tmp_path / "images/leaf").mkdir(parents=True)
    (tmp_path / "camera").symlink_to(tmp_path / "images/leaf")
    with pytest.raises(BadInput, match="one lies in the other"):
        load_config(write(tmp_path, GOOD.replace("[limits]", 'inbox = "camera"\n[limits]')))
    config = load_config(write(tmp_path, GOOD.replace("[limits]", 'inbox = "images/../new"\n[limits]')))
    assert config.data.inbox is not None


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        load_config(tmp_path / "nothing.toml")


def test_the_password_in_a_url_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(write(tmp_path, GOOD.replace("mqtts://broker", "http://user:hunter2@broker")))
    assert "hunter2" not in str(caught.value)


SMALL = {
    "device": {"id": "a", "state_dir": "state"},
    "broker": {"url": "mqtts://localhost"},
    "data": {"kind": "folder", "path": "images"},
    "limits": {"epsilon_server": 8.0},
}
TABLES = {
    "simulation": {"seed": 1, "index": 0},
    "fleet": {"operator_key": Identity.from_bytes(bytes(32)).public_key.hex(), "enrol_url": "mqtts://localhost"},
}
KEYS = list(keys_of(DeviceConfig))


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_any_value_of_any_key_is_read_or_the_key_is_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    drawn: list[tuple[Key, Any]] = data.draw(changes(KEYS))
    path = tmp_path_factory.getbasetemp() / "any.toml"
    try:
        path.write_text(to_toml(changed(SMALL, drawn, TABLES)), "utf-8")
    except (BadInput, TypeError, ValueError):
        assume(False)  # TOML has no such value
    try:
        config = load_config(path)
    except HushfleetError as error:
        check_text(str(error), drawn, KEYS)
        return
    assert config.limits.budget.delta == config.limits.delta
    assert config.memory_mib >= 0


@pytest.mark.parametrize(
    ("code", "key", "value"),
    [
        ("broker.url", "broker.url", "http://user:secret@a.example"),
        ("broker.key-needs-certificate", "broker.key_file", "board.key"),
        ("data.inbox-needs-folder", "data.inbox", "inbox"),
        ("data.keep-needs-files", "data.keep", "90d"),
        ("data.max-mib-needs-files", "data.max_mib", 5),
        ("data.columns-not-used", "data.columns", ["a"]),
    ],
)
def test_keys_that_contradict_each_other_are_refused_by_the_code_of_a_rule(code: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    plain = {
        "device": {"id": "a", "state_dir": "s"},
        "broker": {"url": "mqtt://a.example"},
        "data": {"kind": "arrays", "path": "d.npz"},
        "limits": {"epsilon_server": 8},
    }
    with pytest.raises(Malformed) as caught:
        from_plain(DeviceConfig, {**plain, section: {**plain[section], name: value}})
    assert caught.value.code == code
    assert "secret" not in str(caught.value)


def test_every_rule_of_a_device_file_is_tried() -> None:
    found = {code for hint in hints(DeviceConfig).values() for code in getattr(bare(hint), "rules", {})}
    assert len(found) == 15, "the list above, and the others of SampleForm"
