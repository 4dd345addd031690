"""The command on a board, its exit codes, and how little it needs to be installed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.board.state_place import VolatilePlace
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import decode_message
from hushfleet.wire.format.spec import PrivacySpec
from hushfleet.wire.link.interface import Delivery
from support.closed import close
from support.edge import DEVICE, Bench, Package, write_samples
from support.secure_fleet import SecureFleet, with_secure_aggregation
from support.stores import sql

MakeBench = Callable[..., Bench]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": ""}


@pytest.fixture
def device_toml(tmp_path: Path) -> Path:
    path = tmp_path / "device.toml"
    path.write_text(
        f"""
        [device]
        id = "{DEVICE}"
        federation = "test"
        state_dir = "state"
        allow_volatile_state = true
        [broker]
        url = "mqtt://127.0.0.1:9"
        [data]
        kind = "arrays"
        path = "train.npz"
        [limits]
        epsilon_server = 50.0
        """
    )
    return path


@pytest.fixture
def trained(make_bench: MakeBench) -> Bench:
    bench = make_bench()
    bench.train(1)
    return bench


def test_status_counts_what_was_spent(trained: Bench, device_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(device_toml), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == DEVICE
    assert report["epsilon_limit"] == 50.0
    assert report["epsilon_server"] == pytest.approx(trained.store.ledger.epsilon_server(delta=1e-5))
    assert [(task["task"], task["rounds"]) for task in report["tasks"]] == [("digits-test", 1)]
    assert report["waiting"] == []
    assert main(["status", str(device_toml)]) == 0
    text = capsys.readouterr().out
    assert "of 50 is spent (epsilon; moderate protection); the rest is enough for" in text
    assert "the rest is enough for all 4 rounds that this task has to come" in text
    assert main(["status", str(device_toml), "--details"]) == 0
    text = capsys.readouterr().out
    assert "against whoever sees this device's updates" in text
    assert "digits-test: 1 rounds" in text
    assert "trust       local, in digits-test; this device allows local" in text


def test_status_says_what_the_aggregator_is_not_told(
    make_bench: MakeBench,
    package: Package,
    config: DeviceConfig,
    device_toml: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a board in the field: its data, and training on them."""
    privacy = PrivacySpec("record", "strict", 1.0, 1.1, 1e-5, sample_rate=0.5, batches=3)
    limits = replace(config.limits, constant_time=False)
    monkeypatch.setattr("hushfleet.edge_client.status.volatile_place", lambda _: VolatilePlace())
    path = Path(config.data.path)
    whole = path.read_bytes()
    path.unlink()
    bench = make_bench(package.with_spec(privacy=privacy), replace(config, simulation=None, limits=limits))
    bench.train(1)
    main(["status", str(device_toml)])
    assert "samples     there are no samples, and it takes part with noise alone (" in capsys.readouterr().out
    path.write_bytes(whole)
    plain = GradientGraph.__call__

    def failing(*_: object, **__: object) -> None:
        raise MemoryError("48 samples are too many")

    monkeypatch.setattr(GradientGraph, "__call__", failing)
    bench.train(2)
    main(["status", str(device_toml)])
    told = capsys.readouterr().out
    assert (
        "attention   round 2: training failed, and noise alone is sent: MemoryError('48 samples are too many')" in told
    )
    assert "samples     48 samples are used, none left out" in told
    monkeypatch.setattr(GradientGraph, "__call__", plain)
    bench.train(3)
    main(["status", str(device_toml)])
    assert "attention" not in capsys.readouterr().out
    assert bench.server.declines == []


