"""The board's certificate is looked at before the broker does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.certificate import DAY_S, describe_certificate
from hushfleet.edge_client.board.config import DeviceConfig, FleetSection
from hushfleet.errors import BadInput
from support.certificates import BEGIN, END, a_certificate
from support.edge import DEVICE

MIDDLE = BEGIN.timestamp() + 100 * DAY_S


def with_certificate(config: DeviceConfig, folder: Path, name: str) -> DeviceConfig:
    file = folder / "board.pem"
    file.write_bytes(a_certificate(name))
    return replace(config, broker=replace(config.broker, cert_file=str(file), key_file=str(file)))


def test_a_certificate_of_another_device_is_found_before_connecting(
    config: DeviceConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = with_certificate(config, tmp_path, "greenhouse-02")
    with pytest.raises(BadInput, match=f"names greenhouse-02, and this device is {DEVICE}"):
        describe_certificate(wrong, now=MIDDLE)
    file = tmp_path / "device.toml"
    file.write_text(
        f'[device]\nid = "{DEVICE}"\nstate_dir = "state"\nallow_volatile_state = true\n[broker]\nurl = '
        '"mqtts://localhost:1"\n'
        'cert_file = "board.pem"\nkey_file = "board.pem"\n[data]\nkind = "arrays"\npath = "x.npz"\n'
        "[limits]\nepsilon_server = 1.0\n"
    )
    assert main([str(file)]) == 2
    assert "the certificate names greenhouse-02" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", [DEVICE, "AWS IoT Certificate"])
def test_its_own_name_and_one_that_could_be_no_devices_are_fine(
    config: DeviceConfig, tmp_path: Path, name: str
) -> None:
    assert describe_certificate(with_certificate(config, tmp_path, name), now=MIDDLE) is None


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (BEGIN.timestamp() - DAY_S, "is not valid before 2026-01-01, and it is 2025-12-31: is the clock right?"),
        (END.timestamp() - 3.2 * DAY_S, "the certificate ends in 3 days, on 2028-01-01"),
        (END.timestamp() + DAY_S, "has ended on 2028-01-01, and it is 2028-01-02: is the clock right?"),
    ],
)
def test_its_dates_and_the_clock(config: DeviceConfig, tmp_path: Path, now: float, words: str) -> None:
    assert words in (describe_certificate(with_certificate(config, tmp_path, DEVICE), now=now) or "")


def test_the_one_that_the_fleet_gave_or_none(config: DeviceConfig, tmp_path: Path) -> None:
    assert describe_certificate(config) is None
    in_fleet = replace(config, fleet=FleetSection("cd" * 32, "mqtts://localhost"))
    assert describe_certificate(in_fleet) is None
    state = Path(config.device.state_dir)
    state.mkdir()
    (state / "tls.pem").write_bytes(a_certificate("greenhouse-02"))
    with pytest.raises(BadInput, match=r"tls\.pem"):
        describe_certificate(in_fleet)
    (state / "tls.pem").write_text("nothing")
    assert "cannot be read" in (describe_certificate(in_fleet) or ""), (
        "it is asked for again, where a stop needs a person"
    )
    own = replace(in_fleet, broker=replace(config.broker, cert_file=str(state / "tls.pem"), key_file="key"))
    with pytest.raises(BadInput, match="cannot be read"):
        describe_certificate(own)
