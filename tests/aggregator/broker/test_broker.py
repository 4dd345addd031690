from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.broker import process as broker_module
from hushfleet.aggregator.broker.config import mosquitto_acl, mosquitto_config
from hushfleet.aggregator.broker.process import BrokerTls, start_broker
from hushfleet.aggregator.commands.main import build_app
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.wire.link.interface import Delivery, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.ports import free_ports
from support.tools import BROKERS, find

ROOT = str(Path(__file__).resolve().parents[3])
COMMAND = "from hushfleet.aggregator.commands.main import main; main()"


def round_trip(url: str) -> None:
    link = MqttLink(url, client_id="tester")
    link.subscribe("x")
    link.open()
    while (event := link.receive(20.0)) != LinkUp():
        assert event is not None  # a LinkDown, since the broker is not up yet
    link.publish("x", b"payload")
    assert link.receive(20.0) == Delivery("x", b"payload", False)
    link.close()


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    for _ in range(500):
        if not is_running(pid):
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.parametrize("kind", BROKERS)
def test_a_broker_serves_restarts_on_its_port_and_stops(kind: str, tmp_path: Path) -> None:
    with start_broker(kind, data_dir=tmp_path) as broker:
        assert broker.program.name == kind
        assert broker.url == f"mqtt://127.0.0.1:{broker.port}"
        round_trip(broker.url)
        first_pid = broker.pid
        broker.kill()
        assert not is_running(first_pid)
        with pytest.raises(HushfleetError, match="not running"):
            assert broker.pid
        url = broker.url
        broker.restart()
        assert broker.url == url
        assert broker.pid != first_pid
        round_trip(broker.url)
        broker.restart()
        round_trip(broker.url)
        last_pid = broker.pid
    assert not is_running(last_pid)
    broker.stop()


PARENT = """
import sys, threading, time
from pathlib import Path
from hushfleet.aggregator.broker.process import start_broker
brokers = []
# started by a thread that ends at once: the broker must outlive it
thread = threading.Thread(target=lambda: brokers.append(start_broker(sys.argv[1], data_dir=Path(sys.argv[2]))))
thread.start()
thread.join()
time.sleep(0.3)
print(brokers[0].pid, brokers[0].url, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", BROKERS)
def test_a_broker_dies_with_its_parent_but_not_with_the_thread_that_started_it(kind: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        round_trip(url)
        assert is_running(int(pid))
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(int(pid))


@pytest.mark.needs("mosquitto")
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are Linux's")
def test_the_broker_may_open_a_file_for_each_of_many_clients(tmp_path: Path) -> None:
    """It inherits the soft limit, and with it the number of clients that it takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        with start_broker("mosquitto", data_dir=tmp_path) as broker:
            wanted = broker_module.MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
            assert resource.prlimit(broker.pid, resource.RLIMIT_NOFILE) == (wanted, hard)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard), "ours stays"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", BROKERS)
def test_a_port_in_use_is_an_error_that_says_what_to_do(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port}.*in use.*choose another port"):
            start_broker(kind, port=port, data_dir=tmp_path)


@pytest.mark.needs("mosquitto")
def test_a_broker_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    tls = BrokerTls(ca_file=tmp_path / "no-ca", cert_file=tmp_path / "no-cert", key_file=tmp_path / "no-key")
    with pytest.raises(HushfleetError, match=r"ended at its start: .*no-ca"):
        start_broker("mosquitto", data_dir=tmp_path, tls=tls)


@pytest.mark.needs("mosquitto")
def test_auto_takes_mosquitto_and_without_it_amqtt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_broker(data_dir=tmp_path) as broker:
        assert broker.program.name == "mosquitto"
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with start_broker(data_dir=tmp_path) as broker:
        assert broker.program.name == "amqtt"
    with pytest.raises(BadInput, match="apt install mosquitto"):
        start_broker("mosquitto", data_dir=tmp_path)
    tls = BrokerTls(ca_file=tmp_path, cert_file=tmp_path, key_file=tmp_path)
    with pytest.raises(BadInput, match="cannot require client certificates"):
        start_broker(data_dir=tmp_path, tls=tls)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BadInput, match="no broker is installed: apt install mosquitto, or pip install amqtt"):
        start_broker(data_dir=tmp_path)