def test_a_reader_that_has_seen_enough_is_no_error(trained: Bench, device_toml: Path) -> None:
    """`hushfleet-edge status DEVICE.toml | head -0`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hushfleet.edge_client", "status", str(device_toml)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_status_names_the_trust_model(
    make_bench: MakeBench, package: Package, config: DeviceConfig, device_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = replace(config, limits=replace(config.limits, accounting="secure", min_devices=8))
    bench = make_bench(package=with_secure_aggregation(package), config=allowed)
    fleet = SecureFleet(bench)
    fleet.open_round(1)
    bench.acked(1)
    assert main(["status", str(device_toml), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["trust"], report["trust_allowed"]) == ("secure-sum", "local")
    assert "only as long as the aggregator follows the protocol" in report["assumption"]
    assert main(["status", str(device_toml), "--details"]) == 0
    text = capsys.readouterr().out
    assert "against whoever sees the sums that it is in" in text
    assert "secure-sum, in digits-test: sums of 8 devices or more, with the noise of 7 honest ones" in text


def test_status_says_what_secure_aggregation_rest_on(
    make_bench: MakeBench, package: Package, config: DeviceConfig, device_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Identity.generate()
    signed_by = replace(config.device, roster_key=operator.public_key.hex())
    limits = replace(config.limits, accounting="secure", min_devices=8)
    bench = make_bench(
        package=with_secure_aggregation(package), config=replace(config, limits=limits, device=signed_by)
    )
    fleet = SecureFleet(bench, operator=operator)
    text = device_toml.read_text()
    device_toml.write_text(text.replace("[device]", f'[device]\nroster_key = "{signed_by.roster_key}"'))
    fleet.open_round(1)
    bench.acked(1)
    main(["status", str(device_toml), "--details"])
    assert (
        f"sums        protected as long as at least 11 of 12 boards of {fleet.membership_list.name} are honest; no "
        "sum of fewer than 8 is opened"
    ) in capsys.readouterr().out


def test_predict_uses_the_devices_personalized_model(
    trained: Bench, device_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    assert main(["predict", str(device_toml), str(tmp_path / "image.png"), "--json", "--top", "10"]) == 0
    answer = json.loads(capsys.readouterr().out)
    own = trained.store.load_state("digits-test").own
    x = ((pixels / 255 - 0.3) / 0.4).astype(np.float32)[None, None]
    logits = trained.loaded.inference(own, x)[0].astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum()
    assert answer["model"] == "personalised"
    assert [answer["classes"][str(i)] for i in range(10)] == pytest.approx(expected.tolist(), rel=1e-4)
    sql(trained.store, "DELETE FROM states")
    assert main(["predict", str(device_toml), str(tmp_path / "image.png")]) == 0
    assert "by the fleet's model, of digits-test" in capsys.readouterr().out


def test_predict_takes_many_files_and_names_the_one_that_is_missing(
    trained: Bench, device_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number in (0, 2):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(files[number])
    names = list(map(str, files))
    alone = []
    for name in (names[0], names[2]):
        assert main(["predict", str(device_toml), name, "--json"]) == 0
        alone.append(capsys.readouterr().out)
    assert main(["predict", str(device_toml), *names, "--json"]) == 2, "one is missing"
    said = capsys.readouterr()
    assert said.out == "".join(alone)
    assert [json.loads(line)["file"] for line in said.out.splitlines()] == [names[0], names[2]]
    (error,) = said.err.splitlines()
    assert names[1] in error
    assert names[0] not in error
    assert main(["predict", str(device_toml), names[0], names[2], "--top", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "by the board's personalized model, of digits-test"
    assert [line.partition(":")[0] for line in lines] == [names[0], names[2]]
    assert all(line.count("%") == 2 for line in lines)


def test_predict_without_a_model_or_an_image(
    make_bench: MakeBench, device_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make_bench()
    assert main(["predict", str(device_toml), str(tmp_path / "none.png")]) == 2
    assert "no model yet" in capsys.readouterr().err
    bench.train(1)
    assert main(["predict", str(device_toml), str(tmp_path / "none.png")]) == 2
    assert "cannot be read as an image" in capsys.readouterr().err


def test_what_another_user_owns_is_said(
    device_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has typed the command without sudo -u hushfleet."""
    close(tmp_path / "etc", monkeypatch)
    assert main(["status", str(tmp_path / "etc/device.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err
    close(tmp_path / "state", monkeypatch)
    for command in (["status"], ["add", "--label", "cat", "photo.jpg"]):
        assert main([command[0], str(device_toml), *command[1:]]) == 1
        assert "cannot be opened: [Errno 13] Permission denied" in capsys.readouterr().err


def test_exit_codes_of_mistakes(device_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err.startswith("error: there is no file")
    assert main(["status", str(device_toml)]) == 1
    assert "no store" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["run"])
    assert caught.value.code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_is_a_clean_stop(device_toml: Path, tmp_path: Path, number: int, code: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        process = subprocess.Popen(
            [sys.executable, "-m", "edge_client", str(device_toml)],
            env={**ENVIRONMENT, "NOTIFY_SOCKET": str(tmp_path / "notify")},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert systemd.recv(100) == b"READY=1"
            with pytest.raises(Exception, match="in use by another process"):
                DeviceStore(tmp_path / "state" / "store.sqlite", device=DEVICE)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            assert systemd.recv(100) == b"STOPPING=1"
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    with DeviceStore(tmp_path / "state" / "store.sqlite", device=DEVICE) as store:
        assert store.next_session() == 2


def test_stopping_says_goodbye(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.steps()
    bench.agent.close()
    bench.server.pump()
    assert [birth.state for birth in bench.server.births] == ["ready", "sleeping"]


def test_the_will_says_lost_with_the_session(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.steps()
    bench.restart()
    bench.steps()
    bench.hub.cut(DEVICE)
    bench.server.pump()
    assert [(birth.state, birth.session) for birth in bench.server.births[-2:]] == [("ready", 2), ("lost", 2)]


def test_the_watchdog_is_fed_by_the_clock(tmp_path: Path) -> None:
    now = [0.0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        supervisor = Supervisor(str(tmp_path / "notify"), 40.0, clock=lambda: now[0])
        for _ in range(100):
            supervisor.alive()
            now[0] += 1.0
        fed = [systemd.recv(100) for _ in range(3)]
        assert fed == [b"WATCHDOG=1"] * 3
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
    Supervisor.from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "3000000"}).alive()
    Supervisor.from_environment({}).ready()


def test_the_watchdog_is_fed_again_after_a_failure(tmp_path: Path) -> None:
    now = [0.0]
    supervisor = Supervisor(str(tmp_path / "notify"), 40.0, clock=lambda: now[0])
    supervisor.alive()  # nobody is there
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        now[0] += 40.0
        supervisor.alive()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_metrics_and_losses_are_in_no_message(make_bench: MakeBench) -> None:
    """Every message that a device sends in a round is one of the known kinds with the known fields."""
    bench = make_bench()
    spy = bench.hub.link("spy")
    spy.subscribe("#")
    spy.open()
    bench.train(1)
    topics: dict[str, int] = {}
    while (event := spy.receive(0.0)) is not None:
        if isinstance(event, Delivery) and f"/c/{DEVICE}/up/" in event.topic:
            kind = event.topic.rpartition("/")[2]
            topics[kind] = topics.get(kind, 0) + 1
            if kind != "chunk":
                decode_message(event.payload, federation="test", public_key=bench.store.identity.public_key)
    assert set(topics) == {"state", "msg", "chunk"}
    assert topics["state"] == 3  # ready, training, ready
    assert topics["msg"] == len(bench.server.wants) + len(bench.server.offers) + len(bench.server.asks)
    assert len(bench.server.asks) == 1
    assert isinstance(bench.hub, LocalHub)


def test_a_board_needs_no_heavy_package(package: Package, tmp_path: Path) -> None:
    model = package.spec.model
    (tmp_path / "package.bin").write_bytes(package.data)
    (tmp_path / "gradient.onnx").write_bytes(package.blobs[model.gradient.digest])
    script = """
        import runpy, sys
        from pathlib import Path
        REFUSED = {"torch", "torchvision", "onnx", "onnxscript", "opacus", "pydantic", "typer", "rich", "sklearn",
                   "matplotlib", "scipy", "pandas"}

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in REFUSED:
                    raise ModuleNotFoundError(f"{name} must not be imported on a board", name=name)

        sys.meta_path.insert(0, Refuse())
        import numpy as np
        import hushfleet.edge_client.agent, hushfleet.edge_client.worker.predict, hushfleet.wire.link.mqtt
        from hushfleet.learning.graph_session import GradientGraph
        from hushfleet.learning.graph_safety import check_graph
        from hushfleet.wire.format.spec import TaskSpec
        folder = Path(sys.argv[1])
        spec = TaskSpec.from_bytes((folder / "package.bin").read_bytes())
        graph = (folder / "gradient.onnx").read_bytes()
        check_graph(graph, max_bytes=1 << 24)
        rng = np.random.default_rng(0)
        params = rng.normal(0, 0.1, spec.model.layout.size).astype(np.float32)
        x = rng.normal(0, 1, (4, *spec.model.input_shape)).astype(np.float32)
        dropout = [np.ones((4, *d.shape), np.float32) for d in spec.model.dropout]
        loss, gradient = GradientGraph(graph, spec.model.layout)(params, x, np.arange(4), dropout)
        step = params - np.float32(0.01) * gradient
        after, _ = GradientGraph(graph, spec.model.layout)(step, x, np.arange(4), dropout)
        print("loss fell" if after < loss else "loss rose")
        sys.argv = ["edge_client", "--help"]
        try:
            runpy.run_module("hushfleet.edge_client", run_name="__main__")
        finally:
            print(sorted(REFUSED & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss fell")
    assert "hushfleet-edge device.toml" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_a_new_board_has_no_dot_in_its_id_and_an_old_one_keeps_it(
    device_toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(device_toml.with_name("train.npz"))
    device_toml.write_text(device_toml.read_text().replace(f'"{DEVICE}"', '"board.1"'))
    assert main([str(device_toml)]) == 2
    assert f"{device_toml}: device.id 'board.1' has a '.'" in capsys.readouterr().err
    monkeypatch.setattr("hushfleet.edge_client.agent.Agent.run", lambda agent: None)
    DeviceStore(device_toml.with_name("state") / "store.sqlite", device="board.1").close()
    assert main([str(device_toml)]) == 0


def test_a_mistyped_command_is_told_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["statu", "device.toml"])
    assert "there is no command 'statu'; did you mean status?" in capsys.readouterr().err
    assert main(["absent.toml"]) == 2
    assert "there is no file absent.toml" in capsys.readouterr().err


def test_a_command_that_went_says_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["update", "device.toml", "new.hfr"])
    assert "update went after 0.3; releases come over the network: hushfleet release rollout" in capsys.readouterr().err