def test_other_kinds_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'rabbit' is not known"):
        start_broker("rabbit", data_dir=tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_a_network_is_let_in_only_on_request(host: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"let anyone on the network in.*--open"):
        start_broker(host=host, data_dir=tmp_path)


@pytest.mark.parametrize("kind", BROKERS)
def test_open_to_the_network(kind: str, tmp_path: Path) -> None:
    with start_broker(kind, host="0.0.0.0", data_dir=tmp_path, open_to_network=True) as broker:
        round_trip(f"mqtt://127.0.0.1:{broker.port}")


def test_the_configuration_bounds_memory_and_lets_only_loopback_in_unnamed(tmp_path: Path) -> None:
    plain = mosquitto_config(host="127.0.0.1", port=1883, tls=None, acl_path=tmp_path).splitlines()
    assert "listener 1883 127.0.0.1" in plain
    assert "allow_anonymous true" in plain
    assert "persistence false" in plain
    assert "max_packet_size 1052672" in plain
    assert "max_queued_bytes 8388608" in plain
    assert "max_inflight_bytes 8388608" in plain
    assert "memory_limit 536870912" in plain
    assert "persistent_client_expiration 1h" in plain
    tls = BrokerTls(ca_file=Path("ca"), cert_file=Path("cert"), key_file=Path("key"), crl_file=Path("revoked"))
    lines = mosquitto_config(host="10.0.0.1", port=8883, tls=tls, acl_path=Path("acl")).splitlines()
    for line in ("allow_anonymous false", "require_certificate true", "use_identity_as_username true",
                 "acl_file acl", "crlfile revoked"):  # fmt: skip
        assert line in lines
    assert "allow_anonymous true" not in lines
    assert not any(line.startswith("persistent_client_expiration") for line in lines), "Mosquitto 2.0.11 ends by it"


def test_the_access_list_is_the_one_of_the_specification() -> None:
    acl = mosquitto_acl(aggregator="boss")
    assert acl in Path(ROOT, "docs", "wire.md").read_text().replace("user aggregator", "user boss")


@contextlib.contextmanager
def foreground(kind: str, port: int, tmp_path: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    arguments = ["--kind", kind, "--port", str(port), "--data-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "broker", *arguments],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


@pytest.mark.parametrize("kind", [*BROKERS, "auto"])
def test_in_the_foreground_until_sigterm(kind: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with foreground(kind, port, tmp_path) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            round_trip(f"mqtt://127.0.0.1:{port}")
        finally:
            process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    name = "mosquitto" if kind != "amqtt" and find("mosquitto") else "amqtt"
    assert line == f"{name} listens at mqtt://127.0.0.1:{port}; its log is {tmp_path}/broker.log\n"
    assert output == ""


def test_in_the_foreground_sigterm_ends_a_broker_that_still_starts(tmp_path: Path) -> None:
    silent, pid_file = tmp_path / "mosquitto", tmp_path / "pid"
    silent.write_text(f"#!/bin/sh\necho $$ > {pid_file}.new && mv {pid_file}.new {pid_file}\nexec sleep 60\n")
    silent.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with foreground("mosquitto", *free_ports(1), tmp_path, PATH=path) as process:
        while not pid_file.exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (0, "", "")
    wait_until_gone(int(pid_file.read_text()))


def test_in_the_foreground_a_port_in_use_is_one_error_and_status_2(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        foreground("auto", other.getsockname()[1], tmp_path) as process,
    ):
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.startswith("error: a broker cannot listen on")
    assert " ".join(errors.split()).endswith("choose another port")


def test_the_command_line_checks_its_options(tmp_path: Path) -> None:
    app = build_app()
    runner = CliRunner()
    for arguments, message in (
        (["--ca-file", __file__], "all of --ca-file, --cert-file and --key-file"),
        (["--host", "0.0.0.0"], "let anyone on the network in"),
    ):
        result = runner.invoke(app, ["broker", "--data-dir", str(tmp_path), *arguments])
        assert isinstance(result.exception, BadInput)
        assert message in str(result.exception)
    result = runner.invoke(app, ["broker", "--data-dir", str(tmp_path), "--kind", "rabbit"])
    assert result.exit_code == 2
    assert all(word in result.output for word in ("rabbit", "auto", "mosquitto", "amqtt"))


def test_many_brokers_at_once_have_their_own_ports(tmp_path: Path) -> None:
    brokers = []
    threads = [
        threading.Thread(target=lambda index=index: brokers.append(start_broker(data_dir=tmp_path / str(index))))
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({broker.port for broker in brokers}) == 6
        for broker in brokers:
            round_trip(broker.url)
    finally:
        for broker in brokers:
            broker.stop()
